// Who reads shared memory, so that a write that is not ordered behind a read is found: threads,
// copies out of it, and products. A product is read by four warps, each of which knows of its own
// part alone when its wait returns.
#pragma once

#include "scheduler.h"

namespace kittens::inline on_cpu {
namespace emulated {

struct Place {
    Block* block;
    uint32_t address;
};

inline uint8_t mask_of(uint32_t address, uint32_t bytes) {
    return static_cast<uint8_t>(((1u << (bytes < 4 ? bytes : 4)) - 1) << (address % 4));
}

template <class F>
inline void for_each_granule(uint32_t address, uint32_t bytes, F f) {
    for (uint32_t a = address & ~3u; a < address + bytes; a += 4) {
        const uint32_t first = a < address ? address : a;
        const uint32_t end = a + 4 < address + bytes ? a + 4 : address + bytes;
        f(a, mask_of(first, end - first));
    }
}

// Whom an entry of the clocks stands for.
inline std::string describe_entry(size_t entry) {
    const Cluster& m = *machine;
    if (entry >= static_cast<size_t>(m.thread_count)) {
        return "a copy that signals " + describe(*m.barrier_of_entry[entry]);
    }
    const size_t per_block = m.blocks[0].threads.size();
    return describe(m.blocks[entry / per_block].threads[entry % per_block]);
}

// ---- threads, and copies that have ended ----

[[noreturn]] inline void fail_overwriting(const Block& block, uint32_t address, size_t reader,
                                          const char* what) {
    fail(std::string(what) + " to shared address " + hex(address) + " of block " +
         describe(block.at) + ", last read by " + describe_entry(reader) +
         ": no barrier (release and acquire) between that read and this write");
}

inline void add_to_set(const Block& block, ReaderSet& set, size_t reader, uint32_t time,
                       uint8_t mask) {
    uint32_t* read = nullptr;
    const size_t first = static_cast<size_t>(block.rank) * block.threads.size();
    if (reader >= first && reader < first + block.threads.size()) {
        read = &set.threads[reader - first];
    } else {
        for (auto& other : set.others) {
            if (other.reader == reader) read = &other.read;
        }
        if (read == nullptr) {
            set.others.push_back({static_cast<uint16_t>(reader), 0});
            read = &set.others.back().read;
        }
    }
    const uint32_t before = *read / 16 == time ? *read % 16 : 0;
    *read = time * 16 + (before | mask);
}
inline void divide_readers(Block& block, Readers& r) {
    if (block.free_sets.empty()) {
        block.free_sets.push_back(static_cast<uint32_t>(block.reader_sets.size()));
        block.reader_sets.emplace_back().threads.resize(block.threads.size());
    }
    const uint32_t number = block.free_sets.back();
    block.free_sets.pop_back();
    add_to_set(block, block.reader_sets[number], r.reader, r.time, r.bytes);
    r = {number, 0, r.bytes, true};
}
// By `reader` at `time`, whoever knows `t`'s clock knows of it: the thread itself, or an entry
// whose time it is.
inline void add_reader(Block& block, uint32_t address, uint8_t mask, const Thread& t, size_t reader,
                       uint32_t time) {
    Readers& r = block.readers[address / 4];
    if (!r.several) {
        const bool covered = (r.bytes & ~mask) == 0;
        if (r.bytes == 0 || (covered && reader == static_cast<size_t>(t.index) &&
                             r.time <= t.clock.seen[r.reader])) {
            r = {time, static_cast<uint16_t>(reader), mask, false};
            return;
        }
        if (r.reader == reader && r.time == time) {
            r.bytes |= mask;
            return;
        }
        divide_readers(block, r);
    }
    r.bytes |= mask;
    add_to_set(block, block.reader_sets[r.time], reader, time, mask);
}

// Whether `t`, which writes, knows of all that have read; from then on they do not count.
inline void check_set(const Thread& t, Block& block, Readers& r, uint32_t address, uint8_t mask,
                      const char* what) {
    ReaderSet& set = block.reader_sets[r.time];
    const size_t first = static_cast<size_t>(block.rank) * block.threads.size();
    const uint32_t* seen = t.clock.seen.data();
    const auto late = [&](uint32_t read, size_t reader) {
        return (read & mask) != 0 && read / 16 > seen[reader];
    };
    uint32_t any = 0;
    for (size_t i = 0; i < set.threads.size(); ++i) any |= late(set.threads[i], first + i);
    for (const auto& other : set.others) any |= late(other.read, other.reader);
    if (any != 0) {
        for (size_t i = 0; i < set.threads.size(); ++i) {
            if (late(set.threads[i], first + i)) fail_overwriting(block, address, first + i, what);
        }
        for (const auto& other : set.others) {
            if (late(other.read, other.reader)) {
                fail_overwriting(block, address, other.reader, what);
            }
        }
    }
    r.bytes &= static_cast<uint8_t>(~mask);
    if (r.bytes != 0) {
        for (uint32_t& read : set.threads) read &= ~uint32_t(mask);
        for (auto& other : set.others) other.read &= ~uint32_t(mask);
        return;
    }
    std::fill(set.threads.begin(), set.threads.end(), 0u);
    set.others.clear();
    block.free_sets.push_back(r.time);
    r = {};
}
inline void check_readers(const Thread& t, Block& block, uint32_t address, uint8_t mask,
                          const char* what) {
    Readers& r = block.readers[address / 4];
    if ((r.bytes & mask) == 0) return;
    if (r.several) return check_set(t, block, r, address, mask, what);
    if (r.time > t.clock.seen[r.reader]) fail_overwriting(block, address, r.reader, what);
    r.bytes &= static_cast<uint8_t>(~mask);
}

// ---- copies in flight, and products ----

inline void hold_source(Block& block, uint32_t address, uint32_t bytes, int change) {
    for (uint32_t a = address & ~15u; a < address + bytes; a += 16) {
        block.copies_from[a / 16] = static_cast<uint8_t>(block.copies_from[a / 16] + change);
    }
}
// The copy has read; `reader` at `time` is who knows.
inline void release_source(Block& block, uint32_t address, uint32_t bytes, const Thread& t,
                           size_t reader, uint32_t time) {
    hold_source(block, address, bytes, -1);
    if (!machine->check_order) return;
    for_each_granule(address, bytes, [&](uint32_t a, uint8_t mask) {
        add_reader(block, a, mask, t, reader, time);
    });
}

// The products of a warp that `t` knows to be over.
inline uint32_t products_known(const Thread& t, const Block& block, size_t warp) {
    if (!machine->check_order) return block.warps[warp].products_waited;
    return t.clock.seen[machine->product_entry(block, warp)];
}
inline void check_not_being_read(const Place& p, uint32_t bytes, const char* what) {
    const Block& block = *p.block;
    const auto where = [&](uint32_t a) {
        return std::string(what) + " to shared address " + hex(a) + " of block " +
               describe(block.at) + ", which ";
    };
    const char* in_flight =
        "an operation in flight (TMA store or wgmma) still reads: no wait for it";
    for (uint32_t a = p.address & ~15u; a < p.address + bytes; a += 16) {
        if (block.copies_from[a / 16] != 0) fail(where(a) + in_flight);
    }
    for (size_t g = 0; g < block.warpgroups.size(); ++g) {
        const auto& reads = block.warpgroups[g].reads;
        if (reads.empty()) continue;
        uint32_t known[4];
        bool knows_all = true;
        for (size_t q = 0; q < 4; ++q) {
            known[q] = products_known(self(), block, 4 * g + q);
            knows_all = knows_all && known[q] >= block.warpgroups[g].last_reader;
        }
        if (knows_all) continue;
        for (uint32_t a = p.address & ~15u; a < p.address + bytes; a += 16) {
            const auto& last = reads[a / 16];
            for (size_t q = 0; q < 4; ++q) {
                if (last[q] <= known[q]) continue;
                const size_t warp = 4 * g + q;
                if (last[q] > block.warps[warp].products_waited) fail(where(a) + in_flight);
                fail(where(a) + "warp " + std::to_string(warp) +
                     "'s part of a wgmma reads: no barrier (release and acquire) between that "
                     "warp's wait and this write");
            }
        }
    }
}

}  // namespace emulated
}  // namespace kittens::inline on_cpu
