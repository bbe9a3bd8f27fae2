// Barriers: mbarriers with arrivals and bytes, named barriers, the cluster's, a warp's, and the
// reallocation of registers, which also waits.
#pragma once

#include "global_order.h"

namespace kittens::inline on_cpu {
namespace emulated {

constexpr uint64_t BARRIER_MARK = 0xba44b4e4ba44b4e4ull;  // what an initialised mbarrier holds
constexpr uint32_t MAX_BARRIERS = 128;                    // per block

inline Barrier& barrier_at(uint32_t address, const char* what) {
    const Place p = place_of(address);
    check_shared(p, 8, 8, what);
    const auto found = p.block->barriers.find(p.address);
    if (found == p.block->barriers.end() || !found->second.valid) {
        fail(std::string(what) + ": shared address " + hex(p.address) + " of block " +
             describe(p.block->at) + " is not an initialised mbarrier");
    }
    Barrier& b = found->second;
    uint64_t mark;
    std::memcpy(&mark, p.block->shared + p.address, 8);
    if (mark != BARRIER_MARK)
        fail(std::string(what) + ": something has overwritten " + describe(b));
    const bool announced = b.announced != 0 && self().cluster_waited >= b.announced;
    if (machine->check_order && !announced &&
        self().clock.seen[static_cast<size_t>(b.initializer)] < b.initialized_at) {
        fail(std::string(what) + ": no barrier (block or cluster) between the initialisation of " +
             describe(b) + " and its use");
    }
    if (b.block != self().block && !b.fenced) {
        fail(std::string(what) + ": " + describe(b) +
             " is used by another block, but no mbarrier_init_fence has followed its "
             "initialisation");
    }
    return b;
}

inline void complete_phase_if_done(Barrier& b) {
    if (b.pending != 0 || b.bytes != 0) return;
    if (b.in_flight != 0) {
        fail(describe(b) + " completes while " + std::to_string(b.in_flight) +
             " copies that signal it are in flight: fewer bytes were expected than they bring");
    }
    ++b.completed;
    b.pending = b.expected;
    if (machine->check_order) {
        b.published.join(b.arriving);
        if (b.published.is_blank) b.published.clear(machine->clock_entries);
        b.published.grow(machine->clock_entries);
        b.published.version = ++machine->versions;
        b.published.seen[b.index] = b.completed;
        b.published.fenced[b.index] = b.completed;
        b.arriving.forget();
    }
    make_ready(b.waiting);
}
inline void change_bytes(Barrier& b, int64_t change) {
    b.bytes += change;
    constexpr int64_t limit = (1 << 20) - 1;
    if (b.bytes > limit || b.bytes < -limit) {
        fail(describe(b) + ": more than 2^20 - 1 bytes are pending");
    }
    complete_phase_if_done(b);
}
inline void arrive_at(Barrier& b, uint32_t count, const char* what) {
    if (count == 0 || count > b.pending) {
        fail(std::string(what) + ": " + std::to_string(count) + " arrivals at " + describe(b) +
             ", which has room for " + std::to_string(b.pending));
    }
    b.pending -= count;
    complete_phase_if_done(b);
}

// One arrival of a thread that has waited for its products stands for its warpgroup, as in
// CUTLASS's pipelines: wgmma-groups are the warpgroup's (PTX ISA, "wgmma.commit_group").
inline void hand_back_products(Clock& to, const Thread& t) {
    const Cluster& m = *machine;
    const auto warp = static_cast<size_t>(t.warp), first_warp = warp / 4 * 4;
    if (t.products == 0) return;
    if (!m.check_order) {
        // What one knows is known to all.
        const uint32_t over = t.block->warps[warp].products_waited;
        for (size_t q = first_warp; q < first_warp + 4; ++q) {
            uint32_t& waited = t.block->warps[q].products_waited;
            waited = std::max(waited, over);
        }
        return;
    }
    const size_t first = m.product_entry(*t.block, first_warp);
    for (size_t q = 0; q < 4; ++q) {
        to.seen[first + q] = std::max(to.seen[first + q], t.clock.seen[first + warp % 4]);
    }
}

// Of a barrier, in every thread's clock.
inline void add_clock_entry() {
    Cluster& m = *machine;
    m.barrier_of_entry.resize(++m.clock_entries);
    if (!m.check_order) return;
    for (Block& block : m.blocks) {
        for (Thread& t : block.threads) t.clock.grow(m.clock_entries);
    }
}
void initialize_barrier(uint32_t address, uint32_t arrivals) {
    const Place p = place_of(address);
    check_shared(p, 8, 8, "mbarrier_init");
    if (p.block != self().block) fail("mbarrier_init of another block's barrier");
    if (arrivals == 0 || arrivals >= (1u << 20)) {
        fail("mbarrier_init of " + hex(address) + " with " + std::to_string(arrivals) +
             " arrivals; legal are 1 to 2^20 - 1");
    }
    auto [at, is_new] = p.block->barriers.try_emplace(p.address);
    Barrier& b = at->second;
    if (b.valid && (b.pending != b.expected || b.bytes != 0 || !b.waiting.empty())) {
        fail("mbarrier_init of " + describe(b) + ", which is in use");
    }
    if (is_new) {
        b.block = p.block;
        b.address = p.address;
        size_t number = p.block->barriers.size() - 1;
        if (number >= MAX_BARRIERS) fail("more than 128 mbarriers in a block");
        b.index = static_cast<uint32_t>(machine->clock_entries);
        add_clock_entry();
        machine->barrier_of_entry[b.index] = &b;
    }
    note_write(p, 8, "mbarrier_init");
    std::memcpy(p.block->shared + p.address, &BARRIER_MARK, 8);
    b.valid = true;
    b.fenced = false;
    b.announced = 0;
    b.expected = b.pending = arrivals;
    b.bytes = 0;
    b.first = b.completed;
    b.initializer = self().index;
    b.initialized_at = machine->check_order ? self().now() : 0;
    if (machine->check_order) tick(self());
}
void fence_initialized_barriers() {
    for (auto& [address, b] : self().block->barriers) b.fenced = true;
}

inline bool phase_is_over(const Barrier& b, uint32_t parity) {
    return (b.phase() & 1) != (parity & 1);
}
inline void observe_phase(Barrier& b) { acquire_from(self(), b.published); }
inline void wait_for_phase(Barrier& b, uint32_t parity) {
    while (!phase_is_over(b, parity)) {
        b.waiting.push_back(&self());
        wait_for({.kind = Wait::mbarrier, .object = &b, .value = parity});
    }
    observe_phase(b);
}
// Once more around, then gives up.
inline bool poll_phase(Barrier& b, uint32_t parity) {
    if (!phase_is_over(b, parity)) {
        b.waiting.push_back(&self());
        wait_for({.kind = Wait::mbarrier, .object = &b, .value = parity, .poll = true});
        std::erase(b.waiting, &self());
    }
    if (!phase_is_over(b, parity)) return false;
    observe_phase(b);
    return true;
}

// ---- what threads do to an mbarrier ----

void invalidate_barrier(uint32_t address) {
    Barrier& b = barrier_at(address, "mbarrier_invalidate");
    if (b.in_flight != 0) {
        fail("mbarrier_invalidate of " + describe(b) +
             " while copies that signal it are in flight");
    }
    b.valid = false;
}
void arrive_at_barrier(uint32_t address, uint32_t count) {
    Barrier& b = barrier_at(address, "mbarrier_arrive");
    release_to(b.arriving, self());
    hand_back_products(b.arriving, self());
    arrive_at(b, count, "mbarrier_arrive");
}
void arrive_relaxed(uint32_t address, uint32_t count) {
    Barrier& b = barrier_at(address, "mbarrier_arrive");
    Thread& t = self();
    // Tells of the copies that the thread has waited for, not of its own writes.
    if (machine->check_order) b.arriving.join_from(t.clock, machine->dependency_entry());
    hand_back_products(b.arriving, t);
    arrive_at(b, count, "mbarrier_arrive");
}
void arrive_expecting(uint32_t address, uint32_t bytes) {
    Barrier& b = barrier_at(address, "mbarrier_arrive_expect");
    release_to(b.arriving, self());
    hand_back_products(b.arriving, self());
    // Expects first, so that the arrival cannot complete the phase in between.
    b.bytes += bytes;
    arrive_at(b, 1, "mbarrier_arrive_expect");
}
void expect_bytes(uint32_t address, uint32_t bytes) {
    change_bytes(barrier_at(address, "mbarrier_expect"), bytes);
}
bool poll_barrier(uint32_t address, uint32_t parity, const char* what) {
    return poll_phase(barrier_at(address, what), parity);
}
void wait_for_barrier(uint32_t address, uint32_t parity) {
    wait_for_phase(barrier_at(address, "mbarrier_wait"), parity);
}

// ---- named barriers ----

inline void complete_named_barrier(NamedBarrier& b) {
    b.published.join(b.arriving);
    b.published.version = ++machine->versions;
    b.arriving.forget();
    b.arrived.clear();
    b.expected = 0;
    ++b.generation;
    make_ready(b.waiting);
}
inline bool is_complete(const Block& block, const NamedBarrier& b) {
    // Threads that have ended count in a barrier of the whole block.
    const int ended = b.whole_block ? static_cast<int>(block.threads.size()) - block.alive : 0;
    return b.expected != 0 && static_cast<int>(b.arrived.size()) + ended >= b.expected;
}
inline void use_barrier(int id, int threads, bool waits, bool whole_block) {
    Thread& t = self();
    Block& block = *t.block;
    if (id < 0 || id > 15) fail("named barrier " + std::to_string(id) + "; there are 0 to 15");
    NamedBarrier& b = block.named[static_cast<size_t>(id)];
    const auto name = [id] { return "named barrier " + std::to_string(id); };
    if (!whole_block && (threads % 32 != 0 || threads <= 0 || threads > 1024)) {
        fail(name() + " of " + std::to_string(threads) +
             " threads; legal are multiples of 32 up to 1024");
    }
    if (b.expected != 0 && b.expected != threads) {
        fail(name() + ": this thread counts " + std::to_string(threads) + " threads, others " +
             std::to_string(b.expected));
    }
    const uint64_t generation = b.generation;
    uint64_t& mine = t.arrivals[static_cast<size_t>(id)];
    if (mine > generation) {
        fail(name() + ": this thread arrives twice in a round of " + std::to_string(threads) +
             " threads, of which " + std::to_string(b.arrived.size()) + " have arrived");
    }
    b.expected = threads;
    b.whole_block = whole_block;
    b.arrived.push_back(&t);
    mine = generation + 1;
    release_to(b.arriving, t);
    if (is_complete(block, b)) {
        complete_named_barrier(b);
    } else if (waits) {
        b.waiting.push_back(&t);
        while (b.generation == generation) {
            wait_for({.kind = Wait::named_barrier, .object = &b});
        }
    }
    if (waits) take_over(t, b.published);
}
void use_named_barrier(int id, int threads, bool waits) { use_barrier(id, threads, waits, false); }
void use_block_barrier(int id) {
    use_barrier(id, static_cast<int>(self().block->threads.size()), true, true);
}

// ---- the cluster's barrier ----

void arrive_at_cluster(bool releases) {
    Thread& t = self();
    Cluster& m = *machine;
    uint64_t& mine = m.cluster_arrivals[static_cast<size_t>(t.index)];
    if (mine > m.cluster_phase) fail("cluster_arrive twice without cluster_wait in between");
    mine = m.cluster_phase + 1;
    if (releases) {
        release_to(m.cluster_arriving, t);
    } else if (m.check_order) {
        m.cluster_arriving.join_from(t.clock, m.dependency_entry());
        // The fence releases the initialisations of its thread, so a relaxed arrival tells of them.
        for (auto& [address, b] : t.block->barriers) {
            if (b.fenced && b.initializer == t.index && b.announced == 0) b.announced = mine;
        }
    }
    if (++m.cluster_arrived < m.thread_count) return;
    m.cluster_arrived = 0;
    ++m.cluster_phase;
    if (m.check_order) {
        std::swap(m.cluster_published, m.cluster_arriving);
        m.cluster_published.version = ++m.versions;
        m.cluster_arriving.forget();
    }
    for (Block& block : m.blocks) {
        for (Thread& other : block.threads) {
            if (other.waiting.kind == Wait::cluster_barrier) make_ready(&other);
        }
    }
}
void wait_for_cluster() {
    Thread& t = self();
    Cluster& m = *machine;
    const uint64_t mine = m.cluster_arrivals[static_cast<size_t>(t.index)];
    if (mine == 0) fail("cluster_wait without cluster_arrive");
    while (m.cluster_phase < mine) wait_for({.kind = Wait::cluster_barrier, .object = &m});
    t.cluster_waited = mine;
    acquire_from(t, m.cluster_published);
}

// ---- a warp ----

void synchronize_warp() {
    Thread& t = self();
    Warp& w = warp_of(t);
    release_to(w.arriving, t);
    run_in_warp(
        "sync_warp",
        [](Warp& warp) {
            if (!machine->check_order) return;
            std::swap(warp.published, warp.arriving);
            warp.published.version = ++machine->versions;
            warp.arriving.forget();
        },
        true);
    take_over(t, w.published);
}

// ---- registers ----

void reallocate_registers(int count, bool increases) {
    Thread& t = self();
    Block& block = *t.block;
    Warpgroup& group = warpgroup_of(t);
    if (group.threads.size() != 128) fail("setmaxnreg needs a whole warpgroup");
    const auto number = static_cast<size_t>(t.reallocations++);
    const int signed_count = increases ? count : -count;
    if (group.reallocations.size() <= number) group.reallocations.push_back(signed_count);
    if (group.reallocations[number] != signed_count) {
        fail("the warpgroup diverges: setmaxnreg to " + std::to_string(count) + " here, to " +
             std::to_string(std::abs(group.reallocations[number])) + " in other threads");
    }
    const std::string has = ", the thread has " + std::to_string(t.registers);
    if (!increases) {
        if (count > t.registers) fail("decrease_registers to " + std::to_string(count) + has);
        block.free_registers += t.registers - count;
        t.registers = count;
        for (Thread* other : std::exchange(machine->registers_wanted, {})) make_ready(other);
        return;
    }
    if (count < t.registers) fail("increase_registers to " + std::to_string(count) + has);
    // Impossible even if every other warpgroup had the least that there is.
    const int others = static_cast<int>(block.threads.size()) - 128;
    if (128 * count + others * 24 > block.registers) {
        fail("increase_registers to " + std::to_string(count) + " is past the block's budget of " +
             std::to_string(block.registers));
    }
    while (block.free_registers < count - t.registers) {
        machine->registers_wanted.push_back(&t);
        wait_for({.kind = Wait::registers, .value = static_cast<uint64_t>(count)});
    }
    block.free_registers -= count - t.registers;
    t.registers = count;
}

}  // namespace emulated
}  // namespace kittens::inline on_cpu
