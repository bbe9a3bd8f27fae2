// The producer of attention over a cache: warps whose threads look pages up and copy rows of
// keys and values, 16 bytes each, into the ring; or they take turns at blocks. Where one
// page has all the rows of a block that a warp copies, their addresses follow from the first; else
// a lane has the addresses of its rows. Where the producers convert, codes come to a place of the
// thread's own first, and go on as fp16; of NVFP4 with the scales of their blocks.
#pragma once

#include "csrc/attention/decode/decode_types_sm90.cuh"

namespace thunderkittens::attention::decode {

template <class Kernel>
struct Producer {
    using Element = typename Globals<Kernel>::Element;
    static constexpr int per_copy =
        Kernel::nvfp4 && Kernel::staged ? 32 : 16 / int(sizeof(Element));
    static constexpr int warp_rows = Kernel::producer_rows;
    static constexpr int lane_rows = (warp_rows + WARP_THREADS - 1) / WARP_THREADS;
    static constexpr int turns = Kernel::producer_turns;

    const Globals<Kernel>& g;
    Shared<Kernel>& shared;
    RingPosition<Kernel::slots> filling{}, arriving{};
    RingPosition<Kernel::lag> staging{}, converting{};
    int pending = 0;            // slots whose copies are on their way
    bool keys_are_next = true;  // of what becomes operands
    static constexpr int block_warps = Kernel::producers / turns;
    int first = warpgroup::warpid() % block_warps * warp_rows;  // of the rows that this warp copies

    __device__ __forceinline__ void run(Segments& segments) {
        if constexpr (!Kernel::staged) {
            if (g.rows_share_page) {
                return run_segments(segments,
                                    [&](int block) { return shared_page_of(segments, block); });
            }
        }
        run_segments(segments, [&](int block) { return place_of(segments, block); });
    }

  private:
    // A page is looked up while the block before is loaded.
    template <class PlaceOf>
    __device__ __forceinline__ void run_segments(Segments& segments, PlaceOf place_of_block) {
        int ahead = warpgroup::warpid() / block_warps;  // blocks of other warps before its next
        filling.advance(2 * ahead);
        while (segments.next()) {
            int block = segments.last - 1 - ahead;
            if (block >= segments.first) {
                auto next = place_of_block(block);
                for (; block >= segments.first; block -= turns) {
                    const auto place = at_block(next, segments, block);
                    if (block - turns >= segments.first) next = place_of_block(block - turns);
                    load_block(segments, place);
                    if constexpr (turns > 1) filling.advance(2 * (turns - 1));
                }
            }
            ahead = segments.first - 1 - block;
        }
        if constexpr (Kernel::few_rows) {
            arch::cp_async_commit();
            arch::cp_async_wait<0>();
        } else {
            while (pending > 0) arrive_oldest<0>();
        }
    }
    // The n-th of the rows of a lane, which are as far apart as a warp has lanes.
    static __device__ __forceinline__ int row_of_lane(int n) { return laneid() + n * WARP_THREADS; }
    static __device__ __forceinline__ bool has_row(int n = 0) {
        return warp_rows % WARP_THREADS == 0 || row_of_lane(n) < warp_rows;
    }
    __device__ __forceinline__ void look_up(const Segments& at, int key, int& page,
                                            int& token) const {
        page = at.b();
        token = key;
        if (g.pages.rows != nullptr) page = arch::load_global_readonly(g.pages.rows + page);
        if (g.pages.table == nullptr) return;
        const int index = g.by_page_size.quotient(key);
        token = key - index * static_cast<int>(g.pages.page_size);
        page = arch::load_global_readonly(g.pages.table + page * g.pages.table_stride + index);
    }
    // Where the row of a lane is. Weights of what is not seen are 0, which no memory may make NaN:
    // such rows do not exist.
    struct Place {
        int page = 0, token = 0;
        bool exists;
    };
    struct Places {
        Place rows[lane_rows];
    };
    __device__ __forceinline__ Places place_of(const Segments& at, int block) const {
        Places places;
#pragma unroll
        for (int n = 0; n < lane_rows; ++n) {
            const int key = block * BLOCK_N + first + row_of_lane(n);
            Place place{.exists = has_row(n) && key >= at.s.k_begin && key < at.s.k_length};
            if (place.exists) look_up(at, key, place.page, place.token);
            places.rows[n] = place;
        }
        return places;
    }
    // Where the first of the rows of a warp is, which follow each other; of them, [begin, end)
    // exist. Of a block that is still to come the page is enough, since registers are few.
    struct SharedPage {
        int page = 0, token = 0;
    };
    struct SharedPlace : SharedPage {
        int begin, end;
    };
    __device__ __forceinline__ SharedPage shared_page_of(const Segments& at, int block) const {
        const int key = block * BLOCK_N + first;
        SharedPage found;
        if (key < at.s.k_length && key + warp_rows > at.s.k_begin)
            look_up(at, key, found.page, found.token);
        return found;
    }
    __device__ __forceinline__ SharedPlace at_block(const SharedPage& found, const Segments& at,
                                                    int block) const {
        const int key = block * BLOCK_N + first;
        return {found, ::min(::max(at.s.k_begin - key, 0), warp_rows),
                ::min(::max(at.s.k_length - key, 0), warp_rows)};
    }
    static __device__ __forceinline__ Places at_block(const Places& found, const Segments&, int) {
        return found;
    }

    // The n-th of the lane's own rows.
    static __device__ __forceinline__ Place own(const Places& places, int n) {
        return places.rows[n];
    }
    static __device__ __forceinline__ Place own(const SharedPlace& p, int n) {
        const int row = row_of_lane(n);
        return {p.page, p.token + row, row >= p.begin && row < p.end};
    }

    template <class AnyPlace>
    __device__ __forceinline__ void load_block(const Segments& at, const AnyPlace& place) {
        const int head = at.item.kv_head;
        if constexpr (Kernel::staged) {
            const Place row = own(place, 0);
            stage<typename Kernel::k_tile>(address(g.k, row, head), g.block_scales.k, g.k_scale,
                                           row, head, g.head_dim);
            stage<typename Kernel::v_tile>(address(g.v, row, head), g.block_scales.v, g.v_scale,
                                           row, head, g.results.value_dim);
        } else {
            load(shared.ring[filling.stage].k, place, head, g.k, g.block_scales.k, g.k_scale,
                 g.head_dim);
            load(shared.ring[filling.stage].v, place, head, g.v, g.block_scales.v, g.v_scale,
                 g.results.value_dim);
        }
    }
    // A slot is full when the copies of all threads have arrived. Products by wgmma read it through
    // another proxy: for them the producer waits, fences and arrives, which takes them less time
    // than a fence of theirs.
    template <class Tile, class AnyPlace, class BlockScales>
    __device__ __forceinline__ void load(Tile& tile, const AnyPlace& place, int head,
                                         const CacheRows<Element>& rows,
                                         const BlockScales& block_scales,
                                         const Scales& token_scales, int dim) {
        if constexpr (!Kernel::few_rows) {
            if (pending == Kernel::lag) arrive_oldest<Kernel::lag - 1>();
        }
        wait(shared.empty[filling.stage], filling.phase ^ 1);
        copy_rows(tile, place, head, rows, dim / Kernel::packed);
#pragma unroll
        for (int n = 0; n < lane_rows; ++n) {
            if constexpr (Kernel::nvfp4)
                load_block_scales(address(block_scales, own(place, n), head), n, dim);
            else if constexpr (Kernel::codes)
                load_token_scale(address(token_scales, own(place, n), head), n);
        }
        if constexpr (Kernel::few_rows) {
            arch::cp_async_mbarrier_arrive(shared.full[filling.stage].address());
        } else {
            arch::cp_async_commit();
            ++pending;
        }
        filling.advance();
    }
    // Null where the row does not exist.
    template <class Rows>
    static __device__ __forceinline__ auto address(const Rows& rows, const Place& at,
                                                   int head) -> decltype(rows.at(0, 0, 0)) {
        return at.exists ? rows.at(at.page, at.token, head) : nullptr;
    }
    static __device__ __forceinline__ const float* address(const Scales& scales, const Place& at,
                                                           int head) {
        if (!scales.tokens || !at.exists) return nullptr;
        return scales.data + at.page * scales.strides[0] + at.token * scales.strides[1] +
               head * scales.strides[2];
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

    template <class Tile>
    __device__ __forceinline__ void copy_rows(Tile& tile, const Places& places, int head,
                                              const CacheRows<Element>& rows, int columns) {
        const Element* mine[lane_rows];
#pragma unroll
        for (int n = 0; n < lane_rows; ++n) mine[n] = address(rows, places.rows[n], head);
        constexpr int row_copies = Tile::cols / per_copy;
        for_each_copy<Tile>([&](int i, int row, int column) {
            // Those of the lanes' rows that the copies of a warp may be of.
            const int least = Kernel::portable ? i / row_copies : 0;
            const int most = Kernel::portable
                                 ? (i * WARP_THREADS + WARP_THREADS - 1) / row_copies / WARP_THREADS
                                 : lane_rows - 1;
            const Element* from = arch::shuffle(mine[least], row % WARP_THREADS);
#pragma unroll
            for (int n = 1; n < lane_rows; ++n) {
                if (n <= least || n > most) continue;
                const Element* const other = arch::shuffle(mine[n], row % WARP_THREADS);
                if (row / WARP_THREADS == n) from = other;
            }
            arch::cp_async<16>(tile.address_of(first + row, column), from + column,
                               from != nullptr && column < columns);
        });
    }
    template <class Tile>
    __device__ __forceinline__ void copy_rows(Tile& tile, const SharedPlace& place, int head,
                                              const CacheRows<Element>& rows, int columns) {
        const Element* const base = rows.at(place.page, place.token, head);
        constexpr int row_copies = Tile::cols / per_copy;
        if constexpr (WARP_THREADS % row_copies == 0) {
            // From one copy of a thread to the next there are `step` rows.
            constexpr int step = WARP_THREADS / row_copies, period = step < 8 ? 8 / step : 1;
            constexpr int pitch = Tile::stripe_cols * int(sizeof(typename Tile::dtype));
            const int row = laneid() / row_copies, column = laneid() % row_copies * per_copy;
            const auto count =
                static_cast<uint32_t>(column < columns ? place.end - place.begin : 0);
            const auto from = static_cast<uint32_t>(row - place.begin);
            const Element* source = base + (row * rows.token_stride + column);
            uint32_t to[period];  // a swizzle repeats after eight rows
#pragma unroll
            for (int i = 0; i < period; ++i)
                to[i] = tile.address_of(first + row + i * step, column);
            const auto copy = [&](auto all) {
#pragma unroll
                for (int i = 0; i < warp_rows / step; ++i) {
                    arch::cp_async<16>(to[i % period] + i / period * period * step * pitch, source,
                                       decltype(all)::value || from + i * step < count);
                    source += step * rows.token_stride;
                }
            };
            // (Of portable kernels: with this, the machine code of the Hopper kernel changes.)
            if (Kernel::portable && count == warp_rows)
                copy(std::true_type{});
            else
                copy(std::false_type{});
        } else {
            for_each_copy<Tile>([&](int, int row, int column) {
                arch::cp_async<16>(tile.address_of(first + row, column),
                                   base + row * rows.token_stride + column,
                                   row >= place.begin && row < place.end && column < columns);
            });
        }
    }
    // Of the n-th of the lane's tokens.
    __device__ __forceinline__ void load_token_scale(const float* scale, int n) {
        if (!has_row(n)) return;
        auto& to = shared.scales[filling.stage].of_tokens[first + row_of_lane(n)];
        arch::cp_async<4>(arch::shared_address(&to), scale, scale != nullptr);
    }
    // Of the blocks of the n-th of the lane's rows, which may end within a word.
    __device__ __forceinline__ void load_block_scales(const Element* scale, int n, int dim) {
        if (!has_row(n)) return;
        auto& row = shared.scales[filling.stage].of_blocks[first + row_of_lane(n)];
        if (g.whole_block_scales) {
            arch::cp_async<int(sizeof(row))>(arch::shared_address(&row), scale, scale != nullptr);
            return;
        }
        const int count = scale == nullptr ? 0 : dim / NV_BLOCK;
#pragma unroll
        for (int i = 0; i < SlotScales<Kernel>::words; ++i) {
            arch::cp_async_partial<4>(arch::shared_address(&row.words[i]), scale + 4 * i,
                                      ::min(::max(count - 4 * i, 0), 4));
        }
    }
    template <class Tile, class BlockScales>
    __device__ __forceinline__ void stage(const Element* mine, const BlockScales& block_scales,
                                          const Scales& token_scales, const Place& place, int head,
                                          int columns) {
        if (pending == Kernel::lag) arrive_oldest<Kernel::lag - 1>();
        if constexpr (Kernel::nvfp4)
            stage_blocks<Tile>(mine, address(block_scales, place, head), columns);
        else
            stage_rows<Tile>(mine, address(token_scales, place, head), columns);
        arch::cp_async_commit();
        staging.advance();
        ++pending;
    }
    // Codes go to a place of this thread's own, scales to one that its lane has the row of.
    template <class Tile>
    __device__ __forceinline__ void stage_rows(const Element* mine, const float* scale,
                                               int columns) {
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
    }
    // Codes of NVFP4 and the scales of their blocks go to places of this thread's own. The scales
    // of a row may end within a word.
    template <class Tile>
    __device__ __forceinline__ void stage_blocks(const Element* mine, const Element* scales,
                                                 int columns) {
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
