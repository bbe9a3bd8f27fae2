// The producer of attention over a cache: warps whose threads look pages up and copy rows of
// keys and values, 16 bytes each, into the ring. Codes of 8 bits come to a place of the thread's
// own first, and go on as fp16; so do those of 4 bits, with the scales of their blocks.
#pragma once

#include "csrc/attention/decode/decode_types_sm90.cuh"

namespace thunderkittens::attention::decode {

template <class Kernel>
struct Producer {
    using Element = typename Globals<Kernel>::Element;
    static constexpr int per_copy =
        Kernel::nvfp4 && Kernel::staged ? 32 : 16 / int(sizeof(Element));
    static constexpr int warp_rows = BLOCK_N / Kernel::producers;
    static_assert(warp_rows <= WARP_THREADS);

    const Globals<Kernel>& g;
    Shared<Kernel>& shared;
    RingPosition<Kernel::slots> filling{}, arriving{};
    RingPosition<Kernel::lag> staging{}, converting{};
    int pending = 0;                              // slots whose copies are on their way
    bool keys_are_next = true;                    // of what becomes operands
    int first = warpgroup::warpid() * warp_rows;  // of the rows that this warp copies

    __device__ __forceinline__ void run(Segments& segments) {
        while (segments.next()) {
            // A page is looked up while the block before is loaded.
            Place next = place_of(segments, segments.last - 1);
            for (int block = segments.last - 1; block >= segments.first; --block) {
                const Place place = next;
                if (block > segments.first) next = place_of(segments, block - 1);
                load_block(segments, place);
            }
        }
        while (pending > 0) arrive_oldest<0>();
    }

  private:
    __device__ __forceinline__ bool has_row() const { return laneid() < warp_rows; }
    // Where the row of a lane is.
    struct Place {
        int page, token;
        bool exists;
    };
    __device__ __forceinline__ Place place_of(const Segments& at, int block) const {
        const int key = block * BLOCK_N + first + laneid();
        // Weights of what is not seen are 0, which no memory may make NaN.
        Place place{at.at.b, key, has_row() && key >= at.s.k_begin && key < at.s.k_length};
        int& page = place.page;
        if (g.pages.rows != nullptr) page = arch::load_global_readonly(g.pages.rows + page);
        if (g.pages.table != nullptr && place.exists) {
            const int size = static_cast<int>(g.pages.page_size);
            const int index = key / size;
            place.token = key - index * size;
            page = arch::load_global_readonly(g.pages.table + page * g.pages.table_stride + index);
        }
        return place;
    }
    __device__ __forceinline__ void load_block(const Segments& at, const Place& place) {
        const auto [page, token, exists] = place;
        const int head = at.item.kv_head;
        const Element* const k = exists ? g.k.at(page, token, head) : nullptr;
        const Element* const v = exists ? g.v.at(page, token, head) : nullptr;
        const auto scale = [&](const Scales& scales) -> const float* {
            if (!Kernel::token_scales || !scales.tokens || !exists) return nullptr;
            return scales.data + page * scales.strides[0] + token * scales.strides[1] +
                   head * scales.strides[2];
        };
        if constexpr (Kernel::nvfp4) {
            const Element* const k_scales =
                exists ? g.block_scales.k.at(page, token, head) : nullptr;
            const Element* const v_scales =
                exists ? g.block_scales.v.at(page, token, head) : nullptr;
            if constexpr (Kernel::staged) {
                stage_blocks<typename Kernel::k_tile>(k, k_scales, g.head_dim);
                stage_blocks<typename Kernel::v_tile>(v, v_scales, g.results.value_dim);
            } else {
                load_rows(shared.ring[filling.stage].k, k, k_scales, g.head_dim / 2);
                load_rows(shared.ring[filling.stage].v, v, v_scales, g.results.value_dim / 2);
            }
        } else if constexpr (Kernel::staged) {
            stage_rows<typename Kernel::k_tile>(k, scale(g.k_scale), g.head_dim);
            stage_rows<typename Kernel::v_tile>(v, scale(g.v_scale), g.results.value_dim);
        } else {
            load_rows(shared.ring[filling.stage].k, k, scale(g.k_scale), g.head_dim);
            load_rows(shared.ring[filling.stage].v, v, scale(g.v_scale), g.results.value_dim);
        }
    }
    // Calls f(i, row, column, its element) for each copy of this thread to a tile.
    template <class Tile, class F>
    __device__ __forceinline__ void for_each_copy(F f) const {
        constexpr int row_copies = Tile::cols / per_copy;
#pragma unroll
        for (int i = 0; i < warp_rows * row_copies / WARP_THREADS; ++i) {
            const int copy = i * WARP_THREADS + laneid();
            f(i, copy / row_copies, copy % row_copies * per_copy);
        }
    }

    // `scale`: of the lane's token, or of the blocks of its row.
    template <class Tile, class Scale>
    __device__ __forceinline__ void load_rows(Tile& tile, const Element* mine, const Scale* scale,
                                              int columns) {
        if (pending == Kernel::lag) arrive_oldest<Kernel::lag - 1>();
        wait(shared.empty[filling.stage], filling.phase ^ 1);
        for_each_copy<Tile>([&](int, int row, int column) {
            const Element* const from = arch::shuffle(mine, row);
            arch::cp_async<16>(tile.address_of(first + row, column), from + column,
                               from != nullptr && column < columns);
        });
        if constexpr (Kernel::codes) {
            if (has_row()) load_scales(scale, columns);
        }
        arch::cp_async_commit();
        filling.advance();
        ++pending;
    }
    __device__ __forceinline__ void load_scales(const float* scale, int) {
        auto& to = shared.scales[filling.stage].of_tokens[first + laneid()];
        arch::cp_async<4>(arch::shared_address(&to), scale, scale != nullptr);
    }
    // Those of a row of so many bytes may end within a word.
    __device__ __forceinline__ void load_scales(const Element* scale, int bytes) {
        auto& row = shared.scales[filling.stage].of_blocks[first + laneid()];
        const int count = scale == nullptr ? 0 : bytes * 2 / NV_BLOCK;
#pragma unroll
        for (int i = 0; i < SlotScales<Kernel>::words; ++i) {
            arch::cp_async_partial<4>(arch::shared_address(&row.words[i]), scale + 4 * i,
                                      ::min(::max(count - 4 * i, 0), 4));
        }
    }
    // Codes go to a place of this thread's own, scales to one that its lane has the row of.
    template <class Tile>
    __device__ __forceinline__ void stage_rows(const Element* mine, const float* scale,
                                               int columns) {
        if (pending == Kernel::lag) arrive_oldest<Kernel::lag - 1>();
        auto& to = shared.staging;
        const int thread = warpgroup::laneid();
        for_each_copy<Tile>([&](int i, int row, int column) {
            const Element* const from = arch::shuffle(mine, row);
            arch::cp_async<16>(arch::shared_address(&to.codes[staging.stage][i][thread]),
                               from + column, from != nullptr && column < columns);
        });
        if (has_row()) {
            arch::cp_async<4>(
                arch::shared_address(&to.staged_scales[staging.stage][first + laneid()]), scale,
                scale != nullptr);
        }
        arch::cp_async_commit();
        staging.advance();
        ++pending;
    }
    // Codes of NVFP4 and the scales of their blocks go to places of this thread's own. The scales
    // of a row may end within a word.
    template <class Tile>
    __device__ __forceinline__ void stage_blocks(const Element* mine, const Element* scales,
                                                 int columns) {
        if (pending == Kernel::lag) arrive_oldest<Kernel::lag - 1>();
        auto& to = shared.staging;
        const int thread = warpgroup::laneid();
        for_each_copy<Tile>([&](int i, int row, int column) {
            const Element* const from = arch::shuffle(mine, row);
            const Element* const scale = arch::shuffle(scales, row);
            const bool exists = from != nullptr && column < columns;
            arch::cp_async<16>(arch::shared_address(&to.codes[staging.stage][i][thread]),
                               from + column / 2, exists);
            const int word = column / (4 * NV_BLOCK) * 4;
            arch::cp_async_partial<4>(
                arch::shared_address(&to.block_scales[staging.stage][i][thread]), scale + word,
                exists ? ::min(columns / NV_BLOCK - word, 4) : 0);
        });
        arch::cp_async_commit();
        staging.advance();
        ++pending;
    }
    // The oldest slot on its way, behind which at most `still` are.
    template <int still>
    __device__ __forceinline__ void arrive_oldest() {
        arch::cp_async_wait<still>();
        if constexpr (Kernel::staged) {
            wait(shared.empty[arriving.stage], arriving.phase ^ 1);
            if (keys_are_next)
                convert_rows(shared.ring[arriving.stage].k);
            else
                convert_rows(shared.ring[arriving.stage].v);
            keys_are_next = !keys_are_next;
        }
        arch::fence_async_shared();
        arrive(shared.full[arriving.stage]);
        arriving.advance();
        --pending;
    }
    template <class Tile>
    __device__ __forceinline__ void convert_rows(Tile& tile) {
        auto& from = shared.staging;
        const int thread = warpgroup::laneid();
        for_each_copy<Tile>([&](int i, int row, int column) {
            const auto codes = arch::bit_cast<Codes>(arch::load_shared<uint4>(
                arch::shared_address(&from.codes[converting.stage][i][thread])));
            Halves halves[per_copy / 8];
            if constexpr (Kernel::nvfp4) {
                const auto scales = arch::load_shared<uint32_t>(
                    arch::shared_address(&from.block_scales[converting.stage][i][thread]));
                convert_nvfp4(codes, scales >> column / 2 % 32, halves);
            } else {
                convert(g.format, codes, halves);
            }
#pragma unroll
            for (int j = 0; j < per_copy / 8; ++j) {
                arch::store_shared(tile.address_of(first + row, column + 8 * j),
                                   arch::bit_cast<uint4>(halves[j]));
            }
        });
        if constexpr (Kernel::token_scales) {
            if (has_row()) {
                const int row = first + laneid();
                arch::store_shared(arch::shared_address(&from.scales[arriving.stage][row]),
                                   arch::load_shared<float>(arch::shared_address(
                                       &from.staged_scales[converting.stage][row])));
            }
        }
        converting.advance();
    }
};

}  // namespace thunderkittens::attention::decode
