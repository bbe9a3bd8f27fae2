// The state of a cluster of blocks under emulation: threads, warps, warpgroups, barriers,
// operations in flight. Only data; what happens to it is in scheduler.h, shadow.h, barriers.h,
// copies.h and products.h.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstdio>
#include <deque>
#include <exception>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "../calls.h"
#include "fiber.h"
#include "options.h"

namespace kittens::inline on_cpu {
namespace emulated {

constexpr uint32_t SHARED_WINDOW = 1u << 24;  // between the windows of the blocks of a cluster
constexpr uint32_t MAX_BLOCK_SHARED = 232448;
constexpr uint32_t MAX_STATIC_SHARED = 48 << 10;
constexpr int SM_REGISTERS = 65536;

constexpr uint64_t SPLIT_MIX_STEP = 0x9e3779b97f4a7c15u;
inline uint64_t split_mix(uint64_t x) {
    x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9u;
    x = (x ^ x >> 27) * 0x94d049bb133111ebu;
    return x ^ x >> 31;
}
// SplitMix64: a policy draws several numbers for every switch of threads.
struct Random {
    uint64_t state = 0;

    void seed(uint64_t value) { state = value; }
    uint64_t operator()() { return split_mix(state += SPLIT_MIX_STEP); }
};

// What each thread, or each barrier's completed phases, is known to have done. `seen[i]` is the
// time of i up to which its writes are visible; `fenced[i]` the same for the async proxy. One entry
// per thread of the cluster, one for the grids that this one depends on, one per barrier, and one
// per warp: how many products it has waited for.
//
// What a cluster knows of others came through global memory (global_order.h): their threads' times
// when they released it. `fenced_global` is `fenced` for global memory, of this cluster's threads.
struct Snapshot {
    std::vector<uint32_t> seen, fenced;
};
using Others = std::map<uint32_t, std::shared_ptr<const Snapshot>>;  // by the cluster's number
inline std::shared_ptr<const Others> united(std::shared_ptr<const Others> a,
                                            std::shared_ptr<const Others> b);

struct Clock {
    std::vector<uint32_t> seen, fenced, fenced_global;
    std::shared_ptr<const Others> others;
    // Clocks of threads that have one version differ in the threads' own entries alone: those that
    // leave a barrier together, and have since done the same. A barrier's has all of that version.
    // 0: of no version.
    uint64_t version = 0;
    bool is_blank = true;  // whatever the entries are

    void clear(size_t n) {
        seen.assign(n, 0);
        fenced.assign(n, 0);
        fenced_global.clear();
        others = nullptr;
        version = 0;
        is_blank = false;
    }
    void grow(size_t n) {
        if (seen.size() >= n) return;
        seen.resize(n, 0);
        fenced.resize(n, 0);
    }
    void join(const Clock& other) {
        if (other.is_blank) return;
        if (is_blank) {
            *this = other;
            return;
        }
        raise(seen, other.seen);
        raise(fenced, other.fenced);
        raise(fenced_global, other.fenced_global);
        if (other.others != others) others = united(std::move(others), other.others);
        version = other.version;
    }
    // The clock of thread `own`.
    void join_thread(const Clock& other, size_t own) {
        if (is_blank || version == 0 || version != other.version) return join(other);
        seen[own] = std::max(seen[own], other.seen[own]);
        fenced[own] = std::max(fenced[own], other.fenced[own]);
    }
    void forget() { is_blank = true; }
    // What one of several threads has done that the others do, too, if it is `event`.
    void change_version(uint64_t event) {
        if (version == 0) return;
        version = event == 0 ? 0 : split_mix(version + event * SPLIT_MIX_STEP);
    }
    // Of other's entries only those from `first` on.
    void join_from(const Clock& other, size_t first) {
        if (is_blank) clear(other.seen.size());
        grow(other.seen.size());
        raise(seen, other.seen, first);
        raise(fenced, other.fenced, first);
    }
    static void raise(std::vector<uint32_t>& to, const std::vector<uint32_t>& from,
                      size_t first = 0) {
        if (to.size() < from.size()) to.resize(from.size(), 0);
        uint32_t* a = to.data();
        const uint32_t* b = from.data();
        size_t i = first;
        // Four at a time, by hand: -O2 does not vectorise a loop whose length it does not know.
        // Times are far below 2^31, so that they compare as signed numbers.
        typedef int32_t Four __attribute__((vector_size(16), aligned(4), may_alias));
        for (; i + 4 <= from.size(); i += 4) {
            Four& x = *reinterpret_cast<Four*>(a + i);
            const Four y = *reinterpret_cast<const Four*>(b + i);
            x = x < y ? y : x;
        }
        for (; i < from.size(); ++i) a[i] = a[i] < b[i] ? b[i] : a[i];
    }
};

inline std::shared_ptr<const Snapshot> united(const std::shared_ptr<const Snapshot>& a,
                                              const std::shared_ptr<const Snapshot>& b) {
    if (a == b) return a;
    auto both = std::make_shared<Snapshot>(*a);
    Clock::raise(both->seen, b->seen);
    Clock::raise(both->fenced, b->fenced);
    return both;
}
inline std::shared_ptr<const Others> united(std::shared_ptr<const Others> a,
                                            std::shared_ptr<const Others> b) {
    if (!a || !b || a == b) return a ? a : b;
    const auto has_all = [](const Others& all, const Others& some) {
        return std::ranges::all_of(some, [&](const auto& entry) {
            const auto found = all.find(entry.first);
            return found != all.end() && found->second == entry.second;
        });
    };
    if (has_all(*a, *b)) return a;
    if (has_all(*b, *a)) return b;
    auto both = std::make_shared<Others>(*a);
    for (const auto& [cluster, snapshot] : *b) {
        auto& there = (*both)[cluster];
        there = there ? united(there, snapshot) : snapshot;
    }
    return both;
}

struct Block;
struct Cluster;
struct Thread;
class GlobalOrder;

struct Barrier {
    Block* block;
    uint32_t address;
    bool valid = false, fenced = false;
    uint32_t expected = 0, pending = 0;
    int64_t bytes = 0;       // announced and not yet arrived
    uint32_t completed = 0;  // phases, ever
    uint32_t first = 0;      // of them before the latest initialisation
    uint32_t index = 0;      // of the barrier's entry in the clocks
    int in_flight = 0;       // copies that will signal this phase
    int initializer = 0;     // thread, and its time then
    uint32_t initialized_at = 0;
    uint64_t announced = 0;     // phase of the cluster's barrier that tells of the initialisation
    Clock arriving, published;  // of the current phase, of the completed ones
    std::vector<Thread*> waiting;

    uint32_t phase() const { return completed - first; }
};

struct NamedBarrier {
    int expected = 0;  // 0: nobody has arrived
    bool whole_block = false;
    std::vector<Thread*> arrived, waiting;
    uint64_t generation = 0;
    Clock arriving, published;
};

enum class Wait {
    nothing,
    warp,
    named_barrier,
    mbarrier,
    cluster_barrier,
    products,
    registers,
    turn,  // only for the others to go on
};

// What a thread that cannot run waits for.
struct Waiting {
    Wait kind = Wait::nothing;
    const void* object = nullptr;
    uint64_t value = 0;
    bool poll = false;  // gives up when nothing else can run
};

// One 16-byte-per-row operation of copying by one thread in groups: a TMA store.
struct Store {
    std::function<void()> read, write, finish;          // finish: it has been waited for
    std::vector<std::pair<uint32_t, uint32_t>> source;  // address, bytes
    bool has_read = false, has_written = false, released = false;
};
struct SmallCopy {  // cp.async
    uint32_t destination, bytes, read_bytes;
    const void* source;
    bool done = false;
};
struct Accumulator;

struct Thread {
    Fiber fiber;
    Block* block = nullptr;
    int id = 0;     // in the block
    int index = 0;  // in the cluster
    int lane = 0, warp = 0;
    uint3 at{0, 0, 0};
    bool finished = false, is_ready = false;
    std::array<uint64_t, 16> arrivals{};  // at each named barrier: its generation, + 1
    Waiting waiting;
    Clock clock;
    uint64_t cluster_waited = 0;  // phase of the cluster's barrier
    int registers = 0;
    int reallocations = 0;

    std::vector<std::vector<Store>> stores;  // groups; the last is open
    size_t stores_waited = 0;
    std::vector<std::vector<SmallCopy>> small_copies;

    // Products.
    uint64_t products = 0, commits = 0;
    bool products_fenced = false;
    struct InFlight {
        std::shared_ptr<Accumulator> accumulator;
        uint64_t last = 0;  // product that uses it
    };
    std::vector<InFlight> in_flight;
    struct HeldOperand {
        const uint32_t* registers;
        std::array<uint32_t, 4> value;
        uint64_t product;
    };
    std::vector<HeldOperand> held_operands;

    // Flags in global memory: what relaxed loads have brought, until a fence; when the last was.
    std::shared_ptr<const Others> acquired;
    uint32_t release_fence = 0;
    std::map<const void*, int> flag_loads;  // of values that were not the last

    uint32_t now() const { return clock.seen[static_cast<size_t>(index)]; }
};

struct Warp {
    std::array<Thread*, 32> threads{};
    std::array<Lane, 32> lanes;
    const char* operation = nullptr;
    uint32_t arrived = 0, alive = 0;
    bool only_alive = false;  // lanes that have ended do not count
    uint64_t generation = 0;
    uint32_t products_waited = 0;  // by the lane that has waited for most
    Clock arriving, published;
};

struct Product;
struct Warpgroup {
    std::vector<Thread*> threads;
    std::deque<std::shared_ptr<Product>> products;  // the oldest first
    uint64_t first = 0;                             // number of the oldest
    uint64_t executed = 0;                          // products
    uint64_t acknowledged = 0;
    std::vector<uint64_t> commits;  // products before each
    std::vector<int> reallocations;
    // Of each 16 bytes of shared memory, the number after the last product whose part in each of
    // the four warps reads them; and of all shared memory.
    std::vector<std::array<uint32_t, 4>> reads;
    uint32_t last_reader = 0;
    // Of each entry of the clocks, the latest write that all threads were found to see through the
    // async proxy: they do not forget it.
    std::vector<uint32_t> seen_by_all;
};

// Four bytes of shared memory: who wrote which of them last, and when.
struct Granule {
    uint32_t time = 0;
    uint16_t writer = 0;  // entry of the clocks
    uint8_t bytes = 0;    // mask
    uint8_t kind = 0;
};
enum GranuleKind : uint8_t { unwritten = 0, by_thread = 1, by_copy = 2, by_small_copy = 3 };

// Who has read which of four bytes since they were written: one entry of the clocks, which knows of
// those before it, or a set.
struct Readers {
    uint32_t time = 0;    // of several: the number of their set
    uint16_t reader = 0;  // entry of the clocks
    uint8_t bytes = 0;    // mask; 0: nobody
    bool several = false;
};
struct ReaderSet {
    struct Other {
        uint16_t reader;
        uint32_t read;
    };
    std::vector<uint32_t> threads;  // of the block: time * 16 + mask
    std::vector<Other> others;
};

struct Block {
    Cluster* cluster = nullptr;
    uint3 at{0, 0, 0};
    int rank = 0;
    uint8_t* shared = nullptr;  // from address 0
    uint32_t shared_end = 0;
    std::map<const void*, uint32_t> statics;  // addresses of variables behind the dynamic memory
    std::vector<Granule> granules;
    std::vector<uint8_t> copies_from;  // in flight, that read each 16 bytes
    std::vector<Readers> readers;
    std::vector<ReaderSet> reader_sets;
    std::vector<uint32_t> free_sets;
    std::vector<Thread> threads;
    std::vector<Warp> warps;
    std::vector<Warpgroup> warpgroups;
    std::map<uint32_t, Barrier> barriers;
    std::array<NamedBarrier, 16> named;
    int registers = 0, free_registers = 0;
    int alive = 0;
    int copies_to_others = 0;  // in flight, from its shared memory
};

// A copy into shared memory that will signal a barrier.
struct Copy {
    Barrier* barrier;
    uint32_t bytes;
    std::function<void()> move;
};

// The clusters that run at the same time, one on each of some threads of the host, where they may
// wait for each other through global memory: whether any of them gets on. A thread that has yet to
// begin its cluster may bring what the others wait for.
class RunningClusters {
  public:
    // How often a cluster's threads have polled in vain since something last happened in any.
    struct Polls {
        uint64_t epoch = 0;
        int count = 0;
    };
    explicit RunningClusters(uint64_t host_threads) : running_(host_threads) {}
    // A cluster begins or ends.
    void change() {
        const std::lock_guard lock(mutex_);
        begin_epoch();
    }
    // The thread of the host has no more clusters.
    void leave() {
        const std::lock_guard lock(mutex_);
        --running_;
        begin_epoch();
    }
    // `progress`: something has happened in the cluster since it last polled. False: in none for
    // long, however often each has polled.
    bool poll(Polls& polls, bool progress) {
        const std::lock_guard lock(mutex_);
        if (progress) begin_epoch();
        if (polls.epoch != epoch_) polls = {epoch_, 0};
        if (++polls.count == LIMIT) ++stuck_;
        return stuck_ < running_;
    }

  private:
    static constexpr int LIMIT = 10000;

    void begin_epoch() {
        ++epoch_;
        stuck_ = 0;
    }
    std::mutex mutex_;
    uint64_t epoch_ = 1;
    uint64_t running_, stuck_ = 0;  // stuck: have polled to the limit in this epoch
};

struct Grid {
    dim3 grid, block, cluster;
    uint32_t shared_bytes = 0;
    bool dependent = false;
    int block_registers = SM_REGISTERS;
    std::string name;
    const KernelCall* call = nullptr;
    const Options* options = nullptr;
    RunningClusters* running = nullptr;
    GlobalOrder* order = nullptr;  // of global memory, where it is checked
};

// What clocks of one version learn from a clock of another: the entries that rise.
struct Difference {
    uint64_t version = 0, other = 0;
    std::vector<std::pair<uint32_t, uint32_t>> seen, fenced;  // entry, time

    static void collect(std::vector<std::pair<uint32_t, uint32_t>>& list,
                        const std::vector<uint32_t>& of, const std::vector<uint32_t>& other,
                        size_t own) {
        list.clear();
        for (size_t i = 0; i < other.size(); ++i) {
            // Of this thread's own entry the others may know less.
            if (i == own || other[i] > of[i]) list.push_back({uint32_t(i), other[i]});
        }
    }
    static void apply(const std::vector<std::pair<uint32_t, uint32_t>>& list,
                      std::vector<uint32_t>& to) {
        for (const auto& [i, time] : list) to[i] = std::max(to[i], time);
    }
};

struct Cluster {
    const Grid* grid = nullptr;
    const Options* options = nullptr;
    uint32_t number = 0;  // in the grid
    std::vector<Block> blocks;
    std::deque<Thread*> ready;
    Fiber host;
    Thread* current = nullptr;
    Random random;
    std::deque<Copy> copies;
    int finished = 0, thread_count = 0;
    uint64_t progress = 0;
    size_t clock_entries = 0;
    uint64_t versions = 1;  // of clocks: the latest; the first is that of all threads at launch
    std::array<Difference, 8> differences;
    std::vector<Barrier*> barrier_of_entry;
    std::vector<Thread*> registers_wanted;
    // Barrier of the cluster.
    int cluster_arrived = 0;
    uint64_t cluster_phase = 0;
    std::vector<uint64_t> cluster_arrivals;  // of each thread
    Clock cluster_arriving, cluster_published;
    std::exception_ptr error;
    bool check_order = true;

    size_t dependency_entry() const { return static_cast<size_t>(thread_count); }
    size_t product_entry(const Block& block, size_t warp) const {
        return dependency_entry() + 1 + static_cast<size_t>(block.rank) * block.warps.size() + warp;
    }
};

inline constinit thread_local Cluster* machine = nullptr;

inline Thread& self() { return *machine->current; }
inline Warp& warp_of(Thread& t) { return t.block->warps[static_cast<size_t>(t.warp)]; }
inline Warpgroup& warpgroup_of(Thread& t) {
    return t.block->warpgroups[static_cast<size_t>(t.warp / 4)];
}

inline std::string hex(uint64_t value) {
    char text[24];
    std::snprintf(text, sizeof(text), "0x%llx", static_cast<unsigned long long>(value));
    return text;
}
inline std::string describe(uint3 at) {
    return "(" + std::to_string(at.x) + ", " + std::to_string(at.y) + ", " + std::to_string(at.z) +
           ")";
}
inline std::string describe(const Thread& t) {
    return "block " + describe(t.block->at) + ", warp " + std::to_string(t.warp) + ", lane " +
           std::to_string(t.lane);
}
inline std::string describe(const Barrier& b) {
    return "mbarrier " + hex(b.address) + " of block " + describe(b.block->at) + " (phase " +
           std::to_string(b.phase()) + ": " + std::to_string(b.pending) + " of " +
           std::to_string(b.expected) + " arrivals and " + std::to_string(b.bytes) +
           " bytes pending)";
}
// Ends the launch.
[[noreturn]] inline void fail(const std::string& what) {
    throw Error("kittens emulator: kernel " + machine->grid->name + ", " + describe(self()) + ": " +
                what);
}

[[noreturn]] void fail(const char* sentence) { fail(std::string(sentence)); }

}  // namespace emulated
}  // namespace kittens::inline on_cpu
