// The order of accesses to global memory that a kernel writes. Of every four bytes of the regions
// it is known which thread wrote them last, and when; an access is legal when its thread knows of
// that write. Within a cluster that is said by the clocks. Clusters tell each other by flags: a
// release leaves what its thread knows at the flag's address, and whoever acquires it there learns
// that.
#pragma once

#include "shadow.h"

namespace kittens::inline on_cpu {
namespace emulated {

enum class GlobalAccess : uint8_t {
    read,
    async_read,
    write,
    async_write,
    add,
    async_add,
    flag_read,
    flag
};

inline bool is_write(GlobalAccess how) {
    return how != GlobalAccess::read && how != GlobalAccess::async_read &&
           how != GlobalAccess::flag_read;
}
inline bool is_async(GlobalAccess how) {
    return how == GlobalAccess::async_read || how == GlobalAccess::async_write ||
           how == GlobalAccess::async_add;
}
// Whether no order is needed against another such access.
inline bool is_atomic(GlobalAccess how) {
    return how == GlobalAccess::add || how == GlobalAccess::async_add || how == GlobalAccess::flag;
}

// The last write to four bytes.
struct GlobalMark {
    static constexpr uint32_t IN_FLIGHT = ~0u;  // a time that nobody knows of

    uint32_t time = 0, cluster = 0;
    uint16_t thread = 0;  // in the cluster
    uint8_t bytes = 0;    // mask
    GlobalAccess how = GlobalAccess::write;
    bool is_one_of_several = false;  // unordered writes of one value
    bool has_landed = false;         // of a copy in flight: its bytes are there
};
inline bool is_write_by_copy(const GlobalMark& m) { return m.how == GlobalAccess::async_write; }
// Of a copy: where another cluster's may come before or after.
using GlobalConflicts = std::vector<std::pair<uintptr_t, GlobalMark>>;

class GlobalOrder {
  public:
    GlobalOrder(const Options& options, dim3 grid, dim3 cluster, int threads)
        : grid_(grid),
          cluster_(cluster),
          threads_(threads),
          locks_(options.host_threads > 1),
          late_(options.policy == Policy::on_wait || options.policy == Policy::random) {
        for (const Region& r : options.regions) {
            if (r.writable) regions_.push_back({r, std::vector<Page>((r.bytes + 4095) / 4096)});
        }
    }

    // `value`: what a thread writes.
    void access(const void* pointer, uint32_t bytes, GlobalAccess how, const char* what,
                const void* value = nullptr, GlobalConflicts* conflicts = nullptr) {
        const auto begin = reinterpret_cast<uintptr_t>(pointer);
        const auto lock = this->lock();
        Marked* in = find(begin);
        if (in == nullptr) return;
        const Thread& t = self();
        const uint32_t now = is_async(how) ? GlobalMark::IN_FLIGHT : t.now();
        const GlobalMark mine{now, machine->number, static_cast<uint16_t>(t.index), 0, how};
        for (uintptr_t a = begin & ~uintptr_t(3); a < begin + bytes; a += 4) {
            const uintptr_t first = std::max(a, begin), end = std::min(a + 4, begin + bytes);
            const auto mask = static_cast<uint8_t>(((1u << (end - first)) - 1) << (first - a));
            GlobalMark& m = in->mark(a);
            const bool fits = (m.bytes & mask) == 0 || how == GlobalAccess::flag_read ||
                              (is_atomic(how) && is_atomic(m.how)) || knows_any(t, m, how, a);
            if (!fits) {
                const auto* from = static_cast<const uint8_t*>(value);
                const auto* there = reinterpret_cast<const uint8_t*>(first);
                const bool of_another = m.cluster != machine->number;
                if (how == GlobalAccess::async_write &&
                    (is_write_by_copy(m) || (of_another && m.how == GlobalAccess::write))) {
                    // Tiles of one thread or cluster may overlap, with one value; with what others
                    // have copied or stored it is compared when it is there.
                    if (conflicts && of_another) conflicts->push_back({first, m});
                } else if (locks_ && how == GlobalAccess::write && from != nullptr && of_another &&
                           is_write_by_copy(m) && m.time == GlobalMark::IN_FLIGHT &&
                           !m.has_landed) {
                    // The copy's bytes are not there yet: they are compared when they come.
                    std::vector<uint8_t> stored(from + (first - begin), from + (end - begin));
                    before_copies_[first].push_back({mine, std::move(stored)});
                    note_equal(m, a, mine, mask);
                    continue;
                } else if (from != nullptr &&
                           std::memcmp(from + (first - begin), there, end - first) == 0) {
                    // Two writes of one value may come in any order: it is enough to know of one.
                    note_equal(m, a, mine, mask);
                    continue;
                } else {
                    complain(t, m, how, what, in->region, first);
                }
            }
            if (is_write(how)) {
                if (m.is_one_of_several) equal_.erase(a);
                m = mine;
                m.bytes = mask;
            }
        }
    }
    // A copy that another cluster's has not been ordered with brings its bytes to `place`.
    void compare(uintptr_t place, const GlobalMark& other, const uint8_t* bytes, uintptr_t first,
                 uint32_t count, const char* what) {
        if (locks_ || place < first || place >= first + count) return;
        const size_t rest = std::min<size_t>(4, first + count - place);
        if (std::memcmp(reinterpret_cast<const void*>(place), bytes + (place - first), rest) != 0) {
            throw_differs(place, other, what);
        }
    }
    // Held while a copy's bytes are stored, and before `land`.
    std::unique_lock<std::mutex> lock() {
        return locks_ ? std::unique_lock(mutex_) : std::unique_lock<std::mutex>();
    }
    // A copy's bytes come to `first`. What threads of other clusters, on other host threads, have
    // stored there since it was issued is the same.
    void land(const uint8_t* bytes, uintptr_t first, uint32_t count, const char* what) {
        Marked* in = locks_ ? find(first) : nullptr;
        if (in == nullptr) return;
        for (uintptr_t a = first & ~uintptr_t(3); a < first + count; a += 4) {
            GlobalMark& m = in->mark(a);
            if (m.cluster == machine->number && m.time == GlobalMark::IN_FLIGHT) {
                m.has_landed = true;
            }
        }
        const auto end = before_copies_.lower_bound(first + count);
        const auto begin = before_copies_.lower_bound(first);
        for (auto at = begin; at != end; ++at) {
            for (const auto& [writer, stored] : at->second) {
                const size_t rest = std::min<size_t>(stored.size(), first + count - at->first);
                if (std::memcmp(stored.data(), bytes + (at->first - first), rest) != 0) {
                    throw_differs(at->first, writer, what);
                }
            }
        }
        before_copies_.erase(begin, end);
    }
    // The running thread has waited for its asynchronous writes.
    void finish(const void* pointer, uint32_t bytes) {
        const auto begin = reinterpret_cast<uintptr_t>(pointer);
        const auto lock = this->lock();
        Marked* in = find(begin);
        if (in == nullptr) return;
        const Thread& t = self();
        for (uintptr_t a = begin & ~uintptr_t(3); a < begin + bytes; a += 4) {
            GlobalMark& m = in->mark(a);
            if (m.cluster == machine->number && m.thread == t.index &&
                m.time == GlobalMark::IN_FLIGHT) {
                m.time = t.now();
            }
        }
    }

    // ---- flags ----

    // Before the flag is written. A store replaces what was released before, an atomic operation
    // adds to it. Of a relaxed one, what the thread knew at its last fence.
    template <class T>
    void release(const T* pointer, bool relaxed, bool replaces) {
        Thread& t = self();
        const auto lock = this->lock();
        Flag& flag = flags_[reinterpret_cast<uintptr_t>(pointer)];
        std::memcpy(&flag.now.value, pointer, sizeof(T));
        if (flag.writes.empty()) flag.at_launch = flag.now.value;
        flag.before = flag.now;
        const bool tells = !relaxed || t.release_fence != 0;
        const uint32_t time = relaxed && tells ? t.release_fence : t.now();
        flag.writes.push_back(
            {time, machine->number, static_cast<uint16_t>(t.index), 1, GlobalAccess::flag});
        // Whoever knows of the fence knows of the write that followed it.
        if (Marked* in = find(reinterpret_cast<uintptr_t>(pointer))) {
            for (uint32_t i = 0; i < sizeof(T); i += 4) {
                in->mark(reinterpret_cast<uintptr_t>(pointer) + i).time = time;
            }
        }
        if (replaces) flag.now.told = nullptr;
        if (tells) flag.now.told = united(flag.now.told, known_to(t, time));
        tick(t);
    }
    // What a load of a flag brings. A thread that knows nothing of the last write may still see the
    // value before; one that knows of none, what was there before the launch. Where everything is
    // late, each does so once: flags that an earlier launch has left set then end no wait unseen.
    template <class T>
    T acquire(const T* pointer, bool relaxed) {
        Thread& t = self();
        const auto lock = this->lock();
        T value = __atomic_load_n(pointer, __ATOMIC_ACQUIRE);
        const auto found = flags_.find(reinterpret_cast<uintptr_t>(pointer));
        if (found == flags_.end()) return value;
        const Flag& flag = found->second;
        const Version* seen = &flag.now;
        const auto known = [&](const GlobalMark& m) { return knows(t, m, false); };
        if (late_ && !known(flag.writes.back())) {
            int& loads = t.flag_loads[pointer];
            if (++loads == 1 && std::ranges::none_of(flag.writes, known)) {
                std::memcpy(&value, &flag.at_launch, sizeof(T));
                return value;
            }
            if (loads <= 2) {
                loads = 2;
                seen = &flag.before;
                std::memcpy(&value, &seen->value, sizeof(T));
            }
        }
        if (relaxed)
            t.acquired = united(t.acquired, seen->told);
        else
            learn(t, seen->told);
        return value;
    }
    // By an atomic operation, which always brings the last value.
    void acquire_relaxed(const void* pointer) {
        Thread& t = self();
        const auto lock = this->lock();
        const auto found = flags_.find(reinterpret_cast<uintptr_t>(pointer));
        if (found != flags_.end()) t.acquired = united(t.acquired, found->second.now.told);
    }
    static void learn(Thread& t, const std::shared_ptr<const Others>& told) {
        if (!told) return;
        t.clock.others = united(t.clock.others, told);
        t.clock.version = 0;
        const auto own = told->find(machine->number);
        if (own == told->end()) return;
        Clock::raise(t.clock.seen, own->second->seen);
        Clock::raise(t.clock.fenced_global, own->second->fenced);
    }

  private:
    using Page = std::unique_ptr<std::array<GlobalMark, 1024>>;
    struct Marked {
        Region region;
        std::vector<Page> pages;

        uintptr_t begin() const { return reinterpret_cast<uintptr_t>(region.begin); }
        // Counted from the four bytes in which the region begins.
        GlobalMark& mark(uintptr_t address) {
            const size_t i = (address - (begin() & ~uintptr_t(3))) / 4;
            if (i / 1024 >= pages.size()) pages.resize(i / 1024 + 1);
            Page& page = pages[i / 1024];
            if (!page) page = std::make_unique<std::array<GlobalMark, 1024>>();
            return (*page)[i % 1024];
        }
    };

    struct Version {
        uint64_t value = 0;
        std::shared_ptr<const Others> told;
    };
    struct Flag {
        uint64_t at_launch = 0;
        Version before, now;  // the last but one and the last; the latter's value is in memory
        std::vector<GlobalMark> writes;
    };

    static std::shared_ptr<const Others> known_to(const Thread& t, uint32_t own_time) {
        auto snapshot = std::make_shared<Snapshot>();
        const auto threads = static_cast<size_t>(machine->thread_count);
        snapshot->seen = t.clock.seen;
        snapshot->seen.resize(threads);
        snapshot->seen[static_cast<size_t>(t.index)] = own_time;
        snapshot->fenced = t.clock.fenced_global;
        auto all =
            t.clock.others ? std::make_shared<Others>(*t.clock.others) : std::make_shared<Others>();
        (*all)[machine->number] = std::move(snapshot);
        return all;
    }
    Marked* find(uintptr_t address) {
        for (Marked& m : regions_) {
            if (address >= m.begin() && address < m.begin() + m.region.bytes) return &m;
        }
        return nullptr;
    }
    void note_equal(GlobalMark& m, uintptr_t place, const GlobalMark& other, uint8_t mask) {
        m.is_one_of_several = true;
        equal_[place].push_back(other);
        equal_[place].back().bytes = mask;
    }
    [[noreturn]] void throw_differs(uintptr_t place, const GlobalMark& other, const char* what) {
        const Marked& in = *find(place);
        throw Error("kittens emulator: kernel " + machine->grid->name + ": " + what + " to byte " +
                    std::to_string(place - in.begin()) + " of '" + in.region.name +
                    "' brings another value than that of " + describe_writer(other) +
                    ": no barrier or flag (release and acquire) in between");
    }
    // Of a thread's own writes and those of others alike; the async proxy sees what threads wrote
    // through a proxy fence.
    static bool knows(const Thread& t, const GlobalMark& m, bool async) {
        const bool by_thread = !is_async(m.how);
        const auto up_to = [&](const std::vector<uint32_t>& times) {
            return m.thread < times.size() && m.time <= times[m.thread];
        };
        if (m.time == GlobalMark::IN_FLIGHT) return false;
        if (m.cluster == machine->number) {
            return up_to(async && by_thread ? t.clock.fenced_global : t.clock.seen);
        }
        if (!t.clock.others) return false;
        const auto found = t.clock.others->find(m.cluster);
        if (found == t.clock.others->end()) return false;
        return up_to(async && by_thread ? found->second->fenced : found->second->seen);
    }

    bool knows_any(const Thread& t, const GlobalMark& m, GlobalAccess how, uintptr_t place) const {
        if (knows(t, m, is_async(how))) return true;
        if (!m.is_one_of_several || is_write(how)) return false;
        return std::ranges::any_of(equal_.at(place), [&](const GlobalMark& other) {
            return knows(t, other, is_async(how));
        });
    }

    std::string describe_writer(const GlobalMark& m) const {
        const dim3 n(grid_.x / cluster_.x, grid_.y / cluster_.y, grid_.z / cluster_.z);
        const unsigned rank = m.thread / unsigned(threads_), id = m.thread % unsigned(threads_);
        const uint3 at{m.cluster % n.x * cluster_.x + rank % cluster_.x,
                       m.cluster / n.x % n.y * cluster_.y + rank / cluster_.x % cluster_.y,
                       m.cluster / (n.x * n.y) * cluster_.z + rank / (cluster_.x * cluster_.y)};
        return "block " + describe(at) + ", warp " + std::to_string(id / 32) + ", lane " +
               std::to_string(id % 32);
    }
    [[noreturn]] void complain(const Thread& t, const GlobalMark& m, GlobalAccess how,
                               const char* what, const Region& region, uintptr_t address) const {
        const auto offset = address - reinterpret_cast<uintptr_t>(region.begin);
        const std::string where = std::string(what) + (is_write(how) ? " to" : " of") + " byte " +
                                  std::to_string(offset) + " of '" + region.name +
                                  "', last written by ";
        const std::string writer = describe_writer(m);
        if (m.time == GlobalMark::IN_FLIGHT) {
            fail(where + "a TMA store of " + writer + " that is in flight: no tma_store_wait");
        }
        if (is_async(how) && knows(t, m, false)) {
            fail(where + writer +
                 " and accessed by the async proxy: no fence.proxy.async (fence_async) in between");
        }
        fail(where + writer + ": no barrier or flag (release and acquire) in between");
    }

    dim3 grid_, cluster_;
    int threads_;
    bool locks_;
    bool late_;  // loads of flags
    std::mutex mutex_;
    std::vector<Marked> regions_;
    std::map<uintptr_t, std::vector<GlobalMark>> equal_;  // the other writes of one value
    // What other clusters have stored where a copy is in flight, by address.
    std::map<uintptr_t, std::vector<std::pair<GlobalMark, std::vector<uint8_t>>>> before_copies_;
    std::map<uintptr_t, Flag> flags_;
};

inline void access_global(const void* pointer, uint32_t bytes, GlobalAccess how, const char* what,
                          const void* value = nullptr, GlobalConflicts* conflicts = nullptr) {
    check_global(pointer, bytes, is_write(how), what);
    if (GlobalOrder* order = machine->grid->order) {
        order->access(pointer, bytes, how, what, value, conflicts);
    }
}
// ---- fences ----

// For relaxed operations on flags: those that follow release, those that came before acquire.
void fence_release() {
    if (machine->grid->order == nullptr) return;
    Thread& t = self();
    t.release_fence = t.now();
    tick(t);
}
void fence_acquire() {
    if (machine->grid->order == nullptr) return;
    GlobalOrder::learn(self(), std::exchange(self().acquired, nullptr));
}
// What the thread knows of global memory becomes visible to copies.
void fence_proxy_global() {
    if (machine->grid->order == nullptr) return;
    Thread& t = self();
    Clock& c = t.clock;
    c.version = 0;
    c.fenced_global.resize(static_cast<size_t>(machine->thread_count));
    for (size_t i = 0; i < c.fenced_global.size(); ++i) {
        c.fenced_global[i] = std::max(c.fenced_global[i], c.seen[i]);
    }
    if (c.others) {
        auto fenced = std::make_shared<Others>();
        for (const auto& [cluster, snapshot] : *c.others) {
            (*fenced)[cluster] =
                std::make_shared<Snapshot>(Snapshot{snapshot->seen, snapshot->seen});
        }
        c.others = std::move(fenced);
    }
    tick(t);
}

}  // namespace emulated
}  // namespace kittens::inline on_cpu
