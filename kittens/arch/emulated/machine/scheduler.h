// Runs the threads of a cluster: each until it must wait, then the next. When none can run, an
// operation that somebody waits for is completed; when there is none, it is a deadlock.
#pragma once

#include <algorithm>
#include <thread>

#include "state.h"

namespace kittens::inline on_cpu {
namespace emulated {

inline bool execute_next_product(Warpgroup& group);
inline bool product_can_execute(const Warpgroup& group);
inline void complete_copy(size_t index);
inline void complete_any_store(Random& random);
inline void finish_thread(Thread& t);
inline void finish_cluster();

inline void make_ready(Thread* t) {
    if (t->is_ready || t->finished) return;
    t->is_ready = true;
    t->waiting = {};
    machine->ready.push_back(t);
    ++machine->progress;
}
inline void make_ready(std::vector<Thread*>& threads) {
    for (Thread* t : threads) make_ready(t);
    threads.clear();
}

inline void leave() {
    Thread& t = self();
    Fiber::change(t.fiber, machine->host);
}
// The running thread waits until somebody makes it ready.
inline void wait_for(Waiting what) {
    self().waiting = what;
    leave();
}
void yield_turn() { wait_for({.kind = Wait::turn, .poll = true}); }

inline void enter_thread() {
    Fiber::entered(machine->host);
    Thread& t = self();
    try {
        machine->grid->call->run(machine->grid->call->arguments);
        finish_thread(t);
    } catch (...) {
        machine->error = std::current_exception();
    }
    t.finished = true;
    ++machine->finished;
    Fiber::change(t.fiber, machine->host, true);
    __builtin_unreachable();
}

inline void resume(Thread* t) {
    machine->current = t;
    threadIdx = t->at;
    blockIdx = t->block->at;
    Fiber::change(machine->host, t->fiber);
    if (machine->error) std::rethrow_exception(machine->error);
}

// Everything asynchronous that a waiting thread needs to go on, each object once.
struct Demand {
    const void* object;
    Wait kind;
    auto operator<=>(const Demand&) const = default;
};
inline std::vector<Demand> demands() {
    std::vector<Demand> list;
    for (Block& block : machine->blocks) {
        for (Thread& t : block.threads) {
            if (t.finished || t.is_ready) continue;
            const Demand d{t.waiting.object, t.waiting.kind};
            if (d.kind != Wait::mbarrier && d.kind != Wait::products) continue;
            if (!list.empty() && list.back() == d) continue;
            list.push_back(d);
        }
    }
    std::sort(list.begin(), list.end());
    list.erase(std::unique(list.begin(), list.end()), list.end());
    std::erase_if(list, [](const Demand& d) {
        if (d.kind == Wait::products) {
            return !product_can_execute(*static_cast<const Warpgroup*>(d.object));
        }
        return std::none_of(machine->copies.begin(), machine->copies.end(),
                            [&](const Copy& c) { return c.barrier == d.object; });
    });
    return list;
}

inline bool complete_something_needed() {
    const auto list = demands();
    if (list.empty()) return false;
    const Demand& d = list[machine->random() % list.size()];
    ++machine->progress;
    if (d.kind == Wait::products) {
        execute_next_product(*const_cast<Warpgroup*>(static_cast<const Warpgroup*>(d.object)));
        return true;
    }
    std::vector<size_t> candidates;
    for (size_t i = 0; i < machine->copies.size(); ++i) {
        if (machine->copies[i].barrier == d.object) candidates.push_back(i);
    }
    // The latest first: what its predecessors bring is then not there yet either.
    const bool random = machine->options->policy == Policy::random;
    complete_copy(
        candidates[random ? machine->random() % candidates.size() : candidates.size() - 1]);
    return true;
}

inline void complete_something_random() {
    Cluster& m = *machine;
    if (!m.copies.empty() && m.random() % 4 == 0) complete_copy(m.random() % m.copies.size());
    if (m.random() % 16 == 0) {
        Block& block = m.blocks[m.random() % m.blocks.size()];
        if (!block.warpgroups.empty()) {
            Warpgroup& group = block.warpgroups[m.random() % block.warpgroups.size()];
            if (product_can_execute(group)) execute_next_product(group);
        }
    }
    if (m.random() % 16 == 0) complete_any_store(m.random);
}

inline std::string describe_waiting(const Thread& t) {
    const Waiting& w = t.waiting;
    switch (w.kind) {
        case Wait::warp:
            return std::string("the other lanes of its warp in ") +
                   static_cast<const Warp*>(w.object)->operation;
        case Wait::named_barrier: {
            const auto& b = *static_cast<const NamedBarrier*>(w.object);
            return "named barrier " + std::to_string(&b - t.block->named.data()) + " (" +
                   std::to_string(b.arrived.size()) + " of " + std::to_string(b.expected) +
                   " threads have arrived)";
        }
        case Wait::mbarrier:
            return "the phase of parity " + std::to_string(w.value) + " of " +
                   describe(*static_cast<const Barrier*>(w.object));
        case Wait::cluster_barrier:
            return "the cluster barrier (" + std::to_string(machine->cluster_arrived) + " of " +
                   std::to_string(machine->thread_count) + " threads have arrived)";
        case Wait::products:
            return "a product that not all 128 threads of its warpgroup have issued";
        case Wait::registers:
            return "registers: wants " + std::to_string(w.value) + " per thread, " +
                   std::to_string(t.block->free_registers) + " are free in the block";
        case Wait::turn: return "what it polls";
        default: return "others";
    }
}

[[noreturn]] inline void report_deadlock() {
    std::string text =
        "kittens emulator: deadlock in kernel " + machine->grid->name + ", no thread can go on:";
    for (const Block& block : machine->blocks) {
        for (size_t w = 0; w < block.warps.size(); ++w) {
            // Lanes that wait for the same thing share a line.
            std::vector<std::pair<std::string, uint32_t>> lines;
            uint32_t ended = 0;
            for (const Thread& t : block.threads) {
                if (t.warp != static_cast<int>(w)) continue;
                if (t.finished) {
                    ended |= 1u << t.lane;
                    continue;
                }
                const std::string what = describe_waiting(t);
                const auto found = std::find_if(lines.begin(), lines.end(),
                                                [&](const auto& l) { return l.first == what; });
                if (found == lines.end())
                    lines.emplace_back(what, 1u << t.lane);
                else
                    found->second |= 1u << t.lane;
            }
            for (const auto& [what, lanes] : lines) {
                text += "\n  block " + describe(block.at) + ", warp " + std::to_string(w);
                if (lanes != 0xffffffffu) text += ", lanes " + hex(lanes);
                text += ": waits for " + what;
            }
            if (!lines.empty() && ended != 0) text += "; lanes " + hex(ended) + " have ended";
        }
    }
    throw Deadlock(text);
}

inline void run_threads() {
    Cluster& m = *machine;
    const bool random = m.options->policy == Policy::random;
    uint64_t progress_at_poll = 0;
    RunningClusters::Polls polls;
    while (m.finished < m.thread_count) {
        if (!m.ready.empty()) {
            if (random && m.ready.size() > 1) {
                std::swap(m.ready.front(), m.ready[m.random() % m.ready.size()]);
            }
            Thread* t = m.ready.front();
            m.ready.pop_front();
            t->is_ready = false;
            resume(t);
            if (random) complete_something_random();
            continue;
        }
        if (complete_something_needed()) continue;
        // Those that poll get another turn, as long as this leads anywhere, here or in a cluster
        // that runs at the same time.
        std::vector<Thread*> polling;
        for (Block& block : m.blocks) {
            for (Thread& t : block.threads) {
                if (!t.finished && t.waiting.poll) polling.push_back(&t);
            }
        }
        if (polling.empty() || !m.grid->running->poll(polls, m.progress != progress_at_poll)) {
            report_deadlock();
        }
        if (m.options->host_threads > 1) std::this_thread::yield();
        make_ready(polling);
        progress_at_poll = m.progress;
    }
    finish_cluster();
}

}  // namespace emulated
}  // namespace kittens::inline on_cpu
