// Asynchronous copies: TMA tiles, bulk ranges, cp.async. A copy into shared memory is queued with
// the barrier that it will signal; a store belongs to a group of its thread. When each is carried
// out is the policy's choice.
#pragma once

#include <mutex>

#include "barriers.h"
#include "tensor_map.h"

namespace kittens::inline on_cpu {
namespace emulated {

inline bool copies_at_issue() {
    const Policy p = machine->options->policy;
    return p == Policy::eager || p == Policy::late_mma;
}

// ---- into shared memory ----

inline void complete_copy(size_t index) {
    Copy copy = std::move(machine->copies[index]);
    machine->copies.erase(machine->copies.begin() + static_cast<std::ptrdiff_t>(index));
    ++machine->progress;
    copy.move();
    --copy.barrier->in_flight;
    change_bytes(*copy.barrier, -static_cast<int64_t>(copy.bytes));
}
inline void issue_copy(Barrier& barrier, uint32_t bytes, std::function<void()> move) {
    ++barrier.in_flight;
    machine->copies.push_back({&barrier, bytes, std::move(move)});
    if (copies_at_issue()) complete_copy(machine->copies.size() - 1);
}
inline Barrier& barrier_of_copy(uint32_t address, const char* what) {
    Barrier& b = barrier_at(address, what);
    if (!b.fenced) {
        fail(std::string(what) + ": no mbarrier_init_fence has followed the initialisation of " +
             describe(b));
    }
    return b;
}

// A box of a tensor: calls visit(byte in the box, where the tensor's row begins, whether that is in
// the tensor) for each row of the box. Addresses are sums modulo 2^64, as the hardware's.
template <class Visit>
inline void for_each_row(const TensorMap& m, const BoxOrigin& origin, Visit visit) {
    const uint32_t row_bytes = uint32_t(m.box[0]) * m.element_bytes;
    const uint32_t rows = uint32_t(m.box[1]) * m.box[2] * m.box[3] * m.box[4];
    for (uint32_t row = 0, offset = 0; row < rows; ++row, offset += row_bytes) {
        bool inside = true;
        uint64_t place = m.data;
        for (uint32_t d = 1, rest = row; d < 5; rest /= m.box[d], ++d) {
            const int64_t x = int64_t(origin.at[d]) + rest % m.box[d];
            inside = inside && x >= 0 && x < static_cast<int64_t>(m.dims[d]);
            place += static_cast<uint64_t>(x) * m.stride_bytes[d - 1];
        }
        visit(offset, place, inside);
    }
}
// Calls visit(byte in the box, pointer into the tensor or nullptr outside, bytes) for pieces of 16
// bytes of each row.
template <class Visit>
inline void for_each_piece(const TensorMap& m, const BoxOrigin& origin, Visit visit) {
    const uint32_t row_bytes = uint32_t(m.box[0]) * m.element_bytes;
    const int64_t width = static_cast<int64_t>(m.dims[0]) * m.element_bytes;
    const int64_t first = int64_t(origin.at[0]) * m.element_bytes;
    for_each_row(m, origin, [&](uint32_t offset, uint64_t place, bool inside) {
        for (uint32_t b = 0; b < row_bytes; b += 16) {
            // Columns begin at multiples of 16 bytes: a piece is outside or begins inside.
            const int64_t from = first + b;
            const int64_t rest = width - from;
            const bool has = inside && from >= 0 && rest > 0;
            visit(offset + b,
                  has ? reinterpret_cast<uint8_t*>(place + static_cast<uint64_t>(from)) : nullptr,
                  static_cast<uint32_t>(!has        ? 0
                                        : rest < 16 ? rest
                                                    : 16));
        }
    });
}
// Calls visit(pointer into the tensor, bytes) for what lies inside of each row; in whole pieces of
// 16 bytes where they are written: the hardware clips columns so.
template <class Visit>
inline void for_each_range(const TensorMap& m, const BoxOrigin& origin, bool written, Visit visit) {
    const int64_t width = static_cast<int64_t>(m.dims[0]) * m.element_bytes;
    const int64_t first = int64_t(origin.at[0]) * m.element_bytes;
    const int64_t begin = std::max<int64_t>(first, 0);
    int64_t end = std::min(first + int64_t(m.box[0]) * m.element_bytes, width);
    if (written) end = (end + 15) / 16 * 16;
    if (begin >= end) return;
    for_each_row(m, origin, [&](uint32_t, uint64_t place, bool inside) {
        if (!inside) return;
        visit(reinterpret_cast<uint8_t*>(place + static_cast<uint64_t>(begin)),
              static_cast<uint32_t>(end - begin));
    });
}
inline TensorMap decode_map(const CUtensorMap* map, const BoxOrigin& at, const char* what) {
    TensorMap m;
    std::memcpy(&m, map, sizeof(m));
    if (m.mark != TensorMap::MARK) fail(std::string(what) + ": not a tensor map of the emulator");
    if (m.rank != at.rank) {
        fail(std::string(what) + " with " + std::to_string(at.rank) +
             " coordinates on a tensor map of " + std::to_string(m.rank) + " dimensions");
    }
    if ((int64_t(at.at[0]) * m.element_bytes) % 16 != 0) {
        fail(std::string(what) + " at column " + std::to_string(at.at[0]) + " of " +
             std::to_string(m.element_bytes) +
             "-byte elements: the innermost coordinate must be a multiple of 16 bytes");
    }
    return m;
}
void prefetch_map(const CUtensorMap* map) {
    TensorMap m;
    std::memcpy(&m, map, sizeof(m));
    if (m.mark != TensorMap::MARK) fail("tma_prefetch_map: not a tensor map of the emulator");
}
void prefetch_box(const CUtensorMap* map, const BoxOrigin& at) {
    decode_map(map, at, "tma_prefetch");
}
inline uint32_t box_bytes(const TensorMap& m) {
    return uint32_t(m.box[0]) * m.box[1] * m.box[2] * m.box[3] * m.box[4] * m.element_bytes;
}

inline void load_box_into(Block& block, uint32_t destination, const TensorMap& m,
                          const BoxOrigin& at, Barrier& barrier, const char* what) {
    const Place place{&block, destination};
    const uint32_t bytes = box_bytes(m);
    check_shared(place, bytes, 128, what);
    note_copy_write(place, bytes, barrier, what);
    if (!machine->options->regions.empty() || machine->grid->dependent) {
        for_each_range(m, at, false, [&](const uint8_t* from, uint32_t n) {
            access_global(from, n, GlobalAccess::async_read, what);
        });
    }
    issue_copy(barrier, bytes, [&block, destination, m, at] {
        for_each_piece(m, at, [&](uint32_t offset, uint8_t* from, uint32_t n) {
            uint8_t* to = block.shared + swizzled(destination + offset, m.swizzle_bytes);
            std::memset(to, 0, 16);
            if (from) std::memcpy(to, from, n);
        });
    });
}
void load_box(uint32_t destination, const CUtensorMap* map, const BoxOrigin& at, uint32_t barrier,
              int block_mask) {
    const char* what = block_mask < 0 ? "tma_load" : "tma_load_multicast";
    const TensorMap m = decode_map(map, at, what);
    if (block_mask < 0) {
        const Place place = place_of(destination);
        load_box_into(*place.block, place.address, m, at, barrier_of_copy(barrier, what), what);
        return;
    }
    const auto blocks = static_cast<int>(machine->blocks.size());
    if (block_mask == 0 || (block_mask >> blocks) != 0) {
        fail(std::string(what) + " to the blocks " + hex(static_cast<uint64_t>(block_mask)) +
             " of a cluster of " + std::to_string(blocks));
    }
    for (int rank = 0; rank < blocks; ++rank) {
        if ((block_mask >> rank & 1) == 0) continue;
        const uint32_t window = SHARED_WINDOW * static_cast<uint32_t>(rank + 1);
        Barrier& b = barrier_of_copy(window + barrier % SHARED_WINDOW, what);
        load_box_into(machine->blocks[static_cast<size_t>(rank)], destination % SHARED_WINDOW, m,
                      at, b, what);
    }
}

inline void check_bulk(const void* global, uint32_t bytes, const char* what) {
    if (bytes % 16 != 0 || reinterpret_cast<uintptr_t>(global) % 16 != 0) {
        fail(std::string(what) + " of " + std::to_string(bytes) + " bytes at global address " +
             hex(reinterpret_cast<uintptr_t>(global)) + ": both must be multiples of 16");
    }
}
void load_range(uint32_t destination, const void* source, uint32_t bytes, uint32_t barrier) {
    const char* what = "bulk_load";
    const Place place = place_of(destination);
    check_bulk(source, bytes, what);
    check_shared(place, bytes, 16, what);
    access_global(source, bytes, GlobalAccess::async_read, what);
    Barrier& b = barrier_of_copy(barrier, what);
    note_copy_write(place, bytes, b, what);
    issue_copy(b, bytes, [=] { std::memcpy(place.block->shared + place.address, source, bytes); });
}
void copy_to_cluster(uint32_t destination, uint32_t source, uint32_t bytes, uint32_t barrier) {
    const char* what = "bulk_copy_to_cluster";
    const Place to = place_of(destination), from = place_of(source);
    if (bytes % 16 != 0) fail(std::string(what) + " of " + std::to_string(bytes) + " bytes");
    check_shared(to, bytes, 16, what);
    check_shared(from, bytes, 16, what);
    Barrier& b = barrier_of_copy(barrier, what);
    if (b.block != to.block) fail(std::string(what) + ": data and barrier are of different blocks");
    note_async_read(from, bytes, what);
    note_copy_write(to, bytes, b, what);
    hold_source(*from.block, from.address, bytes, 1);
    ++from.block->copies_to_others;
    const Thread& t = self();
    const uint32_t reader = b.index, phase = b.completed + 1;
    issue_copy(b, bytes, [=, &t] {
        --from.block->copies_to_others;
        std::memcpy(to.block->shared + to.address, from.block->shared + from.address, bytes);
        release_source(*from.block, from.address, bytes, t, reader, phase);
    });
}

// ---- out of shared memory ----

template <class T>
inline T combined(Combine how, T a, T b) {
    const float x = static_cast<float>(a), y = static_cast<float>(b);
    return T(how == Combine::add ? x + y : how == Combine::min ? ::fminf(x, y) : ::fmaxf(x, y));
}
inline std::mutex& reduction_mutex() {
    static std::mutex mutex;
    return mutex;
}
// `n` bytes of elements of the map's type.
inline void combine(CUtensorMapDataType type, Combine how, uint8_t* to, const uint8_t* from,
                    uint32_t n) {
    const auto apply = [&]<class T>(T) {
        for (uint32_t i = 0; i + sizeof(T) <= n; i += sizeof(T)) {
            T a, b;
            std::memcpy(&a, to + i, sizeof(T));
            std::memcpy(&b, from + i, sizeof(T));
            a = combined(how, a, b);
            std::memcpy(to + i, &a, sizeof(T));
        }
    };
    if (type == CU_TENSOR_MAP_DATA_TYPE_FLOAT32) apply(float{});
    if (type == CU_TENSOR_MAP_DATA_TYPE_BFLOAT16) apply(__nv_bfloat16{});
    if (type == CU_TENSOR_MAP_DATA_TYPE_FLOAT16) apply(__half{});
}

inline GlobalAccess access_of(Combine how) {
    return how == Combine::copy ? GlobalAccess::async_write : GlobalAccess::async_add;
}
inline void carry_out(Store& s, bool also_write) {
    if (!s.has_read) s.read(), s.has_read = true;
    if (also_write && !s.has_written) s.write(), s.has_written = true;
}
inline void issue_store(Store store) {
    Thread& t = self();
    for (const auto& [address, bytes] : store.source) hold_source(*t.block, address, bytes, 1);
    if (t.stores.empty()) t.stores.emplace_back();
    t.stores.back().push_back(std::move(store));
    if (copies_at_issue()) carry_out(t.stores.back().back(), true);
}
// Held while a copy's bytes come to global memory.
inline std::unique_lock<std::mutex> lock_order() {
    GlobalOrder* order = machine->grid->order;
    return order ? order->lock() : std::unique_lock<std::mutex>();
}
// Other clusters may have copied and stored to the same place, the same values.
inline void check_landing(const GlobalConflicts& conflicts, const uint8_t* data, uint8_t* to,
                          uint32_t bytes, Combine how, const char* what) {
    GlobalOrder* order = machine->grid->order;
    if (order == nullptr) return;
    const auto first = reinterpret_cast<uintptr_t>(to);
    for (const auto& [place, other] : conflicts) {
        order->compare(place, other, data, first, bytes, what);
    }
    if (how == Combine::copy) order->land(data, first, bytes, what);
}
void store_box(const CUtensorMap* map, uint32_t source, const BoxOrigin& at, Combine how) {
    const char* what = how == Combine::copy ? "tma_store" : "tma_store_reduce";
    const TensorMap m = decode_map(map, at, what);
    const Place from = place_of(source);
    const uint32_t bytes = box_bytes(m);
    check_shared(from, bytes, 128, what);
    for (int i = 0; i < at.rank; ++i) {
        if (at.at[i] < 0) {
            fail(std::string(what) + " with a negative coordinate (" + std::to_string(at.at[i]) +
                 " in dimension " + std::to_string(i) + "), which the hardware refuses");
        }
    }
    note_async_read(from, bytes, what);
    const auto conflicts = std::make_shared<GlobalConflicts>();
    for_each_range(m, at, true, [&](uint8_t* to, uint32_t n) {
        access_global(to, n, access_of(how), what, nullptr, conflicts.get());
    });
    auto data = std::make_shared<std::vector<uint8_t>>();
    Store s;
    s.source = {{from.address, bytes}};
    s.read = [=] {
        data->resize(bytes);
        for (uint32_t i = 0; i < bytes; i += 16) {
            std::memcpy(data->data() + i,
                        from.block->shared + swizzled(from.address + i, m.swizzle_bytes), 16);
        }
    };
    s.write = [=] {
        const std::lock_guard lock(reduction_mutex());
        const auto order_lock = lock_order();
        for_each_piece(m, at, [&](uint32_t offset, uint8_t* to, uint32_t) {
            if (!to) return;
            check_landing(*conflicts, data->data() + offset, to, 16, how, what);
            if (how == Combine::copy)
                std::memcpy(to, data->data() + offset, 16);
            else
                combine(CUtensorMapDataType(m.type), how, to, data->data() + offset, 16);
        });
        data->clear();
    };
    if (GlobalOrder* order = machine->grid->order) {
        s.finish = [=] {
            for_each_range(m, at, true, [&](uint8_t* to, uint32_t n) { order->finish(to, n); });
        };
    }
    issue_store(std::move(s));
}
void store_range(void* destination, uint32_t source, uint32_t bytes, Combine how) {
    const char* what = how == Combine::copy ? "bulk_store" : "bulk_store_add";
    const Place from = place_of(source);
    check_bulk(destination, bytes, what);
    check_shared(from, bytes, 16, what);
    const auto conflicts = std::make_shared<GlobalConflicts>();
    access_global(destination, bytes, access_of(how), what, nullptr, conflicts.get());
    note_async_read(from, bytes, what);
    auto data = std::make_shared<std::vector<uint8_t>>();
    Store s;
    s.source = {{from.address, bytes}};
    s.read = [=] {
        const uint8_t* p = from.block->shared + from.address;
        data->assign(p, p + bytes);
    };
    s.write = [=] {
        const std::lock_guard lock(reduction_mutex());
        const auto order_lock = lock_order();
        auto* to = static_cast<uint8_t*>(destination);
        check_landing(*conflicts, data->data(), to, bytes, how, what);
        if (how == Combine::copy)
            std::memcpy(to, data->data(), bytes);
        else
            combine(CU_TENSOR_MAP_DATA_TYPE_FLOAT32, how, to, data->data(), bytes);
        data->clear();
    };
    if (GlobalOrder* order = machine->grid->order) {
        s.finish = [=] { order->finish(destination, bytes); };
    }
    issue_store(std::move(s));
}
void commit_stores() {
    Thread& t = self();
    if (t.stores.empty()) t.stores.emplace_back();
    t.stores.emplace_back();
}
void wait_for_stores(size_t pending, bool only_read) {
    Thread& t = self();
    if (t.stores.size() <= pending + 1) return;
    const size_t groups = t.stores.size() - 1 - pending;
    const uint32_t now = machine->check_order ? t.now() : 0;
    for (size_t g = 0; g < groups; ++g) {
        for (Store& s : t.stores[g]) {
            carry_out(s, !only_read);
            if (s.released) continue;
            s.released = true;
            for (const auto& [address, bytes] : s.source) {
                release_source(*t.block, address, bytes, t, static_cast<size_t>(t.index), now);
            }
        }
        if (only_read) continue;
        for (const Store& s : t.stores[g]) {
            if (s.finish) s.finish();
        }
        t.stores[g].clear();
    }
}
inline void complete_any_store(Random& random) {
    Block& block = machine->blocks[random() % machine->blocks.size()];
    Thread& t = block.threads[random() % block.threads.size()];
    for (auto& group : t.stores) {
        for (Store& s : group) {
            if (s.has_read && s.has_written) continue;
            carry_out(s, s.has_read || random() % 2 == 0);
            return;
        }
    }
}

// ---- cp.async ----

inline void mark_small_copy(const Place& p, uint32_t bytes, const Granule& as) {
    if (!machine->check_order) return;
    for_each_granule(p.address, bytes, [&](uint32_t a, uint8_t mask) {
        Granule& g = p.block->granules[a / 4];
        g = as;
        g.bytes = mask;
    });
}
inline void carry_out(SmallCopy& c) {
    if (c.done) return;
    const Place p = place_of(c.destination);
    std::memset(p.block->shared + p.address, 0, c.bytes);
    if (c.read_bytes > 0) std::memcpy(p.block->shared + p.address, c.source, c.read_bytes);
    c.done = true;
}
void issue_small_copy(uint32_t destination, const void* source, uint32_t bytes, int read_bytes) {
    Thread& t = self();
    const Place p = place_of(destination);
    check_shared(p, bytes, bytes, "cp_async");
    if (read_bytes < 0 || read_bytes > static_cast<int>(bytes)) {
        fail("cp_async reads " + std::to_string(read_bytes) + " of " + std::to_string(bytes) +
             " bytes");
    }
    if (read_bytes > 0) {
        if (reinterpret_cast<uintptr_t>(source) % bytes != 0) {
            fail("cp_async from global address " + hex(reinterpret_cast<uintptr_t>(source)) +
                 ", which is not a multiple of " + std::to_string(bytes) + " bytes");
        }
        access_global(source, static_cast<uint32_t>(read_bytes), GlobalAccess::read, "cp_async");
    }
    note_write(p, bytes, "cp_async");
    mark_small_copy(p, bytes, {~0u, static_cast<uint16_t>(t.index), 0, by_small_copy});
    if (t.small_copies.empty()) t.small_copies.emplace_back();
    t.small_copies.back().push_back(
        {destination, bytes, static_cast<uint32_t>(read_bytes), source, false});
    if (copies_at_issue()) carry_out(t.small_copies.back().back());
}
void commit_small_copies() {
    auto& groups = self().small_copies;
    if (groups.empty()) groups.emplace_back();
    groups.emplace_back();
}
inline void finish_small_copies(std::vector<SmallCopy>& group, const Granule& as) {
    for (SmallCopy& c : group) {
        carry_out(c);
        mark_small_copy(place_of(c.destination), c.bytes, as);
    }
    group.clear();
}
void wait_for_small_copies(size_t pending) {
    Thread& t = self();
    if (t.small_copies.size() <= pending + 1) return;
    const Granule as{machine->check_order ? t.now() : 0, static_cast<uint16_t>(t.index), 0,
                     by_thread};
    for (size_t g = 0; g + 1 + pending < t.small_copies.size(); ++g) {
        finish_small_copies(t.small_copies[g], as);
    }
}
// The barrier receives this thread's arrival with its copies' completion. It is carried out at
// once: a legal order, and the waiting threads cannot tell.
void arrive_after_small_copies(uint32_t barrier) {
    Thread& t = self();
    Barrier& b = barrier_at(barrier, "cp_async_mbarrier_arrive");
    const Granule as{b.completed + 1, static_cast<uint16_t>(b.index), 0, by_copy};
    for (auto& group : t.small_copies) finish_small_copies(group, as);
    arrive_at(b, 1, "cp_async_mbarrier_arrive");
}

}  // namespace emulated
}  // namespace kittens::inline on_cpu
