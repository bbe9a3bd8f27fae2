// The load-compute-finish template: a GEMM whose finish block shares memory with the input stages,
// sums over segments of any length, and a map without a finish block. The inputs are small
// integers, so that every result is exact.
#include "device.cuh"
#include "prototype.cuh"

namespace unit {
namespace {

namespace prototype = kittens::prototype;
namespace lcf = kittens::prototype::lcf;
using schedule::TileGrid;

constexpr int ceil_div(int a, int b) { return (a + b - 1) / b; }
// Of a matrix for TMA: rows are padded to a multiple of 16 bytes. What TMA stores has such rows
// itself, since it writes the last 16 bytes of a row whole.
View tma_view(int rows, int cols, int element_bytes) {
    const int unit = 16 / element_bytes;
    return View::padded(1, 1, rows, cols, unit + (unit - cols % unit) % unit, 0);
}
Values random_matrix(Case& c, const View& view, int limit) {
    const Values drawn = c.integers(size_t(view.r) * view.c, -limit, limit);
    Values values(view.extent(), poison);
    for (int r = 0; r < view.r; ++r) {
        for (int k = 0; k < view.c; ++k)
            values[view.index(0, 0, r, k)] = drawn[size_t(r) * view.c + k];
    }
    return values;
}

// ---- C = A B^T: 64 x 128 of C per consumer warpgroup ----

// `shared_stages` of the input stages lie under the finish block. The blocks of a cluster work on
// one column of C, and each loads its part of B for both.
template <int warpgroups, int stages, int shared_stages, int cluster_blocks = 1>
struct Gemm {
    using a_tile = st_bf<64, 64>;
    using b_tile = st_bf<128, 64>;
    using b_part = st_bf<128 / cluster_blocks, 64>;
    using c_tile = st_fl<64, 128>;
    struct layout {
        struct globals {
            global<bf16, a_tile> a;
            global<bf16, b_part> b;
            global<float, c_tile> c;
        };
        struct input_block {
            a_tile a[warpgroups];
            b_part b[cluster_blocks];
        };
        struct finish_block {
            c_tile c[warpgroups];
        };
        struct common_state {
            int row, col;  // of the block, in tiles of 64 * warpgroups x 128
        };
        struct consumer_state {
            rt_fl<16, 128> sum;
        };
    };
    static constexpr int NUM_CONSUMER_WARPS = 4 * warpgroups;
    static constexpr int INPUT_PIPE_STAGES = stages;
    static constexpr int PRODUCER_BARRIER_ARRIVALS = 1;
    static constexpr int CONSUMER_BARRIER_ARRIVALS = NUM_CONSUMER_WARPS * cluster_blocks;
    static constexpr int CLUSTER_BLOCKS = cluster_blocks;
    static constexpr int MAX_SHARED_MEMORY =
        1024 + (stages - shared_stages) * int(sizeof(typename layout::input_block)) +
        int(sizeof(typename layout::finish_block));

    static __device__ void common_setup(lcf::common_setup_args<layout> args) {
        const auto& g = args.globals;
        const TileGrid grid{ceil_div(g.c.rows(), 64 * warpgroups * cluster_blocks),
                            ceil_div(g.c.cols(), 128)};
        const int task = schedule::persistent_task(args.task_iter, blockIdx.x / cluster_blocks,
                                                   gridDim.x / cluster_blocks, grid.size());
        if (task < 0) return;
        const schedule::Tile tile = schedule::grouped_raster(task, grid, 3);
        args.common = {tile.row * cluster_blocks + int(blockIdx.x % cluster_blocks), tile.col};
        args.num_iters = ceil_div(g.a.cols(), 64);
    }
    // A consumer warp arrives in every block that writes into its block.
    static __device__ void arrive_everywhere(semaphore& s) {
        if constexpr (cluster_blocks == 1) {
            if (warp::laneid() == 0) arrive(s);
        } else {
            warp::sync();
            if (warp::laneid() < cluster_blocks) arrive_remote(s, warp::laneid());
        }
    }
    struct producer {
        static __device__ void setup(lcf::producer_setup_args<layout>) {
            if constexpr (warpgroups == 2) warpgroup::decrease_registers<40>();
        }
        static __device__ void load(lcf::producer_load_args<layout> args) {
            if (warpgroup::laneid() != 0) return;
            const auto [row, col] = args.common;
            tma::expect(args.inputs_arrived, args.input);
            for (int i = 0; i < warpgroups; ++i) {
                tma::load_async(args.input.a[i], args.globals.a, {row * warpgroups + i, args.iter},
                                args.inputs_arrived);
            }
            if constexpr (cluster_blocks == 1) {
                tma::load_async(args.input.b[0], args.globals.b, {col, args.iter},
                                args.inputs_arrived);
            } else {
                const int rank = cluster::rank();
                tma::cluster::load_async(args.input.b[rank], args.globals.b,
                                         {col * cluster_blocks + rank, args.iter},
                                         args.inputs_arrived, (1 << cluster_blocks) - 1);
            }
        }
    };
    struct consumer {
        static __device__ void setup(lcf::consumer_setup_args<layout> args) {
            if constexpr (warpgroups == 2) warpgroup::increase_registers<232>();
            warp::zero(args.state.sum);
        }
        static __device__ void compute(lcf::consumer_compute_args<layout> args) {
            warpgroup::mma_ABt(args.state.sum, args.input.a[warpgroup::groupid()],
                               reinterpret_cast<b_tile&>(args.input.b));
            warpgroup::mma_async_wait(args.state.sum);
            arrive_everywhere(args.inputs_finished);
        }
        static __device__ void finish(lcf::consumer_finish_args<layout> args) {
            const int id = warpgroup::groupid();
            warpgroup::store(args.finish.c[id], args.state.sum);
            warpgroup::sync(id + 1);
            if (warpgroup::laneid() == 0) {
                tma::store_async(args.globals.c, args.finish.c[id],
                                 {args.common.row * warpgroups + id, args.common.col});
                tma::store_async_read_wait();
            }
            arrive_everywhere(args.finish_finished);
        }
    };
};

template <class T>
void gemm_case(const char* what, int m, int n, int k, int blocks) {
    const int groups = T::NUM_CONSUMER_WARPS / 4, stages = T::INPUT_PIPE_STAGES;
    blocks *= T::CLUSTER_BLOCKS;
    run(text("gemm %d warpgroups %d stages %d KiB %dx%dx%d %d blocks %s", groups, stages,
             T::MAX_SHARED_MEMORY / 1024, m, n, k, blocks, what),
        [&](Case& c) {
            const View va = tma_view(m, k, 2), vb = tma_view(n, k, 2), vc = tma_view(m, n, 4);
            const Values a = random_matrix(c, va, 3), b = random_matrix(c, vb, 3);
            Values expected(vc.extent(), poison);
            for (int i = 0; i < m; ++i) {
                const double* row = a.data() + va.index(0, 0, i, 0);
                for (int j = 0; j < n; ++j) {
                    const double* col = b.data() + vb.index(0, 0, j, 0);
                    double sum = 0;
                    for (int l = 0; l < k; ++l) sum += row[l] * col[l];
                    expected[vc.index(0, 0, i, j)] = sum;
                }
            }
            using globals = typename T::layout::globals;
            bf16* pa = c.input<bf16>("a", a);
            bf16* pb = c.input<bf16>("b", b);
            float* pc = c.output<float>("c", Values(vc.extent(), poison));
            c.expect(expected, bit_exact, static_cast<int>(vc.row_stride));
            c.launch([&] {
                lcf::launch<T>(blocks, nullptr,
                               globals{make_global<global<bf16, typename T::a_tile>>(pa, va),
                                       make_global<global<bf16, typename T::b_part>>(pb, vb),
                                       make_global<global<float, typename T::c_tile>>(pc, vc)});
            });
        });
}

template <class T>
void gemm_cases() {
    gemm_case<T>("one task", 64, 128, 64, 1);
    gemm_case<T>("one iteration", 200, 300, 64, 2);
    gemm_case<T>("no iteration", 200, 300, 0, 2);
    gemm_case<T>("ragged", 197, 204, 333, 3);
    gemm_case<T>("one task per block", 256, 256, 130, 8);
    gemm_case<T>("more blocks than tasks", 64, 128, 130, 5);
    gemm_case<T>("many tasks", 300, 400, 200, 2);
    gemm_case<T>("many short tasks", 300, 520, 7, 1);
}

void gemms() {
    gemm_cases<Gemm<1, 1, 1>>();
    gemm_cases<Gemm<1, 3, 1>>();
    gemm_cases<Gemm<2, 4, 1>>();
    if constexpr (intensity >= 2) {
        gemm_cases<Gemm<1, 1, 0>>();
        gemm_cases<Gemm<1, 2, 1>>();
        gemm_cases<Gemm<2, 2, 2>>();
        gemm_cases<Gemm<1, 2, 0, 2>>();
    }
    gemm_cases<Gemm<1, 4, 1, 2>>();
}
const Section gemm_section("pipeline/lcf", gemms);

// ---- Sums over segments of tiles: tasks of every length, in any order ----

enum class Loading { one_thread, every_warp };

// `shared_stages` of the input stages lie under the finish block.
template <int stages, int shared_stages, Loading loading>
struct SegmentSum {
    using tile = st_fl<64, 32>;
    struct layout {
        struct globals {
            global<float, tile, st_fl<16, 32>> values;  // tiles one below the other
            global<float> starts;                       // first tile of every segment, and the end
            global<float, tile> sums;                   // a tile per segment
        };
        struct input_block {
            tile values;
        };
        struct finish_block {
            tile sums;
        };
        struct common_state {
            int segment, first;
        };
        struct consumer_state {
            rt_fl<16, 32> sums;
        };
    };
    static constexpr int NUM_CONSUMER_WARPS = 4;
    static constexpr int INPUT_PIPE_STAGES = stages;
    static constexpr int PRODUCER_BARRIER_ARRIVALS = loading == Loading::one_thread ? 1 : 4;
    static constexpr int MAX_SHARED_MEMORY =
        1024 + (stages + 1 - shared_stages) * int(sizeof(tile));

    static __device__ void common_setup(lcf::common_setup_args<layout> args) {
        const auto& starts = args.globals.starts;
        const int segment =
            schedule::persistent_task(args.task_iter, blockIdx.x, gridDim.x, starts.cols() - 1);
        if (segment < 0) return;
        const auto start = [&](int i) { return int(arch::load_global(starts.at(elements(0, i)))); };
        args.common = {segment, start(segment)};
        args.num_iters = start(segment + 1) - start(segment);
    }
    struct producer {
        static __device__ void setup(lcf::producer_setup_args<layout>) {}
        static __device__ void load(lcf::producer_load_args<layout> args) {
            const int row = 64 * (args.common.first + args.iter);
            if constexpr (loading == Loading::one_thread) {
                if (warpgroup::laneid() != 0) return;
                tma::expect(args.inputs_arrived, args.input);
                tma::load_async(args.input.values, args.globals.values, elements(row, 0),
                                args.inputs_arrived);
            } else {
                // A quarter of the tile each.
                if (warp::laneid() != 0) return;
                auto& quarter =
                    reinterpret_cast<st_fl<16, 32>(&)[4]>(args.input.values)[warpgroup::warpid()];
                tma::expect(args.inputs_arrived, quarter);
                tma::load_async(quarter, args.globals.values,
                                elements(row + 16 * warpgroup::warpid(), 0), args.inputs_arrived);
            }
        }
    };
    struct consumer {
        static __device__ void setup(lcf::consumer_setup_args<layout> args) {
            warp::zero(args.state.sums);
        }
        static __device__ void compute(lcf::consumer_compute_args<layout> args) {
            rt_fl<16, 32> values;
            warpgroup::load(values, args.input.values);
            warp::sync();
            if (warp::laneid() == 0) arrive(args.inputs_finished);
            warp::add(args.state.sums, args.state.sums, values);
        }
        static __device__ void finish(lcf::consumer_finish_args<layout> args) {
            warpgroup::store(args.finish.sums, args.state.sums);
            warpgroup::sync(1);
            if (warpgroup::laneid() == 0) {
                tma::store_async(args.globals.sums, args.finish.sums, {args.common.segment, 0});
                tma::store_async_read_wait();
            }
            if (warp::laneid() == 0) arrive(args.finish_finished);
        }
    };
};

template <class T>
void segment_case(const char* what, const std::vector<int>& lengths, int blocks) {
    run(text("segments %s %d blocks %d stages %d KiB %d arrivals", what, blocks,
             T::INPUT_PIPE_STAGES, T::MAX_SHARED_MEMORY / 1024, T::PRODUCER_BARRIER_ARRIVALS),
        [&](Case& c) {
            const int segments = int(lengths.size());
            Values starts{0};
            for (int length : lengths) starts.push_back(starts.back() + length);
            const int tiles = int(starts.back());
            const Values values = c.integers(size_t(tiles) * 64 * 32, -100, 100);
            Values expected(size_t(segments) * 64 * 32, 0.0);
            for (int s = 0; s < segments; ++s) {
                for (int t = int(starts[s]); t < int(starts[s + 1]); ++t) {
                    for (int i = 0; i < 64 * 32; ++i) {
                        expected[size_t(s) * 2048 + i] += values[size_t(t) * 2048 + i];
                    }
                }
            }
            using globals = typename T::layout::globals;
            float* from = c.input<float>("values", values.empty() ? Values{0} : values);
            float* at = c.input<float>("starts", starts);
            float* to = c.output<float>("sums", expected.size());
            c.expect(expected, bit_exact, 32);
            c.launch([&] {
                lcf::launch<T>(blocks, nullptr,
                               globals{make_global<global<float, typename T::tile, st_fl<16, 32>>>(
                                           from, View::contiguous(1, 1, 64 * tiles, 32)),
                                       matrix(at, 1, segments + 1),
                                       make_global<global<float, typename T::tile>>(
                                           to, View::contiguous(1, 1, 64 * segments, 32))});
            });
        });
}

template <class T>
void segment_cases() {
    segment_case<T>("none empty", {3, 1, 2, 7, 1, 1, 4}, 1);
    segment_case<T>("mixed", {0, 2, 0, 0, 1, 9, 0, 1, 1, 0, 5, 3, 0}, 1);
    segment_case<T>("mixed", {0, 2, 0, 0, 1, 9, 0, 1, 1, 0, 5, 3, 0}, 4);
    segment_case<T>("all empty", {0, 0, 0, 0, 0}, 2);
    segment_case<T>("ones", std::vector<int>(41, 1), 3);
    segment_case<T>("fewer than blocks", {6, 0}, 5);
    std::vector<int> many;
    for (int i = 0; i < 97; ++i) many.push_back((i * i + i / 7) % 6);
    segment_case<T>("many", many, 5);
}

void segments() {
    segment_cases<SegmentSum<1, 0, Loading::one_thread>>();
    segment_cases<SegmentSum<1, 1, Loading::one_thread>>();
    segment_cases<SegmentSum<2, 0, Loading::every_warp>>();
    segment_cases<SegmentSum<2, 1, Loading::one_thread>>();
    segment_cases<SegmentSum<3, 1, Loading::every_warp>>();
    segment_cases<SegmentSum<4, 0, Loading::one_thread>>();
    segment_cases<SegmentSum<4, 1, Loading::one_thread>>();
}
const Section segment_section("pipeline/lcf", segments);

// ---- y = 2 x - column's shift, a band of rows per task, no finish block ----

template <int consumer_warps, int producer_warps, int stages>
struct Shift {
    using tile = st_bf<16 * consumer_warps, 64>;
    struct layout {
        struct globals {
            global<bf16, tile> x;
            global<bf16> shift, y;
        };
        struct input_block {
            tile x;
        };
        struct consumer_state {
            rt_bf<16, 64> y;
        };
    };
    static constexpr int NUM_CONSUMER_WARPS = consumer_warps;
    static constexpr int NUM_PRODUCER_WARPS = producer_warps;
    static constexpr int INPUT_PIPE_STAGES = stages;
    static constexpr int PRODUCER_BARRIER_ARRIVALS = 1;
    static constexpr int NUM_BLOCKS = 2;
    using consumers = group<consumer_warps>;

    static __device__ int band(int task_iter) {
        return task_iter * int(gridDim.x) + int(blockIdx.x);
    }
    static __device__ void common_setup(lcf::common_setup_args<layout> args) {
        const auto& x = args.globals.x;
        const bool has_work = band(args.task_iter) * tile::rows < x.rows();
        args.num_iters = has_work ? ceil_div(x.cols(), 64) : -1;
    }
    struct producer {
        static __device__ void setup(lcf::producer_setup_args<layout>) {}
        static __device__ void load(lcf::producer_load_args<layout> args) {
            if (kittens::warpid() != consumer_warps || warp::laneid() != 0) return;
            tma::expect(args.inputs_arrived, args.input);
            tma::load_async(args.input.x, args.globals.x, {band(args.task_iter), args.iter},
                            args.inputs_arrived);
        }
    };
    struct consumer {
        static __device__ void setup(lcf::consumer_setup_args<layout>) {}
        static __device__ void compute(lcf::consumer_compute_args<layout> args) {
            auto& y = args.state.y;
            typename rt_bf<16, 64>::row_vec shift;
            warp::load(shift, args.globals.shift, {0, 0, 0, args.iter});
            consumers::load(y, args.input.x);
            warp::sync();
            if (warp::laneid() == 0) arrive(args.inputs_finished);
            warp::add(y, y, y);
            warp::sub_col(y, y, shift);
            consumers::store(args.globals.y, y, {0, 0, band(args.task_iter), args.iter});
        }
        static __device__ void finish(lcf::consumer_finish_args<layout>) {}
    };
};

template <class T>
void shift_case(int rows, int cols, int blocks) {
    run(text("shift %d + %d warps %d stages %dx%d %d blocks", T::NUM_CONSUMER_WARPS,
             T::NUM_PRODUCER_WARPS, T::INPUT_PIPE_STAGES, rows, cols, blocks),
        [&](Case& c) {
            const View view = tma_view(rows, cols, 2);
            const Values x = random_matrix(c, view, 50), shift = c.integers(cols, -50, 50);
            Values expected(view.extent(), poison);
            for (int i = 0; i < rows; ++i) {
                for (int j = 0; j < cols; ++j) {
                    const size_t k = view.index(0, 0, i, j);
                    expected[k] = 2 * x[k] - shift[j];
                }
            }
            bf16* px = c.input<bf16>("x", x);
            bf16* ps = c.input<bf16>("shift", shift);
            bf16* py = c.output<bf16>("y", Values(view.extent(), poison));
            c.expect(expected, bit_exact, static_cast<int>(view.row_stride));
            using globals = typename T::layout::globals;
            c.launch([&] {
                lcf::launch<T>(blocks, nullptr,
                               globals{make_global<global<bf16, typename T::tile>>(px, view),
                                       matrix(ps, 1, cols), make_global<global<bf16>>(py, view)});
            });
        });
}

template <class T>
void shift_cases() {
    shift_case<T>(16, 64, 1);
    shift_case<T>(129, 100, 2);
    shift_case<T>(301, 7, 3);
    shift_case<T>(1000, 333, 7);
    shift_case<T>(17, 640, 9);
}

void shifts() {
    shift_cases<Shift<1, 1, 1>>();
    shift_cases<Shift<3, 2, 2>>();
    shift_cases<Shift<4, 4, 3>>();
    shift_cases<Shift<8, 4, 4>>();
    shift_cases<Shift<12, 1, 2>>();
}
const Section shift_section("pipeline/lcf", shifts);

}  // namespace
}  // namespace unit
