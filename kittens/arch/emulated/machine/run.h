// Launches on the CPU: builds each cluster of blocks, runs it to its end, checks what it leaves
// behind. Clusters run one after the other, or spread over host threads.
#pragma once

#include <cxxabi.h>
#include <dlfcn.h>

#include <atomic>
#include <optional>
#include <thread>

#include "products.h"
#include "threads.h"

namespace kittens::inline on_cpu {
namespace emulated {

inline void finish_thread(Thread& t) {
    Warp& w = warp_of(t);
    if (!t.in_flight.empty())
        fail("the thread ends while a wgmma of its is in flight (no wgmma_wait)");
    for (const auto& group : t.small_copies) {
        if (!group.empty()) fail("the thread ends while its cp.async are in flight");
    }
    w.alive &= ~(1u << t.lane);
    if (--t.block->alive == 0 && t.block->copies_to_others > 0) {
        fail("the block ends while a copy to another block still reads its shared memory");
    }
    for (NamedBarrier& b : t.block->named) {
        if (b.whole_block && b.expected != 0 && is_complete(*t.block, b)) complete_named_barrier(b);
    }
    // The others of its warp may have waited for it alone.
    if (w.arrived != 0 && w.only_alive && w.alive != 0 && (w.arrived & w.alive) == w.alive) {
        if (machine->check_order) {
            std::swap(w.published, w.arriving);
            w.published.version = ++machine->versions;
            w.arriving.forget();
        }
        w.arrived = 0;
        ++w.generation;
        for (Thread* other : w.threads) {
            if (other != nullptr && other->waiting.kind == Wait::warp) make_ready(other);
        }
    }
}

inline void finish_cluster() {
    Cluster& m = *machine;
    const auto complain = [&](const Block& block, const std::string& what) {
        throw Error("kittens emulator: kernel " + m.grid->name + ", block " + describe(block.at) +
                    ": " + what);
    };
    for (const Copy& c : m.copies) {
        complain(*c.barrier->block,
                 "the block ends while a copy into its shared memory is in "
                 "flight; it signals " +
                     describe(*c.barrier));
    }
    for (Block& block : m.blocks) {
        for (size_t i = 0; i < block.named.size(); ++i) {
            const NamedBarrier& b = block.named[i];
            if (b.expected == 0) continue;
            complain(block, "the block ends with " + std::to_string(b.arrived.size()) + " of " +
                                std::to_string(b.expected) + " threads at named barrier " +
                                std::to_string(i));
        }
        for (Thread& t : block.threads) {
            for (auto& group : t.stores) {
                for (Store& s : group) {
                    if (!s.released) {
                        complain(block, "warp " + std::to_string(t.warp) + ", lane " +
                                            std::to_string(t.lane) +
                                            " ends while a TMA store of its still reads shared "
                                            "memory (no tma_store_read_wait)");
                    }
                    carry_out(s, true);
                }
            }
        }
    }
}

// Memory of the blocks of a cluster and of what is known of it, kept by each host thread for its
// next cluster.
class BlockMemory {
  public:
    // Aligned so that address 0 of shared memory has the alignment of all tiles; NaN in every
    // format.
    void give(Block& block, uint32_t bytes) {
        const auto i = static_cast<size_t>(block.rank);
        if (blocks_.size() <= i) blocks_.resize(i + 1);
        Kept& kept = blocks_[i];
        if (kept.bytes < bytes) {
            kept.shared.reset(static_cast<uint8_t*>(
                std::aligned_alloc(4096, (size_t(bytes) + 4095) / 4096 * 4096)));
            kept.bytes = bytes;
            if (!kept.shared) throw std::bad_alloc();
        }
        block.shared = kept.shared.get();
        std::memset(block.shared, 0xff, bytes);
        take(block.granules, kept.granules, bytes / 4 + 1);
        take(block.readers, kept.readers, bytes / 4 + 1);
        block.copies_from.resize(bytes / 16 + 1);
    }
    void take_back(Block& block) {
        Kept& kept = blocks_[static_cast<size_t>(block.rank)];
        kept.granules.swap(block.granules);
        kept.readers.swap(block.readers);
    }

  private:
    struct Free {
        void operator()(uint8_t* p) const { std::free(p); }
    };
    struct Kept {
        std::unique_ptr<uint8_t, Free> shared;
        uint32_t bytes = 0;
        std::vector<Granule> granules;
        std::vector<Readers> readers;
    };
    template <class T>
    static void take(std::vector<T>& to, std::vector<T>& kept, size_t count) {
        to.swap(kept);
        if (to.size() < count) to.resize(count);
        std::memset(static_cast<void*>(to.data()), 0, count * sizeof(T));
    }
    std::vector<Kept> blocks_;
};
inline thread_local BlockMemory block_memory;

class ClusterRun {
  public:
    ClusterRun(const Grid& grid, dim3 at) {
        Cluster& m = cluster_;
        const auto threads = static_cast<int>(grid.block.x * grid.block.y * grid.block.z);
        m.grid = &grid;
        m.options = grid.options;
        m.check_order = grid.options->check_order;
        m.number =
            (at.z * (grid.grid.y / grid.cluster.y) + at.y) * (grid.grid.x / grid.cluster.x) + at.x;
        m.random.seed(grid.options->seed * 1000003u + (at.z * 65537u + at.y) * 65537u + at.x);
        m.blocks = std::vector<Block>(blocks_of(grid));
        m.thread_count = threads * static_cast<int>(m.blocks.size());
        const auto warps = static_cast<size_t>((threads + 31) / 32);
        m.clock_entries = m.dependency_entry() + 1 + m.blocks.size() * warps;
        m.barrier_of_entry.resize(m.clock_entries);
        m.cluster_arrivals.resize(static_cast<size_t>(m.thread_count));
        for (size_t i = 0; i < m.blocks.size(); ++i) {
            const auto r = static_cast<unsigned>(i);
            const dim3& c = grid.cluster;
            Block& block = m.blocks[i];
            block.cluster = &m;
            block.rank = static_cast<int>(i);
            block.at = {at.x * c.x + r % c.x, at.y * c.y + r / c.x % c.y,
                        at.z * c.z + r / (c.x * c.y)};
            build(block, grid, threads);
        }
    }
    ~ClusterRun() {
        for (Block& block : cluster_.blocks) {
            block_memory.take_back(block);
            for (Thread& t : block.threads) {
                if (t.fiber.stack().memory) stack_pool.give_back(t.fiber.stack());
            }
        }
    }
    void run() {
        RunningClusters& running = *cluster_.grid->running;
        machine = &cluster_;
        blockDim = cluster_.grid->block;
        gridDim = cluster_.grid->grid;
        for (Block& block : cluster_.blocks) {
            for (Thread& t : block.threads) make_ready(&t);
        }
        running.change();
        const auto end = [&] {
            machine = nullptr;
            running.change();
        };
        try {
            run_threads();
        } catch (...) {
            end();
            throw;
        }
        end();
    }

  private:
    static size_t blocks_of(const Grid& g) {
        return size_t(g.cluster.x) * g.cluster.y * g.cluster.z;
    }
    void build(Block& block, const Grid& grid, int threads) {
        const auto count = static_cast<size_t>(threads);
        block.shared_end = SHARED_BASE + grid.shared_bytes;
        block_memory.give(block, block.shared_end + MAX_STATIC_SHARED);
        block.threads = std::vector<Thread>(count);
        block.warps = std::vector<Warp>((count + 31) / 32);
        block.warpgroups = std::vector<Warpgroup>((count + 127) / 128);
        block.alive = threads;
        // What the compiler gives a kernel of so many blocks per multiprocessor.
        const int registers =
            std::min(255, grid.block_registers / static_cast<int>((count + 127) / 128 * 128)) / 8 *
            8;
        block.registers = grid.block_registers;
        for (size_t i = 0; i < count; ++i) {
            Thread& t = block.threads[i];
            const auto id = static_cast<unsigned>(i);
            t.block = &block;
            t.id = static_cast<int>(i);
            t.index = block.rank * threads + t.id;
            t.warp = t.id / 32;
            t.lane = t.id % 32;
            t.at = {id % grid.block.x, id / grid.block.x % grid.block.y,
                    id / (grid.block.x * grid.block.y)};
            t.registers = registers;
            if (cluster_.check_order) {
                t.clock.clear(cluster_.clock_entries);
                t.clock.version = cluster_.versions;
                t.clock.seen[static_cast<size_t>(t.index)] = 1;
            }
            Warp& w = block.warps[i / 32];
            w.threads[i % 32] = &t;
            w.alive |= 1u << t.lane;
            block.warpgroups[i / 128].threads.push_back(&t);
            t.fiber.start(stack_pool.take(), &enter_thread);
        }
        // A block redistributes what it has at launch; what rounding leaves of the file is not its.
        block.free_registers = 0;
    }

    Cluster cluster_;
};

inline std::string symbol_name(const void* function) {
    Dl_info info{};
    if (dladdr(function, &info) == 0 || info.dli_sname == nullptr || info.dli_saddr != function) {
        return "at " + hex(reinterpret_cast<uintptr_t>(function));
    }
    int status = 0;
    char* text = abi::__cxa_demangle(info.dli_sname, nullptr, nullptr, &status);
    std::string name = status == 0 ? text : info.dli_sname;
    std::free(text);
    return name;
}

inline void check_launch(const Grid& g) {
    const auto refuse = [&](const std::string& what) {
        throw Error("kittens emulator: kernel " + g.name + ": " + what);
    };
    const uint64_t threads = uint64_t(g.block.x) * g.block.y * g.block.z;
    const uint64_t blocks = uint64_t(g.cluster.x) * g.cluster.y * g.cluster.z;
    if (threads == 0 || threads > 1024)
        refuse("a block of " + std::to_string(threads) + " threads");
    if (blocks == 0 || blocks > 16) refuse("a cluster of " + std::to_string(blocks) + " blocks");
    if (uint64_t(g.grid.x) * g.grid.y * g.grid.z == 0) refuse("a grid without blocks");
    if (g.grid.x % g.cluster.x || g.grid.y % g.cluster.y || g.grid.z % g.cluster.z) {
        refuse("the grid is not a multiple of the cluster");
    }
    if (g.grid.x >= 1u << 31 || g.grid.y > 65535 || g.grid.z > 65535) {
        refuse("a grid of " + describe(g.grid) + " blocks; at most (2147483647, 65535, 65535)");
    }
    if (g.shared_bytes > MAX_BLOCK_SHARED) {
        refuse(std::to_string(g.shared_bytes) + " bytes of shared memory; a block can have " +
               std::to_string(MAX_BLOCK_SHARED));
    }
}

inline void run_grid(Grid grid) {
    check_launch(grid);
    std::optional<GlobalOrder> order;
    if (grid.options->check_order && !grid.options->regions.empty()) {
        grid.order = &order.emplace(*grid.options, grid.grid, grid.cluster,
                                    static_cast<int>(grid.block.x * grid.block.y * grid.block.z));
    }
    const dim3 clusters(grid.grid.x / grid.cluster.x, grid.grid.y / grid.cluster.y,
                        grid.grid.z / grid.cluster.z);
    const uint64_t count = uint64_t(clusters.x) * clusters.y * clusters.z;
    const uint64_t host_threads =
        std::min<uint64_t>(static_cast<uint64_t>(std::max(1, grid.options->host_threads)), count);
    RunningClusters running(host_threads);
    grid.running = &running;
    std::atomic<uint64_t> next{0};
    std::mutex mutex;
    std::exception_ptr error;
    const auto work = [&] {
        for (uint64_t i; (i = next.fetch_add(1)) < count;) {
            try {
                ClusterRun(grid,
                           dim3(unsigned(i % clusters.x), unsigned(i / clusters.x % clusters.y),
                                unsigned(i / (uint64_t(clusters.x) * clusters.y))))
                    .run();
            } catch (...) {
                const std::lock_guard lock(mutex);
                if (!error) error = std::current_exception();
                next = count;
            }
        }
        running.leave();
    };
    std::vector<std::thread> threads;
    for (uint64_t i = 1; i < host_threads; ++i) threads.emplace_back(work);
    work();
    for (std::thread& t : threads) t.join();
    if (error) std::rethrow_exception(error);
}

void launch(const KernelCall& call, bool dependent, int blocks_per_sm, dim3 grid, dim3 block,
            dim3 cluster, size_t shared_bytes) {
    const Options chosen = chosen_options();
    Grid g;
    g.grid = grid;
    g.block = block;
    g.cluster = cluster;
    g.shared_bytes = static_cast<uint32_t>(std::min<size_t>(shared_bytes, ~0u));
    g.dependent = dependent;
    g.block_registers = SM_REGISTERS / blocks_per_sm;
    g.name = chosen.kernel.empty() ? symbol_name(call.kernel) : chosen.kernel;
    g.call = &call;
    g.options = &chosen;
    run_grid(g);
}
// The CUDA runtime is not part of this back end; what calls it fails as it would without a GPU.
[[noreturn]] void throw_cuda_error(cudaError_t error, const char* what) {
    throw std::runtime_error(std::string("kittens: ") + what + ": CUDA error " +
                             std::to_string(static_cast<int>(error)));
}

}  // namespace emulated
}  // namespace kittens::inline on_cpu
