// Addresses, bounds, and the order of accesses to shared memory. Of every four bytes it is known
// who wrote them last, and when, and who has read them since (readers.h); an access is legal when
// its thread knows of that write, and a write when it knows of those reads too: through a barrier,
// a fence, the phase that a copy completed. The async proxy (TMA, wgmma) sees writes of threads
// only through a proxy fence. So a missing wait, fence or release is found in every order of
// execution, not only in those that give a wrong value.
#pragma once

#include "readers.h"

namespace kittens::inline on_cpu {
namespace emulated {

// The block and address behind a shared address, which may lie in the cluster's window.
inline Place place_of(uint32_t address) {
    const uint32_t window = address / SHARED_WINDOW;
    if (window == 0) return {self().block, address};
    if (window > machine->blocks.size()) {
        fail("address " + hex(address) + " lies in the shared memory of block " +
             std::to_string(window - 1) + " of a cluster of " +
             std::to_string(machine->blocks.size()));
    }
    Block& block = machine->blocks[window - 1];
    if (block.alive == 0) {
        fail("access to shared address " + hex(address % SHARED_WINDOW) + " of block " +
             describe(block.at) + ", which has ended: no cluster barrier before its end");
    }
    return {&block, address % SHARED_WINDOW};
}
inline void check_shared(const Place& p, uint32_t bytes, uint32_t alignment, const char* what) {
    if (p.address % alignment != 0) {
        fail(std::string(what) + ": shared address " + hex(p.address) + " is not a multiple of " +
             std::to_string(alignment) + " bytes");
    }
    if (p.address < SHARED_BASE || p.address + bytes > p.block->shared_end) {
        fail(std::string(what) + ": " + std::to_string(bytes) + " bytes at shared address " +
             hex(p.address) + " are out of bounds; the block has " + hex(SHARED_BASE) + " to " +
             hex(p.block->shared_end));
    }
}
inline void check_global(const void* pointer, uint64_t bytes, bool writes, const char* what) {
    const Thread& t = self();
    const auto& regions = machine->options->regions;
    if (machine->grid->dependent && machine->check_order &&
        t.clock.seen[machine->dependency_entry()] == 0) {
        const auto begin = reinterpret_cast<uintptr_t>(pointer);
        const bool settled = std::ranges::any_of(regions, [&](const Region& r) {
            const auto first = reinterpret_cast<uintptr_t>(r.begin);
            return r.settled && begin >= first && begin + bytes <= first + r.bytes;
        });
        if (writes || !settled) {
            fail(std::string(what) +
                 " of global memory before wait_for_dependencies, in a kernel that "
                 "starts before the previous one has finished");
        }
    }
    if (regions.empty()) return;
    const auto begin = reinterpret_cast<uintptr_t>(pointer);
    const Region* near = nullptr;
    uint64_t distance = ~uint64_t(0);
    for (const Region& r : regions) {
        const auto first = reinterpret_cast<uintptr_t>(r.begin);
        if (begin >= first && begin + bytes <= first + r.bytes) {
            if (writes && !r.writable) {
                fail(std::string(what) + " writes to '" + r.name + "', which is an input");
            }
            return;
        }
        const uint64_t d = begin < first ? first - begin : begin - first;
        if (d < distance) distance = d, near = &r;
    }
    const auto offset = static_cast<int64_t>(begin - reinterpret_cast<uintptr_t>(near->begin));
    fail(std::string(what) + " of " + std::to_string(bytes) +
         " bytes of global memory out of "
         "bounds: byte " +
         std::to_string(offset) + " of '" + near->name + "', which has " +
         std::to_string(near->bytes));
}

// ---- order ----

// Whether `t` knows of the last write to these bytes; through the async proxy if `async`.
inline void check_visible(const Thread& t, const Granule& g, uint32_t address, uint8_t bytes,
                          bool async, const char* what) {
    if (g.kind == unwritten || (g.bytes & bytes) == 0) return;
    const auto& known = async && g.kind == by_thread ? t.clock.fenced : t.clock.seen;
    if (g.time <= known[g.writer]) return;
    const std::string where = std::string(what) + " of shared address " + hex(address);
    if (g.kind == by_copy) {
        fail(where + ", which " + describe_entry(g.writer) +
             " writes: no wait for the phase that it completes");
    }
    if (g.kind == by_small_copy) {
        fail(where + ", which a cp.async of " + describe_entry(g.writer) +
             " writes: no cp_async_wait and barrier in between");
    }
    if (g.time <= t.clock.seen[g.writer]) {
        fail(where + " by the async proxy, last written by " + describe_entry(g.writer) +
             ": no fence.proxy.async (fence_async_shared) in between");
    }
    fail(where + ", last written by " + describe_entry(g.writer) +
         ": no barrier (release and acquire) in between");
}

inline void note_read(const Place& p, uint32_t bytes, const char* what) {
    if (!machine->check_order) return;
    const Thread& t = self();
    Block& block = *p.block;
    const uint32_t *seen = t.clock.seen.data(), now = t.now();
    for_each_granule(p.address, bytes, [&](uint32_t a, uint8_t mask) {
        const Granule& g = block.granules[a / 4];
        if (g.time > seen[g.writer]) check_visible(t, g, a, mask, false, what);
        Readers& r = block.readers[a / 4];
        if (r.bytes == 0)
            r = {now, static_cast<uint16_t>(t.index), mask, false};
        else
            add_reader(block, a, mask, t, static_cast<size_t>(t.index), now);
    });
}
inline void note_write(const Place& p, uint32_t bytes, const char* what) {
    check_not_being_read(p, bytes, what);
    if (!machine->check_order) return;
    const Thread& t = self();
    for_each_granule(p.address, bytes, [&](uint32_t a, uint8_t mask) {
        Granule& g = p.block->granules[a / 4];
        if (g.kind == by_copy) check_visible(t, g, a, mask, false, what);
        check_readers(t, *p.block, a, mask, what);
        g = {t.now(), static_cast<uint16_t>(t.index), mask, by_thread};
    });
}
// By TMA: `barrier` will tell that it is complete.
inline void note_copy_write(const Place& p, uint32_t bytes, const Barrier& barrier,
                            const char* what) {
    check_not_being_read(p, bytes, what);
    if (!machine->check_order) return;
    const Thread& t = self();
    for_each_granule(p.address, bytes, [&](uint32_t a, uint8_t mask) {
        Granule& g = p.block->granules[a / 4];
        // Another copy to the same barrier and phase may touch the same bytes' neighbours.
        const bool same =
            g.kind == by_copy && g.writer == barrier.index && g.time == barrier.completed + 1;
        if (!same && g.kind == by_copy) check_visible(t, g, a, mask, true, what);
        check_readers(t, *p.block, a, mask, what);
        g = {barrier.completed + 1, static_cast<uint16_t>(barrier.index), mask, by_copy};
    });
}
inline void note_async_read(const Place& p, uint32_t bytes, const char* what) {
    if (!machine->check_order) return;
    const Thread& t = self();
    for_each_granule(p.address, bytes, [&](uint32_t a, uint8_t mask) {
        check_visible(t, p.block->granules[a / 4], a, mask, true, what);
    });
}

// ---- clocks ----

inline void tick(Thread& t) { ++t.clock.seen[static_cast<size_t>(t.index)]; }
inline void release_to(Clock& to, Thread& t) {
    if (!machine->check_order) return;
    to.join_thread(t.clock, static_cast<size_t>(t.index));
    tick(t);
}
inline void acquire_from(Thread& t, const Clock& from) {
    if (!machine->check_order || from.is_blank) return;
    Clock& c = t.clock;
    const uint64_t version = c.version;
    if (version == 0 || from.version == 0 || !from.fenced_global.empty() || from.others) {
        c.join(from);
        c.version = version;
        return c.change_version(from.version);
    }
    // Many threads learn the same.
    Difference& d = machine->differences[(version ^ from.version) % machine->differences.size()];
    if (d.version != version || d.other != from.version) {
        d.version = version;
        d.other = from.version;
        Difference::collect(d.seen, c.seen, from.seen, static_cast<size_t>(t.index));
        Difference::collect(d.fenced, c.fenced, from.fenced, static_cast<size_t>(t.index));
    }
    Difference::apply(d.seen, c.seen);
    Difference::apply(d.fenced, c.fenced);
    c.change_version(from.version);
}
// From a barrier that the thread has just released to, and waited for since: its clock says all
// that the thread knew then.
inline void take_over(Thread& t, const Clock& from) {
    if (!machine->check_order) return;
    const uint32_t own = t.now();
    t.clock = from;
    t.clock.grow(machine->clock_entries);
    t.clock.seen[static_cast<size_t>(t.index)] = own;
}
// What the thread knows becomes visible to async operations that it, or whoever it tells, issues.
void fence_proxy_shared() {
    Thread& t = self();
    if (!machine->check_order) return;
    Clock::raise(t.clock.fenced, t.clock.seen);
    t.clock.change_version(~uint64_t(0));
    tick(t);
}

// ---- operations of a whole warp ----

// `compute` runs once, in the last lane, when all lanes have left their words.
template <class Compute>
inline void run_in_warp(const char* name, Compute compute, bool only_alive = false) {
    Thread& t = self();
    Warp& w = warp_of(t);
    if (w.arrived != 0 && w.operation != name && std::strcmp(w.operation, name) != 0) {
        fail(std::string("the warp diverges: this lane calls ") + name + " while others are in " +
             w.operation);
    }
    w.operation = name;
    w.only_alive = only_alive;
    w.arrived |= 1u << t.lane;
    const uint32_t expected = only_alive ? w.alive : 0xffffffffu;
    if ((w.arrived & expected) != expected) {
        const uint64_t generation = w.generation;
        while (w.generation == generation) wait_for({.kind = Wait::warp, .object = &w});
        return;
    }
    compute(w);
    w.arrived = 0;
    ++w.generation;
    for (Thread* other : w.threads) {
        if (other != nullptr && other->waiting.kind == Wait::warp) make_ready(other);
    }
}
Lane& own_lane() { return warp_of(self()).lanes[static_cast<size_t>(self().lane)]; }

}  // namespace emulated
}  // namespace kittens::inline on_cpu
