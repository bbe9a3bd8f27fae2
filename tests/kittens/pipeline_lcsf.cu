// The load-compute-store-finish template: a map with rings of inputs and outputs of every length,
// and a rotation of column pairs with a checksum per task in a finish block. Exact, on small
// integers.
#include "device.cuh"
#include "prototype.cuh"

namespace unit {
namespace {

namespace lcsf = kittens::prototype::lcsf;

// Tasks are bands of 64 rows; `widths` gives the columns of each, in tiles.
struct Bands {
    global<float> widths;

    // False when there is no band left.
    __device__ bool next(int task_iter, int& num_iters) const {
        const int band = schedule::persistent_task(task_iter, blockIdx.x, gridDim.x, widths.cols());
        if (band < 0) return false;
        num_iters = int(arch::load_global(widths.at(elements(0, band))));
        return true;
    }
    static __device__ int band(int task_iter) {
        return task_iter * int(gridDim.x) + int(blockIdx.x);
    }
};

// ---- y = x * row's scale ----

template <int input_stages, int output_stages, int producer_warps>
struct Scale {
    using tile = st_bf<64, 32>;
    struct layout {
        struct globals {
            global<bf16, tile> x;
            global<bf16> scale;
            global<bf16, tile> y;
            Bands bands;
        };
        struct input_block {
            tile x;
        };
        struct output_block {
            tile y;
        };
        struct consumer_state {
            rt_bf<16, 32>::col_vec scale;
        };
    };
    static constexpr int NUM_CONSUMER_WARPS = 4;
    static constexpr int NUM_PRODUCER_WARPS = producer_warps;
    static constexpr int INPUT_PIPE_STAGES = input_stages;
    static constexpr int OUTPUT_PIPE_STAGES = output_stages;
    static constexpr int PRODUCER_BARRIER_ARRIVALS = 1;

    static __device__ bool is_leader() {
        return kittens::warpid() == NUM_CONSUMER_WARPS && warp::laneid() == 0;
    }
    static __device__ void common_setup(lcsf::common_setup_args<layout> args) {
        args.globals.bands.next(args.task_iter, args.num_iters);
    }
    struct producer {
        static __device__ void setup(lcsf::producer_setup_args<layout>) {}
        static __device__ void load(lcsf::producer_load_args<layout> args) {
            if (!is_leader()) return;
            tma::expect(args.inputs_arrived, args.input);
            tma::load_async(args.input.x, args.globals.x, {Bands::band(args.task_iter), args.iter},
                            args.inputs_arrived);
        }
        static __device__ void store(lcsf::producer_store_args<layout> args) {
            if (!is_leader()) return;
            tma::store_async(args.globals.y, args.output.y,
                             {Bands::band(args.task_iter), args.iter});
            tma::store_async_read_wait();
            arrive(args.outputs_finished);
        }
    };
    struct consumer {
        static __device__ void setup(lcsf::consumer_setup_args<layout> args) {
            warpgroup::load(args.state.scale, args.globals.scale,
                            {0, 0, 0, Bands::band(args.task_iter)});
        }
        static __device__ void compute(lcsf::consumer_compute_args<layout> args) {
            rt_bf<16, 32> x;
            warpgroup::load(x, args.input.x);
            warp::sync();
            if (warp::laneid() == 0) arrive(args.inputs_finished);
            warp::mul_row(x, x, args.state.scale);
            warpgroup::store(args.output.y, x);
            warp::sync();
            if (warp::laneid() == 0) arrive(args.outputs_arrived);
        }
        static __device__ void finish(lcsf::consumer_finish_args<layout>) {}
    };
};

struct Problem {
    const char* name;
    std::vector<int> widths;  // in tiles
    int blocks;
};
std::vector<Problem> problems() {
    std::vector<int> many;
    for (int i = 0; i < 19; ++i) many.push_back((i * i + i / 5) % 6);
    return {{"one tile", {1}, 1},
            {"one band", {9}, 1},
            {"one tile each", std::vector<int>(23, 1), 2},
            {"with empty bands", {0, 3, 0, 0, 1, 7, 1, 0, 0, 2, 0}, 1},
            {"with empty bands", {0, 3, 0, 0, 1, 7, 1, 0, 0, 2, 0}, 3},
            {"all empty", {0, 0, 0}, 2},
            {"fewer than blocks", {4, 2}, 6},
            {"many", many, 4}};
}
// A matrix that is `cut` rows and columns smaller than its bands and tiles; its rows stay multiples
// of 16 bytes, since TMA writes the last 16 bytes of a row whole.
View matrix_of(const Problem& problem, int tile_cols, int cut) {
    int width = 1;
    for (int w : problem.widths) width = w > width ? w : width;
    const int cols = width * tile_cols - cut;
    return View::padded(1, 1, int(problem.widths.size()) * 64 - cut, cols, 8 + (8 - cols % 8) % 8,
                        0);
}
Values widths_of(const Problem& problem) {
    return Values(problem.widths.begin(), problem.widths.end());
}

template <class T>
void scale_case(const Problem& problem, int cut) {
    run(text("scale %d + %d stages %d producer warps, %s, cut %d, %d blocks", T::INPUT_PIPE_STAGES,
             T::OUTPUT_PIPE_STAGES, T::NUM_PRODUCER_WARPS, problem.name, cut, problem.blocks),
        [&](Case& c) {
            const View view = matrix_of(problem, 32, cut);
            const Values x = c.integers(view.extent(), -12, 12), scale = c.integers(view.r, -9, 9);
            const Values initial(view.extent(), poison);
            Values expected = initial;
            for (int i = 0; i < view.r; ++i) {
                for (int j = 0; j < view.c && j < problem.widths[i / 64] * 32; ++j) {
                    const size_t k = view.index(0, 0, i, j);
                    expected[k] = x[k] * scale[i];
                }
            }
            bf16* px = c.input<bf16>("x", x);
            bf16* ps = c.input<bf16>("scale", scale);
            float* pw = c.input<float>("widths", widths_of(problem));
            bf16* py = c.output<bf16>("y", initial);
            c.expect(expected, bit_exact, static_cast<int>(view.row_stride));
            using globals = typename T::layout::globals;
            using G = global<bf16, typename T::tile>;
            c.launch([&] {
                lcsf::launch<T>(problem.blocks, nullptr,
                                globals{make_global<G>(px, view),
                                        matrix(ps, 1, view.r),
                                        make_global<G>(py, view),
                                        {matrix(pw, 1, int(problem.widths.size()))}});
            });
        });
}
template <class T>
void scale_cases() {
    for (const Problem& problem : problems()) scale_case<T>(problem, 0);
    scale_case<T>(problems().front(), 8);
    scale_case<T>(problems().back(), 24);
}
void scales() {
    scale_cases<Scale<1, 1, 1>>();
    scale_cases<Scale<4, 1, 4>>();
    if constexpr (intensity >= 2) {
        scale_cases<Scale<3, 2, 2>>();
        scale_cases<Scale<4, 4, 4>>();
        scale_cases<Scale<1, 3, 4>>();
    }
}
const Section scale_section("pipeline/lcsf", scales);

// ---- (u, v) = (c x1 - s x2, s x1 + c x2), c and s of the row; and the sum of all u of a band ----

template <int input_stages, int output_stages, int shared_stages>
struct Rotate {
    using tile = st_fl<64, 16>;
    struct layout {
        struct globals {
            global<float, tile> x1, x2, u, v;
            global<float> cosine, sine;  // 64 rows
            global<float, tile> sums;
            Bands bands;
        };
        struct input_block {
            tile x1, x2;
        };
        struct output_block {
            tile u, v;
        };
        struct finish_block {
            tile sums;
        };
        struct consumer_state {
            rt_fl<16, 16> sums;
            rt_fl<16, 16>::col_vec cosine, sine;
        };
    };
    static constexpr int NUM_CONSUMER_WARPS = 4;
    static constexpr int INPUT_PIPE_STAGES = input_stages;
    static constexpr int OUTPUT_PIPE_STAGES = output_stages;
    static constexpr int tile_bytes = int(sizeof(tile));
    static constexpr int MAX_SHARED_MEMORY =
        1024 + 2 * (input_stages + output_stages) * tile_bytes + (1 - shared_stages) * tile_bytes;

    static __device__ void common_setup(lcsf::common_setup_args<layout> args) {
        args.globals.bands.next(args.task_iter, args.num_iters);
    }
    // Two producer warps load and store one of the two tiles each, the other two arrive alone.
    struct producer {
        static __device__ void setup(lcsf::producer_setup_args<layout>) {}
        static __device__ void load(lcsf::producer_load_args<layout> args) {
            if (warp::laneid() != 0) return;
            const int id = warpgroup::warpid();
            if (id >= 2) return arrive(args.inputs_arrived);
            tile& x = id == 0 ? args.input.x1 : args.input.x2;
            tma::expect(args.inputs_arrived, x);
            tma::load_async(x, id == 0 ? args.globals.x1 : args.globals.x2,
                            {Bands::band(args.task_iter), args.iter}, args.inputs_arrived);
        }
        static __device__ void store(lcsf::producer_store_args<layout> args) {
            if (warp::laneid() != 0) return;
            const int id = warpgroup::warpid();
            if (id < 2) {
                tma::store_async(id == 0 ? args.globals.u : args.globals.v,
                                 id == 0 ? args.output.u : args.output.v,
                                 {Bands::band(args.task_iter), args.iter});
                tma::store_async_read_wait();
            }
            arrive(args.outputs_finished);
        }
    };
    struct consumer {
        static __device__ void setup(lcsf::consumer_setup_args<layout> args) {
            warpgroup::load(args.state.cosine, args.globals.cosine, {0, 0, 0, 0});
            warpgroup::load(args.state.sine, args.globals.sine, {0, 0, 0, 0});
            warp::zero(args.state.sums);
        }
        static __device__ void compute(lcsf::consumer_compute_args<layout> args) {
            rt_fl<16, 16> x1, x2, a, b;
            auto& state = args.state;
            warpgroup::load(x1, args.input.x1);
            warpgroup::load(x2, args.input.x2);
            warp::sync();
            if (warp::laneid() == 0) arrive(args.inputs_finished);
            warp::mul_row(a, x1, state.cosine);
            warp::mul_row(b, x2, state.sine);
            warp::sub(a, a, b);
            warpgroup::store(args.output.u, a);
            warp::add(state.sums, state.sums, a);
            warp::mul_row(a, x1, state.sine);
            warp::mul_row(b, x2, state.cosine);
            warp::add(a, a, b);
            warpgroup::store(args.output.v, a);
            warp::sync();
            if (warp::laneid() == 0) arrive(args.outputs_arrived);
        }
        static __device__ void finish(lcsf::consumer_finish_args<layout> args) {
            warpgroup::store(args.finish.sums, args.state.sums);
            warpgroup::sync(1);
            if (warpgroup::laneid() == 0) {
                tma::store_async(args.globals.sums, args.finish.sums,
                                 {Bands::band(args.task_iter), 0});
                tma::store_async_read_wait();
            }
            if (warp::laneid() == 0) arrive(args.finish_finished);
        }
    };
};

template <class T>
void rotate_case(const Problem& problem, int cut) {
    run(text("rotate %d + %d stages %d KiB, %s, cut %d, %d blocks", T::INPUT_PIPE_STAGES,
             T::OUTPUT_PIPE_STAGES, T::MAX_SHARED_MEMORY / 1024, problem.name, cut, problem.blocks),
        [&](Case& c) {
            const int bands = int(problem.widths.size());
            const View view = matrix_of(problem, 16, cut);
            const View sums_view = View::contiguous(1, 1, bands * 64, 16);
            const Values x1 = c.integers(view.extent(), -50, 50);
            const Values x2 = c.integers(view.extent(), -50, 50);
            const Values cosine = c.integers(64, -9, 9), sine = c.integers(64, -9, 9);
            const Values initial(view.extent(), poison);
            Values u = initial, v = initial, sums(sums_view.extent(), 0.0);
            for (int i = 0; i < view.r; ++i) {
                for (int j = 0; j < view.c && j < problem.widths[i / 64] * 16; ++j) {
                    const size_t k = view.index(0, 0, i, j);
                    u[k] = cosine[i % 64] * x1[k] - sine[i % 64] * x2[k];
                    v[k] = sine[i % 64] * x1[k] + cosine[i % 64] * x2[k];
                    sums[size_t(i) * 16 + j % 16] += u[k];
                }
            }
            using G = global<float, typename T::tile>;
            using globals = typename T::layout::globals;
            float* p1 = c.input<float>("x1", x1);
            float* p2 = c.input<float>("x2", x2);
            float* pc = c.input<float>("cosine", cosine);
            float* ps = c.input<float>("sine", sine);
            float* pw = c.input<float>("widths", widths_of(problem));
            float* pu = c.output<float>("u", initial);
            c.expect(u, bit_exact, static_cast<int>(view.row_stride));
            float* pv = c.output<float>("v", initial);
            c.expect(v, bit_exact, static_cast<int>(view.row_stride));
            float* to = c.output<float>("sums", sums_view.extent());
            c.expect(sums, bit_exact, 16);
            c.launch([&] {
                lcsf::launch<T>(problem.blocks, nullptr,
                                globals{make_global<G>(p1, view),
                                        make_global<G>(p2, view),
                                        make_global<G>(pu, view),
                                        make_global<G>(pv, view),
                                        matrix(pc, 1, 64),
                                        matrix(ps, 1, 64),
                                        make_global<G>(to, sums_view),
                                        {matrix(pw, 1, bands)}});
            });
        });
}
template <class T>
void rotate_cases() {
    for (const Problem& problem : problems()) rotate_case<T>(problem, 0);
    rotate_case<T>(problems().back(), 12);
}
void rotations() {
    rotate_cases<Rotate<1, 1, 1>>();
    rotate_cases<Rotate<4, 1, 1>>();
    if constexpr (intensity >= 2) {
        rotate_cases<Rotate<2, 1, 1>>();
        rotate_cases<Rotate<2, 3, 1>>();
        rotate_cases<Rotate<3, 2, 0>>();
    }
}
const Section rotate_section("pipeline/lcsf", rotations);

}  // namespace
}  // namespace unit
