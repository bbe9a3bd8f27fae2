// What the forward kernels share about scores: which keys a block of queries sees, the masks of
// key blocks that the band cuts, and softcap and ALiBi.
#pragma once

#include "csrc/attention/common/attention.h"
#include "csrc/attention/common/softmax.cuh"
#include "kittens/kittens.cuh"

namespace thunderkittens::attention {

using namespace kittens;

constexpr float LOG2_E = 1.4426950408889634f;

// The rows of one sequence and its keys: all of a batch's are equal, or they are packed.
struct Lengths {
    int q_begin, q_length, k_begin, k_length;
    int low, high, diagonal;  // the band
};
struct SequenceTable {
    const int *cu_q, *cu_k;  // null for dense batches
    int batch;
    int q_length, k_length;  // of a dense batch; of packed sequences the tokens of all
    int left, right;         // of the diagonal; UNBOUNDED or more: all
    bool upper_left;

    SequenceTable(const Problem& p, const Sequences& s)
        : cu_q(s.cu_q),
          cu_k(s.cu_k),
          batch(static_cast<int>(p.batch)),
          q_length(static_cast<int>(p.varlen ? s.total_q : p.q_length)),
          k_length(static_cast<int>(p.varlen ? s.total_k : p.k_length)),
          upper_left(p.causal == static_cast<int>(Causal::upper_left)) {
        // A band of equal lengths has its diagonal at 0.
        const Band band = attention::band(p.causal, p.window_left, p.window_right, 0, 0);
        left = -band.low;
        right = band.high;
    }

    // Packed sequences have one more, whose rows are those behind the last: they see nothing. With
    // the functions below instead, kernels of the gradient spill.
    __device__ __forceinline__ Lengths lengths(int b) const {
        Lengths s{0, q_length, 0, k_length, 0, 0, 0};
        if (cu_q != nullptr) {
            s.q_begin = begin_of(cu_q, b, q_length);
            s.q_length = (b < batch ? begin_of(cu_q, b + 1, q_length) : q_length) - s.q_begin;
            s.k_begin = begin_of(cu_k, b, k_length);
            s.k_length = (b < batch ? begin_of(cu_k, b + 1, k_length) : s.k_begin) - s.k_begin;
            s.q_length = ::max(s.q_length, 0);
            s.k_length = ::max(s.k_length, 0);
        }
        s.diagonal = upper_left ? 0 : s.k_length - s.q_length;
        s.low = s.diagonal - left;
        s.high = s.diagonal + right;
        return s;
    }

  protected:
    // The same, of a sequence with so many keys.
    __device__ __forceinline__ Lengths lengths_with(int b, int keys) const {
        Lengths s{0, q_length, 0, keys, 0, 0, 0};
        if (cu_q != nullptr) {
            s.q_begin = begin_of(cu_q, b, q_length);
            const int end = b < batch ? begin_of(cu_q, b + 1, q_length) : q_length;
            s.q_length = ::max(end - s.q_begin, 0);
        }
        s.diagonal = upper_left ? 0 : s.k_length - s.q_length;
        s.low = s.diagonal - left;
        s.high = s.diagonal + right;
        return s;
    }

  private:
    // Wrong numbers must not become wrong addresses.
    static __device__ __forceinline__ int begin_of(const int* cu, int b, int total) {
        return ::min(::max(arch::load_global_readonly(cu + b), 0), total);
    }
};

// The key blocks that the queries first to last see: [begin, end). Those in [unmasked_begin,
// unmasked_end) every one of the queries sees whole; the others need a mask.
struct KeyBlocks {
    int begin, end, unmasked_begin, unmasked_end;
};
template <int BLOCK_N>
__device__ __forceinline__ KeyBlocks key_blocks(const Lengths& s, int first, int last) {
    const int end_key = ::min(s.k_length, last + s.high + 1);
    const int begin_key = ::max(0, first + s.low);
    if (end_key <= begin_key || last < first) return {0, 0, 0, 0};
    const int begin = begin_key / BLOCK_N;
    return {begin, (end_key + BLOCK_N - 1) / BLOCK_N,
            (::max(0, last + s.low) + BLOCK_N - 1) / BLOCK_N,
            ::max(begin, ::min(s.k_length, first + s.high + 1) / BLOCK_N)};
}

struct Int2 {
    int x, y;  // of a thread's upper and lower row
};

// Scores of the columns outside of [first, last] become -inf. Both count from this thread's first
// column.
template <any_register_tile Tile>
__device__ __forceinline__ void mask_outside(Tile& s, Int2 first, Int2 last) {
    // A bit per column of this thread: two of every eight columns are its own.
    constexpr int words = (4 * Tile::width + 31) / 32;
    const auto bits_before = [](int column, int word) -> uint32_t {
        const int count = column < 0 ? 0 : column / 8 * 2 + ::min(column % 8, 2);
        const int here = count - 32 * word;
        return here <= 0 ? 0u : here >= 32 ? ~0u : (1u << here) - 1;
    };
    uint32_t visible[words][2];
#pragma unroll
    for (int w = 0; w < words; ++w) {
        visible[w][0] = bits_before(last.x + 1, w) & ~bits_before(first.x, w);
        visible[w][1] = bits_before(last.y + 1, w) & ~bits_before(first.y, w);
    }
    for_each_element(s, [&](float& x, int at, bool low) {
        const int bit = at / 8 * 2 + at % 2;
        if ((visible[bit / 32][low] >> (bit % 32) & 1) == 0) x = -INFINITY;
    });
}

// Where the scores of this thread begin: its upper row, and its first column in a block of keys.
// (Of portable kernels: with these, the machine code of the Hopper kernel changes.)
struct Corner {
    int row, column;

    __device__ __forceinline__ Corner(int _row, int first_key)
        : row(_row), column(first_key + 2 * (laneid() % 4)) {}
    // The columns, from the first one, of the keys that lie `offset` behind those of the rows.
    __device__ __forceinline__ Int2 columns(int offset) const {
        return {row + offset - column, row + 8 + offset - column};
    }
};
// Scores of keys that the band cuts off, or that do not exist, become -inf.
template <any_register_tile Tile>
__device__ __forceinline__ void mask_keys(Tile& s, const Lengths& lengths, const Corner& corner) {
    const Int2 last = corner.columns(lengths.high);
    const int end = lengths.k_length - 1 - corner.column;
    mask_outside(s, corner.columns(lengths.low), {::min(last.x, end), ::min(last.y, end)});
}

// tanh for softcap. Weights are rounded to T: for bf16 the instruction's 2^-11 is enough; for half
// it takes two instructions, with an absolute error of 2^-22.
template <class T>
__device__ __forceinline__ float softcap_tanh(float x) {
    if constexpr (std::is_same_v<T, bf16>) {
        return arch::tanh_approx(x);
    } else {
        const float e = arch::exp2_approx(x * (2.0f * LOG2_E));
        return fmaf(-2.0f, arch::reciprocal_approx(e + 1.0f), 1.0f);
    }
}

// Score modification: softcap and ALiBi, as numbers that are uniform over a kernel.
struct ScoreMod {
    // What the scores are multiples of after `apply`, times log2(e): the softmax scale, or softcap.
    float unit_log2;
    float scale_by_cap;  // scale / softcap; 0: no softcap
    const float* slopes;
    int64_t slopes_batch_stride;

    explicit ScoreMod(const ScoreOptions& s)
        : unit_log2((s.softcap > 0 ? s.softcap : s.scale) * LOG2_E),
          scale_by_cap(s.softcap > 0 ? s.scale / s.softcap : 0.0f),
          slopes(s.alibi_slopes),
          slopes_batch_stride(s.alibi_batch_stride) {}

    __device__ __forceinline__ bool has_slopes() const { return slopes != nullptr; }
    // In units of the scores.
    __device__ __forceinline__ float slope(int b, int head) const {
        if (slopes == nullptr) return 0.0f;
        return arch::load_global_readonly(slopes + b * slopes_batch_stride + head) *
               (LOG2_E / unit_log2);
    }
    template <class T, any_register_tile Tile>
    __device__ __forceinline__ void cap(Tile& s) const {
        for_each_element(s, [&](float& x, int, bool) { x = softcap_tanh<T>(x * scale_by_cap); });
    }
    // `diagonal`: the diagonal's column in each of the thread's rows, from this thread's first.
    template <class T, any_register_tile Tile>
    __device__ __forceinline__ Shift apply(Tile& s, Int2 diagonal, float2 slope) const {
        Shift shift;
        if (scale_by_cap > 0.0f) cap<T>(s);
        if (slopes != nullptr) {
            constexpr int columns = 16 * Tile::width;
            const float2 d = {static_cast<float>(diagonal.x), static_cast<float>(diagonal.y)};
            if (arch::all_lanes(::min(diagonal.x, diagonal.y) >= columns)) {
                // Before the diagonal the distance is a term of the row and one of the column.
                shift.rows = {-slope.x * d.x, -slope.y * d.y};
                for_each_element(s, [&](float& x, int at, bool low) {
                    x = fmaf(low ? slope.y : slope.x, static_cast<float>(at), x);
                });
            } else {
                for_each_element(s, [&](float& x, int at, bool low) {
                    const float distance = fabsf((low ? d.y : d.x) - static_cast<float>(at));
                    x = fmaf(low ? -slope.y : -slope.x, distance, x);
                });
            }
        }
        shift.shifted = true;
        return shift;
    }
};

}  // namespace thunderkittens::attention
