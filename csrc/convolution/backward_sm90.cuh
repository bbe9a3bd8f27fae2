// The gradients of x, the initial state, the weights and the bias, in one pass over x and the
// gradient of out. With z what the activation is applied to, computed again, and dz its gradient,
//
//   dx[t] = sum over w of weight[w] dz[t + width - 1 - w]      within the sequence
//   dweight[w] = sum over t of dz[t] x[t - width + 1 + w]      dbias = sum over t of dz[t]
//
// By channels, a thread has 8 bytes of neighbouring channels (or one channel) of a run of tokens.
// It goes along it in batches of four tokens, of which two are on their way while it computes,
// keeps the last inputs and dz, and finishes dx of a token with the dz of width - 1 tokens later;
// behind its run it makes those once more. By tokens: gradient_tokens.cuh.
//
// Sums of weights and bias stay in registers, then are added up in a fixed order: over the threads
// of a block, and by a second kernel over the blocks. Tokens of no sequence have dz = 0. The
// portable kernels do the same.
#pragma once

#include "csrc/convolution/gradient_tokens.cuh"

namespace thunderkittens::convolution {
namespace sm90 {

// Sums of a block: of rows of threads, each with COUNT sums of each of `lanes` columns.
template <int COUNT>
__device__ __forceinline__ void add_groups(float (&sums)[COUNT], int lanes, float* to,
                                           int64_t limit) {
    const uint32_t shared = arch::shared_address(kittens::shared_memory());
    const int thread = static_cast<int>(threadIdx.x), columns = lanes * COUNT;
    arch::sync_block();  // the rings have been read
#pragma unroll
    for (int i = 0; i < COUNT; ++i) {
        arch::store_shared(shared + 4 * (thread * COUNT + i), sums[i]);
    }
    arch::sync_block();
    for (int i = thread; i < columns && i < limit; i += THREADS) {
        float sum = 0.0f;
        for (int group = 0; group < THREADS / lanes; ++group) {
            sum += arch::load_shared<float>(shared + 4 * (group * columns + i));
        }
        arch::store_global(to + i, sum);
    }
}

// Batches of tokens on their way to a thread, in a ring of its own in shared memory: registers
// would not suffice for as many. Rows of one channel of 16 bits, which cp.async does not copy, are
// read when they are needed.
template <class T, int V>
struct Batches {
    using Vector = Neighbours<T, V>;
    static constexpr bool IN_RING = Vector::BYTES >= 4;
    static constexpr int BYTES = Vector::BYTES, ROW = 2 * THREADS * BYTES,
                         STAGE = BATCH_TOKENS * ROW;
    const T *x, *gradients;  // of the batch that is loaded next
    const int64_t x_stride, gradient_stride;
    int left;       // tokens that are not loaded yet
    uint32_t from;  // of the batch that is read

    __device__ __forceinline__ Batches(const T* x_, int64_t x_stride_, const T* gradients_,
                                       int64_t gradient_stride_, int there)
        : x(x_),
          gradients(gradients_),
          x_stride(x_stride_),
          gradient_stride(gradient_stride_),
          left(there),
          from(base()) {
        if constexpr (IN_RING) {
#pragma unroll
            for (int i = 0; i < STAGES - 1; ++i) load(from + i * STAGE);
        }
    }
    static __device__ __forceinline__ uint32_t base() {
        return arch::shared_address(kittens::shared_memory()) +
               static_cast<uint32_t>(threadIdx.x) * BYTES;
    }
    __device__ __forceinline__ void load(uint32_t to) {
#pragma unroll
        for (int i = 0; i < BATCH_TOKENS; ++i) {
            const bool exists = i < left;
            arch::cp_async<BYTES>(to + i * ROW, x, exists);
            arch::cp_async<BYTES>(to + i * ROW + ROW / 2, gradients, exists);
            x += x_stride;
            gradients += gradient_stride;
        }
        arch::cp_async_commit();
        left -= BATCH_TOKENS;
    }
    // Waits for a batch, and lets the one follow that is as many behind it as there are stages.
    __device__ __forceinline__ void next() {
        if constexpr (IN_RING) {
            arch::cp_async_wait<STAGES - 2>();
            load(from == base() ? from + (STAGES - 1) * STAGE : from - STAGE);
        }
    }
    __device__ __forceinline__ void read(int i, Vector& input, Vector& gradient) {
        if constexpr (IN_RING) {
            input = arch::load_shared<Vector>(from + i * ROW);
            gradient = arch::load_shared<Vector>(from + i * ROW + ROW / 2);
        } else {
            input.clear();
            gradient.clear();
            if (i < left) {
                input.load(x);
                gradient.load(gradients);
            }
            x += x_stride;
            gradients += gradient_stride;
        }
    }
    __device__ __forceinline__ void release() {
        if constexpr (IN_RING) {
            from = from == base() + (STAGES - 1) * STAGE ? base() : from + STAGE;
        } else {
            left -= BATCH_TOKENS;
        }
    }
    // Nothing is on its way any more.
    __device__ __forceinline__ void finish() {
        if constexpr (IN_RING) arch::cp_async_wait<0>();
    }
};

// What a thread that goes along the tokens keeps of V channels.
template <class T, int V, int WIDTH>
struct Run {
    static constexpr int BEFORE = WIDTH - 1;
    using Vector = Neighbours<T, V>;
    const BackwardParams& p;
    const int64_t channel, batch;
    Taps<T, V, WIDTH> taps;
    float sums[V * (WIDTH + 1)];

    __device__ __forceinline__ Run(const BackwardParams& p_, int64_t channel_, int64_t batch_)
        : p(p_), channel(channel_), batch(batch_) {
        taps.load(p.forward.weight, p.forward.bias, channel);
#pragma unroll
        for (int i = 0; i < V * (WIDTH + 1); ++i) sums[i] = 0.0f;
    }
    __device__ __forceinline__ T* at(const Operand& x, int64_t token) const {
        return static_cast<T*>(x.data) +
               (batch * x.batch_stride + channel * x.channel_stride + token * x.token_stride);
    }

    // Tokens [begin, begin + count), which are all that the thread has of a sequence.
    __device__ __forceinline__ void go(const Sequence& s, int64_t begin, int count) {
        const Params& f = p.forward;
        // Tokens that there are, from the begin of the run on; those of the sequence.
        const int there = static_cast<int>(min(s.end - begin, int64_t{count + BEFORE}));
        float in[WIDTH][V], dz[BEFORE][V];  // of a token behind those before it
        Vector before[BEFORE];
#pragma unroll
        for (int i = 0; i < BEFORE; ++i) {
            const int64_t from_begin = begin - s.begin - BEFORE + i;
            if (from_begin >= 0)
                before[i].load(at(f.x, begin - BEFORE + i));
            else
                before[i] = state_vector<T, V>(f.initial, s, channel, from_begin + BEFORE);
        }
        T* dx = at(p.dx, begin - BEFORE);
        Batches<T, V> batches(at(f.x, begin), f.x.token_stride, at(f.out, begin),
                              f.out.token_stride, there);
#pragma unroll
        for (int i = 0; i < BEFORE; ++i) {
#pragma unroll
            for (int v = 0; v < V; ++v) {
                in[i][v] = before[i].value(v);
                dz[i][v] = 0.0f;
            }
        }
        // The tokens of a batch that begins `first` tokens behind the begin, all of which are mine
        // where it is whole: behind the run they are another thread's.
        const auto go_along = [&]<bool whole>(int first) {
            batches.next();
#pragma unroll
            for (int i = 0; i < BATCH_TOKENS; ++i) {
                Vector input, gradient;
                batches.read(i, input, gradient);
                const bool mine = whole || first + i < count;
                float now[V], z[V], values[V];
#pragma unroll
                for (int v = 0; v < V; ++v) {
                    in[BEFORE][v] = input.value(v);
                    now[v] = gradient.value(v);
                    z[v] = taps.bias[v];
#pragma unroll
                    for (int w = 0; w < WIDTH; ++w) z[v] = fmaf(taps.tap(v, w), in[w][v], z[v]);
                }
                if (f.silu) {
#pragma unroll
                    for (int v = 0; v < V; ++v) now[v] = through_silu<T>(z[v], now[v]);
                }
#pragma unroll
                for (int v = 0; v < V; ++v) {
                    const float added = mine ? now[v] : 0.0f;
                    float* const sum = sums + v * (WIDTH + 1);
#pragma unroll
                    for (int w = 0; w < WIDTH; ++w) sum[w] = fmaf(added, in[w][v], sum[w]);
                    sum[WIDTH] += added;
                    values[v] = taps.tap(v, 0) * now[v];
#pragma unroll
                    for (int w = 1; w < WIDTH; ++w) {
                        values[v] = fmaf(taps.tap(v, w), dz[BEFORE - w][v], values[v]);
                    }
#pragma unroll
                    for (int w = 0; w + 1 < BEFORE; ++w) dz[w][v] = dz[w + 1][v];
                    dz[BEFORE - 1][v] = now[v];
#pragma unroll
                    for (int w = 0; w < BEFORE; ++w) in[w][v] = in[w + 1][v];
                }
                // Of the token that is finished, from the begin of the run on.
                const int token = first + i - BEFORE;
                if (token >= 0 && (whole || token < count) && p.dx.data != nullptr) {
                    rounded<T, V>(values).store(dx);
                }
                dx += p.dx.token_stride;
            }
            batches.release();
        };
        int first = 0;
#pragma unroll 1
        for (; first + BATCH_TOKENS <= count; first += BATCH_TOKENS) {
            go_along.template operator()<true>(first);
        }
#pragma unroll 1
        for (; first < count + BEFORE; first += BATCH_TOKENS) {
            go_along.template operator()<false>(first);
        }
        batches.finish();
    }
};

template <class T, int V, int WIDTH>
__device__ __forceinline__ void gradient_channels(const BackwardParams& p) {
    const Params& f = p.forward;
    const Place place(f.grid);
    const int64_t channels_before = place.channel_block * f.grid.lanes * V;
    const int64_t channel = channels_before + place.lane * V;
    const int64_t tokens = f.steps * BATCH_TOKENS - (WIDTH - 1);
    const int64_t first = (place.token_block * f.grid.groups + place.group) * tokens;
    const int64_t last = min(first + tokens, f.length);
    const bool there = channel < f.channels;
    Run<T, V, WIDTH> run(p, there ? channel : 0, place.batch);
    if (there) {
#pragma unroll 1
        for (int64_t token = first; token < last;) {
            const Sequence s = sequence_of(f, place.batch, token);
            const int64_t end = min(s.end, last);
            if (s.exists())
                run.go(s, token, static_cast<int>(end - token));
            else if (p.dx.data != nullptr)
                clear_run<T, V>(p.dx, place.batch, channel, token, end);
            token = end;
        }
    }
    // In a loop of its own, so that the other one keeps no more than it needs.
    if (there && (p.dinitial.data != nullptr || f.final.data != nullptr)) {
#pragma unroll 1
        for (int64_t token = first; token < last;) {
            const Sequence s = sequence_of(f, place.batch, token);
            const int64_t end = min(s.end, last);
#pragma unroll 1
            for (int v = 0; v < V && s.exists(); ++v) {
                state_gradients<T, WIDTH>(p, s, place.batch, channel + v, token, end);
            }
            token = end;
        }
    }
    if (p.sums == nullptr) return;
    const int64_t row = place.batch * f.grid.token_blocks + place.token_block;
    add_groups(run.sums, f.grid.lanes, p.sums + (row * f.channels + channels_before) * (WIDTH + 1),
               (f.channels - channels_before) * (WIDTH + 1));
}

template <int DTYPE, Layout LAYOUT>
constexpr int BACKWARD_CHANNELS = backward_channels(DType(DTYPE), LAYOUT);

template <int DTYPE, Layout LAYOUT, int WIDTH, bool PORTABLE>
__global__ __launch_bounds__(THREADS, backward_blocks(LAYOUT)) void causal_conv1d_gradient_kernel(
    const __grid_constant__ BackwardParams p) {
    using T = element_of<DTYPE>;
    const Params& f = p.forward;
    const int64_t tiles = f.grid.channel_blocks * f.grid.token_blocks * f.batch;
    if (static_cast<int64_t>(blockIdx.x) >= tiles) {
        const int64_t block = static_cast<int64_t>(blockIdx.x) - tiles;
        pass_state_gradient<T, WIDTH>(f, p.dinitial,
                                      block * THREADS + static_cast<int64_t>(threadIdx.x));
    } else if constexpr (LAYOUT == Layout::tokens) {
        gradient_tokens<T, WIDTH>(p);
    } else {
        gradient_channels<T, BACKWARD_CHANNELS<DTYPE, LAYOUT>, WIDTH>(p);
    }
}

// Adds up `rows` rows of (channels, width + 1) sums, 32 columns a block, of which eight threads
// each take every eighth row.
constexpr int SUM_COLUMNS = 32;
struct PartsShared {
    float sums[THREADS];
};
template <int DTYPE, bool PORTABLE>
__global__ __launch_bounds__(THREADS) void causal_conv1d_sums_kernel(
    const __grid_constant__ BackwardParams p, int width, int64_t rows) {
    using T = element_of<DTYPE>;
    constexpr int PARTS = THREADS / SUM_COLUMNS;
    const Params& f = p.forward;
    const int64_t columns = f.channels * (width + 1);
    const int thread = static_cast<int>(threadIdx.x), part = thread / SUM_COLUMNS;
    const int64_t column = static_cast<int64_t>(blockIdx.x) * SUM_COLUMNS + thread % SUM_COLUMNS;
    float sum = 0.0f;
    if (column < columns) {
#pragma unroll 8
        for (int64_t row = part; row < rows; row += PARTS) {
            sum += arch::load_global_readonly(p.sums + row * columns + column);
        }
    }
    const uint32_t shared = arch::shared_address(&arch::static_shared<PartsShared>());
    arch::store_shared(shared + 4 * thread, sum);
    arch::sync_block();
    if (part != 0 || column >= columns) return;
    for (int i = 1; i < PARTS; ++i) {
        sum += arch::load_shared<float>(shared + 4 * (thread + i * SUM_COLUMNS));
    }
    const int64_t channel = column / (width + 1);
    const int tap = static_cast<int>(column % (width + 1));
    const bool is_bias = tap == width;
    void* const to = is_bias ? p.dbias : p.dweight;
    const int64_t at = is_bias ? channel : channel * width + tap;
    if (to == nullptr) return;
    if (is_bias ? f.bias.wide : f.weight.wide)
        store_element<float>(to, at, sum);
    else
        store_element<T>(to, at, sum);
}

}  // namespace sm90

template <DType dtype, Layout layout, int width, bool portable>
void gradient(const BackwardParams& params, Stream stream) {
    const Params& f = params.forward;
    const int64_t blocks = f.grid.channel_blocks * f.grid.token_blocks * f.batch +
                           state_blocks(f, params.dinitial.data != nullptr);
    kittens::launch(sm90::causal_conv1d_gradient_kernel<int(dtype), layout, width, portable>,
                    dim3(static_cast<unsigned>(blocks)), dim3(THREADS), dim3(1),
                    gradient_shared_bytes(dtype, layout, width), stream, params);
}
template <DType dtype, bool portable>
void sum_partials(const BackwardParams& params, int width, Stream stream) {
    const Params& f = params.forward;
    const int64_t columns = f.channels * (width + 1), rows = f.batch * f.grid.token_blocks;
    const int64_t blocks = (columns + sm90::SUM_COLUMNS - 1) / sm90::SUM_COLUMNS;
    kittens::launch(sm90::causal_conv1d_sums_kernel<int(dtype), portable>,
                    dim3(static_cast<unsigned>(blocks)), dim3(THREADS), dim3(1), 0, stream, params,
                    width, rows);
}

}  // namespace thunderkittens::convolution
