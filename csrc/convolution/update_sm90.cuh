// One or a few tokens of each of a batch of sequences, whose states are changed in place: each
// output, and the state moved on by as many inputs.
//
// Of one token and a state of width - 1 inputs, a lane has 16 bytes of channels, and a warp goes
// along sequences, so that taps are loaded once. Their states and tokens are brought by cp.async,
// two sequences ahead, in a ring that the warp has in shared memory. Where the inputs of a channel
// are adjacent, the warp reads and writes its part of a state as it lies in memory, and the lanes
// take the inputs of their channels from the ring; where channels are, no lane needs another's.
//
// Other calls go channel by channel and token by token: a thread has CHANNELS channels, so many
// threads apart that neighbours access neighbouring elements whatever the strides are. The portable
// kernels do the same.
#pragma once

#include "csrc/convolution/vectors.cuh"

namespace thunderkittens::convolution {
namespace sm90 {

constexpr int UPDATE_CHANNELS = 4;

// Warps that a sequence takes.
template <class T>
__host__ __device__ __forceinline__ int64_t update_columns(int64_t channels) {
    constexpr int64_t PER_WARP = 32 * 16 / sizeof(T);
    return (channels + PER_WARP - 1) / PER_WARP;
}

template <class T>
__device__ __forceinline__ T* row_of(const Operand& x, int64_t row, int64_t channel) {
    return static_cast<T*>(x.data) + (row * x.batch_stride + channel * x.channel_stride);
}
template <class T>
__device__ __forceinline__ float read(const T* from) {
    return kittens::convert<float>(arch::load_global(from));
}
template <class T>
__device__ __forceinline__ void write(T* to, float value) {
    arch::store_global(to, kittens::convert<T>(value));
}

template <class T, int WIDTH>
__device__ __forceinline__ float next_output(const UpdateParams& p, const Taps<T, 1, WIDTH>& taps,
                                             const float (&in)[WIDTH]) {
    float sum = taps.bias[0];
#pragma unroll
    for (int w = 0; w < WIDTH; ++w) sum = fmaf(taps.tap(0, w), in[w], sum);
    return p.silu ? silu<T>(sum) : sum;
}

// A warp's vectors of a sequence: the state's, as they lie in memory, and behind them the token's.
template <class T, int WIDTH, Layout LAYOUT>
struct Rows {
    static constexpr int BEFORE = WIDTH - 1, V = 16 / sizeof(T), ROW = 32 * 16, STAGE = ROW * WIDTH;
    using Vector = Neighbours<T, V>;
    const UpdateParams& p;
    const int lane;
    const int64_t channel;  // of the lane
    const int64_t first;    // sequence
    const int count;        // of sequences
    const uint32_t base;    // of the ring
    int64_t slots;          // the lane's: of one sequence after the other

    __device__ __forceinline__ Rows(const UpdateParams& p_, int lane_, int64_t channel_,
                                    int64_t first_, int count_, uint32_t base_)
        : p(p_), lane(lane_), channel(channel_), first(first_), count(count_), base(base_) {
        slots = first + lane;
        if (p.slots != nullptr && lane < count) {
            slots = arch::load_global_readonly(p.slots + first + lane);
        }
        if (slots >= p.state_count) slots = -1;
    }
    __device__ __forceinline__ int64_t slot_of(int row) const { return arch::shuffle(slots, row); }
    // The lane's vectors of a state: whether there are such channels, and where.
    __device__ __forceinline__ bool exists(int k) const {
        if constexpr (LAYOUT == Layout::channels) return channel < p.channels;
        return channel * BEFORE + (k * 32 - lane * (BEFORE - 1)) * V < p.channels * BEFORE;
    }
    __device__ __forceinline__ T* place(int64_t slot, int k) const {
        T* const state = static_cast<T*>(p.state.data) + slot * p.state.batch_stride;
        if constexpr (LAYOUT == Layout::channels) return state + channel + k * p.state.token_stride;
        return state + channel * BEFORE + (k * 32 - lane * (BEFORE - 1)) * V;
    }
    // Where the ring has the lane's vectors as they lie in memory, and the inputs of its channels.
    static __device__ __forceinline__ uint32_t brought(uint32_t stage, int k, int lane) {
        return stage + static_cast<uint32_t>(k * ROW + lane * 16);
    }
    static __device__ __forceinline__ uint32_t own(uint32_t stage, int k, int lane) {
        if constexpr (LAYOUT == Layout::channels) return brought(stage, k, lane);
        return stage + static_cast<uint32_t>((lane * BEFORE + k) * 16);
    }
    // Element `at` of vectors one behind the other.
    static __device__ __forceinline__ float value(const Vector (&vectors)[BEFORE], int at) {
        return vectors[at / V].value(at % V);
    }
    // Which element of the state's vectors is an input of a channel.
    static __device__ __forceinline__ constexpr int element(int v, int i) {
        return LAYOUT == Layout::channels ? i * V + v : v * BEFORE + i;
    }

    __device__ __forceinline__ void load(int row, uint32_t stage) const {
        if (row < count) {
            const int64_t slot = slot_of(row);
            if (slot >= 0) {
#pragma unroll
                for (int k = 0; k < BEFORE; ++k) {
                    if (exists(k)) arch::cp_async<16>(brought(stage, k, lane), place(slot, k));
                }
                if (channel < p.channels) {
                    arch::cp_async<16>(brought(stage, BEFORE, lane),
                                       row_of<T>(p.x, first + row, channel));
                }
            }
        }
        arch::cp_async_commit();
    }
    __device__ __forceinline__ void step(int row, uint32_t stage,
                                         const Taps<T, V, WIDTH>& taps) const {
        const int64_t slot = slot_of(row);
        const bool there = channel < p.channels;
        T* const to = row_of<T>(p.out, first + row, channel);
        Vector result;
        result.clear();
        if (slot < 0) {
            if (there) result.store(to);
            return;
        }
        Vector before[BEFORE], after[BEFORE];
#pragma unroll
        for (int k = 0; k < BEFORE; ++k) {
            before[k] = arch::load_shared<Vector>(own(stage, k, lane));
        }
        const auto now = arch::load_shared<Vector>(brought(stage, BEFORE, lane));
        float sums[V], states[V * BEFORE];
#pragma unroll
        for (int v = 0; v < V; ++v) {
            sums[v] = taps.bias[v];
#pragma unroll
            for (int w = 0; w < WIDTH; ++w) {
                const float in = w < BEFORE ? value(before, element(v, w)) : now.value(v);
                sums[v] = fmaf(taps.tap(v, w), in, sums[v]);
                if (w > 0) states[element(v, w - 1)] = in;
            }
        }
        if (p.silu) {
#pragma unroll
            for (int v = 0; v < V; ++v) sums[v] = silu<T>(sums[v]);
        }
        if (there) rounded<T, V>(sums).store(to);
#pragma unroll
        for (int k = 0; k < BEFORE; ++k) {
            float part[V];
#pragma unroll
            for (int i = 0; i < V; ++i) part[i] = states[k * V + i];
            after[k] = rounded<T, V>(part);
        }
        if constexpr (LAYOUT != Layout::channels && BEFORE > 1) {
            // No other lane reads what the lane's own inputs were.
#pragma unroll
            for (int k = 0; k < BEFORE; ++k) arch::store_shared(own(stage, k, lane), after[k]);
            arch::sync_warp();
#pragma unroll
            for (int k = 0; k < BEFORE; ++k) {
                after[k] = arch::load_shared<Vector>(brought(stage, k, lane));
            }
        }
#pragma unroll
        for (int k = 0; k < BEFORE; ++k) {
            if (exists(k)) after[k].store(place(slot, k));
        }
    }
};

template <class T, int WIDTH, Layout LAYOUT>
__device__ __forceinline__ void update_rows(const UpdateParams& p) {
    using Own = Rows<T, WIDTH, LAYOUT>;
    constexpr int V = Own::V, STAGE = Own::STAGE, STAGES = UPDATE_STAGES;
    const int thread = static_cast<int>(threadIdx.x), lane = thread % 32;
    const auto warp = static_cast<uint32_t>(blockIdx.x) * (THREADS / 32) + thread / 32;
    const auto columns = static_cast<uint32_t>(update_columns<T>(p.channels));
    const int64_t first = int64_t{warp / columns} * p.rows;
    if (first >= p.batch) return;
    const int count = static_cast<int>(min(int64_t{p.rows}, p.batch - first));
    const int64_t channel = (warp % columns * 32 + lane) * int64_t{V};
    const uint32_t base =
        arch::shared_address(kittens::shared_memory()) + thread / 32 * (STAGES * STAGE);
    const Own rows(p, lane, channel, first, count, base);
#pragma unroll
    for (int i = 0; i < STAGES - 1; ++i) rows.load(i, base + i * STAGE);
    Taps<T, V, WIDTH> taps;
    taps.load(p.weight, p.bias, channel < p.channels ? channel : 0);
    uint32_t stage = base, next = base + (STAGES - 1) * STAGE;
    const auto advance = [&](uint32_t at) {
        return at == base + (STAGES - 1) * STAGE ? base : at + STAGE;
    };
#pragma unroll 1
    for (int row = 0; row < count; ++row) {
        arch::cp_async_wait<STAGES - 2>();
        arch::sync_warp();  // what all lanes have brought, and nobody reads the stage before
        rows.load(row + STAGES - 1, next);
        rows.step(row, stage, taps);
        stage = advance(stage);
        next = advance(next);
    }
    arch::cp_async_wait<0>();
}

// One token, and a state of the last WIDTH - 1 inputs.
template <class T, int WIDTH>
__device__ __forceinline__ void one_token(const UpdateParams& p, int64_t batch, int64_t slot,
                                          int64_t first) {
    constexpr int BEFORE = WIDTH - 1, CHANNELS = UPDATE_CHANNELS;
    Taps<T, 1, WIDTH> taps[CHANNELS];
    float in[CHANNELS][WIDTH];
#pragma unroll
    for (int c = 0; c < CHANNELS; ++c) {
        const int64_t channel = first + c * THREADS;
        if (channel >= p.channels) break;
        const T* const state = row_of<T>(p.state, slot, channel);
#pragma unroll
        for (int i = 0; i < BEFORE; ++i) in[c][i] = read(state + i * p.state.token_stride);
        in[c][BEFORE] = read(row_of<T>(p.x, batch, channel));
        taps[c].load(p.weight, p.bias, channel);
    }
#pragma unroll
    for (int c = 0; c < CHANNELS; ++c) {
        const int64_t channel = first + c * THREADS;
        if (channel >= p.channels) break;
        write(row_of<T>(p.out, batch, channel), next_output<T, WIDTH>(p, taps[c], in[c]));
        T* const state = row_of<T>(p.state, slot, channel);
#pragma unroll
        for (int i = 0; i < BEFORE; ++i) write(state + i * p.state.token_stride, in[c][i + 1]);
    }
}

// Any number of tokens of one channel, and a state that may be longer.
template <class T, int WIDTH>
__device__ __forceinline__ void several_tokens(const UpdateParams& p, int64_t batch, int64_t slot,
                                               int64_t channel) {
    constexpr int BEFORE = WIDTH - 1;
    const int64_t length = p.length, kept = p.state_length;
    Taps<T, 1, WIDTH> taps;
    taps.load(p.weight, p.bias, channel);
    const T* const x = row_of<T>(p.x, batch, channel);
    T* const out = row_of<T>(p.out, batch, channel);
    T* const state = row_of<T>(p.state, slot, channel);
    float in[WIDTH];
#pragma unroll
    for (int i = 0; i < BEFORE; ++i)
        in[i] = read(state + (kept - BEFORE + i) * p.state.token_stride);
        // Of a longer state, what stays and is not among the last inputs.
#pragma unroll 1
    for (int64_t i = 0; i < kept - BEFORE && i < kept - length; ++i) {
        write(state + i * p.state.token_stride, read(state + (i + length) * p.state.token_stride));
    }
#pragma unroll 1
    for (int64_t t = 0; t < length; ++t) {
        in[BEFORE] = read(x + t * p.x.token_stride);
        write(out + t * p.out.token_stride, next_output<T, WIDTH>(p, taps, in));
        // Of a longer state, tokens that leave the last inputs.
        const int64_t to = kept - length + t;
        if (to >= 0 && to < kept - BEFORE) write(state + to * p.state.token_stride, in[BEFORE]);
#pragma unroll
        for (int w = 0; w < BEFORE; ++w) in[w] = in[w + 1];
    }
#pragma unroll
    for (int i = 0; i < BEFORE; ++i)
        write(state + (kept - BEFORE + i) * p.state.token_stride, in[i]);
}

template <int DTYPE, int WIDTH, bool PORTABLE>
__global__ __launch_bounds__(THREADS, UPDATE_BLOCKS) void causal_conv1d_update_kernel(
    const __grid_constant__ UpdateParams p) {
    using T = element_of<DTYPE>;
    if (p.layout == Layout::tokens) return update_rows<T, WIDTH, Layout::tokens>(p);
    if (p.layout == Layout::channels) return update_rows<T, WIDTH, Layout::channels>(p);
    constexpr int64_t PER_BLOCK = THREADS * UPDATE_CHANNELS;
    const int64_t blocks = (p.channels + PER_BLOCK - 1) / PER_BLOCK;
    const int64_t batch = static_cast<int64_t>(blockIdx.x) / blocks;
    const int64_t first =
        static_cast<int64_t>(blockIdx.x) % blocks * PER_BLOCK + static_cast<int64_t>(threadIdx.x);
    int64_t slot = batch;
    if (p.slots != nullptr) slot = arch::load_global_readonly(p.slots + batch);
    const bool exists = slot >= 0 && slot < p.state_count;
    if (exists && p.length == 1 && p.state_length == WIDTH - 1) {
        return one_token<T, WIDTH>(p, batch, slot, first);
    }
#pragma unroll 1
    for (int64_t channel = first; channel < min(first + PER_BLOCK, p.channels);
         channel += THREADS) {
        if (exists) {
            several_tokens<T, WIDTH>(p, batch, slot, channel);
        } else {
            T* const out = row_of<T>(p.out, batch, channel);
            for (int64_t t = 0; t < p.length; ++t) write(out + t * p.out.token_stride, 0.0f);
        }
    }
}

}  // namespace sm90

template <DType dtype, int width, bool portable>
void update(const UpdateParams& params, Stream stream) {
    constexpr int64_t PER_BLOCK = THREADS * sm90::UPDATE_CHANNELS, WARPS = THREADS / 32;
    int64_t blocks = (params.channels + PER_BLOCK - 1) / PER_BLOCK * params.batch;
    if (params.layout != Layout::any) {
        const int64_t groups = (params.batch + params.rows - 1) / params.rows;
        const int64_t warps =
            groups * sm90::update_columns<element_of<int(dtype)>>(params.channels);
        blocks = (warps + WARPS - 1) / WARPS;
    }
    kittens::launch(sm90::causal_conv1d_update_kernel<int(dtype), width, portable>,
                    dim3(static_cast<unsigned>(blocks)), dim3(THREADS), dim3(1),
                    update_shared_bytes(width), stream, params);
}

}  // namespace thunderkittens::convolution
