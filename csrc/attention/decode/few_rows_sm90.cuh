// Attention of up to 16 rows of queries over a cache of 8 or 4 bits. What counts is how often a
// code passes through shared memory: here twice, in and out, as codes. The producers copy them into
// the ring as they would 16 bits. Each of the four warps that multiply has 16 of a block's 64 keys
// to itself, or 32 of every second block: it takes their codes to registers, makes fp16 of them,
// exactly, and multiplies by mma.sync, whose operands both are registers. So the warps do not wait
// for each other, and have a softmax each, until an item or a part of it ends: then they add up
// what they have.
//
//   S = Q K^T   A: 16 rows of queries, loaded once. B: keys. A product may add up the head
//               dimension in any order that both operands have: a thread takes 16 bytes of a key
//   O = P V     A: the weights, as the softmax leaves them. B: values, whose transposition by
//               ldmatrix has two bytes as elements: the columns of a product are every second
//               one of 16, or of NVFP4 every fourth of 32
//
// Of NVFP4 a pair of operands are codes i and i + 4 of the eight of a word, which takes least: of a
// key the elements are as many apart, of values they are those of two keys.
//
// The portable kernels also have caches of 16 bits, whose elements are operands as they come, and
// tiles of more rows: then each of the warps has 16 to itself, and all keys, part by part.
#pragma once

#include "csrc/attention/decode/parts_sm90.cuh"
#include "csrc/attention/decode/producer_sm90.cuh"
#include "csrc/attention/decode/rows_sm90.cuh"

namespace thunderkittens::attention::decode {

template <class Kernel>
struct FewRowsConsumer : PartOfBlock<Kernel> {
    using T = typename Kernel::T;
    using Part = PartOfBlock<Kernel>;
    using Part::base_key, Part::first_key, Part::own_part, Part::own_turn;
    static constexpr int warp_keys = Part::warp_keys, block_parts = Part::block_parts;
    static constexpr int turns = Part::turns, operand_rows = Kernel::operand_rows;
    using Element = std::conditional_t<Kernel::codes, half, T>;  // of a product
    using scores = rt_fl<16, warp_keys>;
    using weights = rt<Element, 16, warp_keys>;
    using output = rt_fl<16, Kernel::value_dim>;
    using k_tile = typename Kernel::k_tile;
    using v_tile = typename Kernel::v_tile;
    using chunks = RowChunks<k_tile>;
    using product = arch::mma_sync<Element, Element>;
    // Elements of 16 bytes, eight at a time.
    static constexpr int chunk_elements = Kernel::packed * chunks::columns;
    static constexpr int parts = chunk_elements / 8;
    using QueryOperand = decode::QueryOperand<Kernel::operand_rows>;
    // Of all products of 16 elements of the head dimension.
    using Query = QueryOperand[2 * parts * chunks::count];

    const Globals<Kernel>& g;
    Shared<Kernel>& shared;
    // What this thread reads first of the first slot.
    const uint32_t first_codes =
        kept(shared.ring[0].k.address_of(base_key() + laneid() / 4, chunks::column(0)));
    const uint32_t first_rows = kept(shared.ring[0].v.address_of(
        base_key() + laneid() % 16, RowChunks<v_tile>::columns*(laneid() / 16)));
    RingPosition<Kernel::slots> at{};
    __device__ __forceinline__ void run(Segments& segments) {
        with_format(g, [&]<CacheFormat format>() {
            while (segments.next()) run_segment<format>(segments);
        });
    }

  protected:
    // In a register, where it would be computed anew for each block: where instructions limit.
    static __device__ __forceinline__ uint32_t kept(uint32_t address) {
        if constexpr (Kernel::portable ? Kernel::codes : Kernel::nvfp4) arch::pin_register(address);
        return address;
    }
    __device__ __forceinline__ void release() {
        arch::sync_warp();
        if (laneid() == 0) arrive(shared.empty[at.stage]);
        at.advance();
    }
    __device__ __forceinline__ const float* token_scales_of_slot() const {
        return shared.scales[at.stage].of_tokens + first_key();
    }
    template <class Tile>
    __device__ __forceinline__ uint32_t slot_offset() const {
        const uint32_t slot =
            static_cast<uint32_t>(at.stage) * uint32_t(sizeof(typename Kernel::slot));
        if constexpr (Kernel::any_rows)
            return slot + static_cast<uint32_t>(first_key() * row_bytes<Tile>);
        else
            return slot;
    }
    __device__ __forceinline__ bool rows_apart() const { return decode::rows_apart(g); }
    // Which 16 of a tile's rows this warp has, and the first of them.
    __device__ __forceinline__ int own_rows() const {
        return warpgroup::warpid() & (row_groups(g) - 1);
    }
    __device__ __forceinline__ int first_row() const { return FEW_ROWS * own_rows(); }

    // Rows come to fp16, unless the cache has 16 bits, through shared memory, where those stay that
    // are too long for the registers.
    __device__ __forceinline__ void load_query(const Segments& segment, Query& query) {
        const float scale = scale_of_head(g.k_scale, segment.b(), segment.item.kv_head) *
                            scale_of_head(g.q_scale, segment.b(), segment.item.kv_head) *
                            unit_of<Kernel>(g.format);
        if constexpr (Kernel::any_rows) {
            warpgroup::sync(1);  // results that were there have gone
#pragma unroll 1
            for (int i = 0; i < row_groups(g); ++i) load_sixteen(segment, i, scale);
        } else {
            load_sixteen(segment, 0, scale);
        }
        warpgroup::sync(1);
        if constexpr (Kernel::keeps_query) {
#pragma unroll
            for (int i = 0; i < int(std::extent_v<Query>); ++i) query[i] = query_operand(i);
        }
    }
    __device__ __forceinline__ void load_sixteen(const Segments& segment, int sixteen,
                                                 float scale) {
        constexpr int lanes = Kernel::head_dim > 128 ? 32 : Kernel::head_dim / 8;  // of a row
        constexpr int rows = WARPGROUP_THREADS / lanes, passes = (operand_rows + rows - 1) / rows;
        uint32_t thread = warpgroup::laneid();
        // What follows from it is computed anew, and not kept in registers over all segments.
        if constexpr (Kernel::portable) arch::pin_register(thread);
        const int first = static_cast<int>(thread / lanes), lane = static_cast<int>(thread % lanes);
        uint4 chunks[passes];  // all on their way together
#pragma unroll
        for (int i = 0; i < passes; ++i) {
            chunks[i] =
                load_query_chunk(g, segment, operand_rows * sixteen + first + i * rows, 8 * lane);
        }
#pragma unroll
        for (int i = 0; i < passes; ++i) {
            const int row = first + i * rows;
            if (operand_rows % rows != 0 && row >= operand_rows) break;
            if constexpr (Kernel::codes) {
                const auto halved = halved_row<T, lanes>(chunks[i]);
                if (8 * lane < Kernel::head_dim)
                    store_query(sixteen, row, 8 * lane, halved.elements);
                if (lane == 0) {
                    auto& to = shared.factors[operand_rows * sixteen + row];
                    arch::store_shared(arch::shared_address(&to), halved.factor * scale);
                }
            } else if (8 * lane < Kernel::head_dim) {
                store_query(sixteen, row, 8 * lane, arch::bit_cast<Halves>(chunks[i]));
            }
        }
    }
    // In the order in which threads have them as operands.
    __device__ __forceinline__ void store_query(int sixteen, int row, int element,
                                                const Halves& x) {
        constexpr int stripe = k_tile::stripe_cols * Kernel::packed;  // elements
        const int chunk = element % stripe / chunk_elements, thread = chunk / chunks::of_stripe;
        const int index = element / stripe * chunks::of_stripe + chunk % chunks::of_stripe;
        const int first = 2 * (index * parts + element % chunk_elements / 8);
        const Halves pairs = Kernel::nvfp4                       ? four_apart(x)
                             : Kernel::portable && Kernel::codes ? two_apart(x)
                                                                 : x;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            auto& operand = shared.query_of(sixteen)[first + i / 2][row % 8 * 4 + thread];
            auto& to = operand.pairs[i % 2][row / 8];
            arch::store_shared(arch::shared_address(&to), pairs.pairs[i]);
        }
    }
    __device__ __forceinline__ QueryOperand query_operand(int i) const {
        return arch::load_shared<QueryOperand>(
            arch::shared_address(&shared.query_of(own_rows())[i][laneid()]));
    }
    // Pairs of elements i and i + 4 of eight.
    static __device__ __forceinline__ Halves four_apart(const Halves& x) {
        const auto pair = [&](int i, uint32_t selector) {
            return arch::permute_bytes(x.pairs[i / 2], x.pairs[i / 2 + 2], selector);
        };
        return {{pair(0, 0x5410), pair(1, 0x7632), pair(2, 0x5410), pair(3, 0x7632)}};
    }
    // Pairs of elements i and i + 2 of four.
    static __device__ __forceinline__ Halves two_apart(const Halves& x) {
        const auto pair = [&](int i, uint32_t selector) {
            return arch::permute_bytes(x.pairs[i], x.pairs[i + 1], selector);
        };
        return {{pair(0, 0x5410), pair(0, 0x7632), pair(2, 0x5410), pair(2, 0x7632)}};
    }
    template <any_register_tile Tile>
    static __device__ __forceinline__ void forget_infinities(Tile& x) {
        for_each_element(x, [](float& value, int, bool) { value = no_infinity(value); });
    }
    __device__ __forceinline__ float query_factor(int row) const {
        return arch::load_shared<float>(arch::shared_address(&shared.factors[first_row() + row]));
    }

    static __device__ __forceinline__ void multiply(float2 (&d)[4], int half,
                                                    const uint32_t (&a)[4], uint32_t b0,
                                                    uint32_t b1) {
        float2 &upper = d[2 * half], &lower = d[2 * half + 1];
        const uint32_t b[2] = {b0, b1};
        const float c[4] = {upper.x, upper.y, lower.x, lower.y};
        float sum[4];
        product::fma(sum, a, b, c);
        upper = {sum[0], sum[1]};
        lower = {sum[2], sum[3]};
    }

    template <CacheFormat format>
    __device__ __forceinline__ void score_keys(scores& x, const Query& query) {
        const uint32_t first = first_codes + slot_offset<k_tile>();
#pragma unroll
        for (int eight = 0; eight < warp_keys / 8; ++eight) {
            const uint32_t row = first + 8 * eight * row_bytes<k_tile>;
#pragma unroll(Kernel::keeps_query || Kernel::head_dim <= 128 ? chunks::count : 1)
            for (int i = 0; i < chunks::count; ++i) {
                const int chunk =
                    i / chunks::of_stripe * chunks::row_of_stripe + i % chunks::of_stripe;
                const auto codes = arch::bit_cast<Codes>(
                    arch::load_shared<uint4>(chunk_behind<k_tile>(row, chunk)));
                Halves k[parts];
                if constexpr (Kernel::nvfp4) {
                    const auto scales = arch::load_shared<uint16_t>(block_scale_of_key(eight, i));
                    convert_four_apart<Kernel::portable>(codes, scales, k);
                } else if constexpr (Kernel::codes) {
#pragma unroll
                    for (int j = 0; j < parts; ++j) {
                        k[j] = halves_of<Kernel::portable, format>(codes.words[2 * j],
                                                                   codes.words[2 * j + 1]);
                    }
                } else {
                    k[0] = arch::bit_cast<Halves>(codes);
                }
#pragma unroll
                for (int j = 0; j < 2 * parts; ++j) {
                    const int product = 2 * parts * i + j;
                    const QueryOperand q =
                        Kernel::keeps_query ? query[product] : query_operand(product);
                    const uint32_t a[4] = {q.pairs[0][0], q.pairs[0][1], q.pairs[1][0],
                                           q.pairs[1][1]};
                    const auto& pairs = k[j / 2].pairs;
                    multiply(x.tiles[0][eight / 2].data, eight % 2, a, pairs[j % 2 * 2],
                             pairs[j % 2 * 2 + 1]);
                }
            }
        }
    }
    // Of the two blocks that a chunk of the thread's key has.
    __device__ __forceinline__ uint32_t block_scale_of_key(int eight, int chunk) const {
        const auto& row = shared.scales[at.stage].of_blocks[first_key() + 8 * eight + laneid() / 4];
        return arch::shared_address(&row) + chunks::column(chunk) * Kernel::packed / NV_BLOCK;
    }
    // Of every 16 columns of the output the first half of a base tile has the even ones, the second
    // half the odd ones. Of NVFP4 the halves of two base tiles have every fourth of 32.
    template <CacheFormat format>
    __device__ __forceinline__ void add_values(output& o, const weights& p) {
#pragma unroll
        for (int i = 0; i < weights::width; ++i) {
            uint32_t a[4];
#pragma unroll
            for (int k = 0; k < 4; ++k) a[k] = arch::bit_cast<uint32_t>(p.tiles[0][i].data[k]);
            const uint32_t rows =
                first_rows + slot_offset<v_tile>() + uint32_t(16 * i * row_bytes<v_tile>);
            if constexpr (Kernel::codes)
                add_16_values<format>(o, a, rows, i);
            else
                add_16_values(o, a, rows);
        }
    }
    static __device__ __forceinline__ void add_16_values(output& o, const uint32_t (&a)[4],
                                                         uint32_t rows) {
#pragma unroll
        for (int j = 0; j < output::width; ++j) {
            uint32_t v[4];
            arch::load_matrix_x4_transposed(v[0], v[1], v[2], v[3],
                                            chunk_behind<v_tile>(rows, 2 * j));
            multiply(o.tiles[0][j].data, 0, a, v[0], v[1]);
            multiply(o.tiles[0][j].data, 1, a, v[2], v[3]);
        }
    }
    template <CacheFormat format>
    __device__ __forceinline__ void add_16_values(output& o, const uint32_t (&a)[4], uint32_t rows,
                                                  int sixteen) {
        for_each_code_operand<format>(rows, sixteen, [&](int product, const uint32_t(&v)[4]) {
            auto& to = o.tiles[0][product].data;
            multiply(to, 0, a, v[0], v[2]);
            multiply(to, 1, a, v[1], v[3]);
        });
    }
    // Calls f(product, operands) for the codes of 16 keys' values, which begin at `rows`: of both
    // halves of its columns keys 0 to 7, then keys 8 to 15.
    template <CacheFormat format, class F>
    __device__ __forceinline__ void for_each_code_operand(uint32_t rows, int sixteen, F f) const {
        constexpr int products = Kernel::packed;  // that 16 bytes of a value make
        BlockScalesOfValues scales;
        if constexpr (Kernel::nvfp4)
            scales.load(shared.scales[at.stage], first_key() + 16 * sixteen);
#pragma unroll
        for (int j = 0; j < output::width / products; j += 2) {
            // Of the keys 0 to 7 and 8 to 15, then of the 16 bytes behind.
            uint32_t words[4];
            arch::load_matrix_x4_transposed(words[0], words[1], words[2], words[3],
                                            chunk_behind<v_tile>(rows, j));
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                const uint32_t low = words[2 * i], high = words[2 * i + 1];  // keys
                if constexpr (Kernel::nvfp4) {
                    const Halves a = four_apart_of(low, scales.pair(j + i, 0));
                    const Halves b = four_apart_of(high, scales.pair(j + i, 1));
                    const auto &x = a.pairs, &y = b.pairs;
                    f((j + i) * products, {x[0], x[1], y[0], y[1]});
                    f((j + i) * products + 1, {x[2], x[3], y[2], y[3]});
                } else {
                    f(j + i, even_and_odd<format>(low, high).pairs);
                }
            }
        }
    }
    // Two codes of each of two keys, of low and of high ones: pairs of keys, of the even and of the
    // odd code.
    template <CacheFormat format>
    static __device__ __forceinline__ Halves even_and_odd(uint32_t low, uint32_t high) {
        if constexpr (Kernel::portable) {
            return halves_of<true, format>(low, high);
        } else {
            return halves_of<false, format>(arch::permute_bytes(low, 0u, 0x3120),
                                            arch::permute_bytes(high, 0u, 0x3120));
        }
    }
    // Of the blocks of a thread's four keys.
    struct BlockScalesOfValues {
        typename SlotScales<Kernel, true>::Row rows[4];

        __device__ __forceinline__ void load(const SlotScales<Kernel, true>& slot, int first) {
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const int key = first + 2 * (laneid() % 4) + i % 2 + i / 2 * 8;
                rows[i] = arch::load_shared<std::remove_cvref_t<decltype(rows[i])>>(
                    arch::shared_address(&slot.of_blocks[key]));
            }
        }
        // Of a thread's columns in a chunk of 32, for its low or its high keys.
        __device__ __forceinline__ __half2 pair(int chunk, int high) const {
            const int word = chunk / 2;
            const uint32_t byte = 2 * (chunk % 2) + laneid() / 16;
            return scales_of_blocks<Kernel::portable>(
                rows[2 * high].words[word], rows[2 * high + 1].words[word], byte, byte + 4);
        }
    };

    template <CacheFormat format>
    __device__ __forceinline__ void run_segment(Segments& segment) {
        Query query;
        keep_segment<Kernel>(shared, segment);
        float v_scale = 1.0f;
        if (!Kernel::portable)
            v_scale = scale_of_head(g.v_scale, segment.b(), segment.item.kv_head);
        if (segment.last > segment.first) load_query(segment, query);
        int v_exponent = -126;
        OnlineSoftmax softmax;
        output o;
        zero_tile(o);
        int turn = 0;
        const int first_block = segment.first;
        for (int block = segment.last - 1; block >= first_block; --block) {
            const bool own = rows_apart() || turn == own_turn();
            turn = turn + 1 == turns ? 0 : turn + 1;
            if (!own) {
                at.advance(2);
                continue;
            }
            if constexpr (Kernel::portable) {
                walk_parts<format>(segment, query, block, o, softmax, v_exponent);
            } else {
                scores x;
                wait(shared.full[at.stage], at.phase);
                score<format>(x, query);
                release();
                weigh(x, segment, block, o, softmax);
                wait(shared.full[at.stage], at.phase);
                if constexpr (Kernel::token_scales) {
                    if (g.v_scale.tokens) scale_weights(x, o, token_scales_of_slot(), v_exponent);
                }
                weights p;
                convert_scores(p, x);
                add_values<format>(o, p);
                release();
            }
        }
        restore_segment<Kernel>(shared, segment);
        if constexpr (Kernel::codes) {
            if (Kernel::portable)
                v_scale = scale_of_head(g.v_scale, segment.b(), segment.item.kv_head);
            if constexpr (has_infinities<Kernel::portable, format>) forget_infinities(o);
            const float scale =
                v_scale * (!Kernel::nvfp4 && g.v_scale.tokens ? power_of_two(v_exponent) : 1.0f) *
                unit_of<Kernel>(format);
            scale_rows(o, {scale, scale});
        }
        softmax.reduce_sum();
        if (segment.stale) softmax.sum = {NAN, NAN};
#pragma unroll
        for (int first = 0; first < Kernel::value_dim; first += Kernel::pass_columns) {
            if (first > 0 && first >= g.results.value_dim) break;
            leave(o, softmax, first);
            add_up(segment, first);
        }
    }
    // One part of a block's keys, or where the warps have rows of their own, half or all.
    template <CacheFormat format>
    __device__ __forceinline__ void walk_parts(const Segments& segment, const Query& query,
                                               int block, output& o, OnlineSoftmax& softmax,
                                               int& v_exponent) {
        const int groups = row_groups(g);
        const int count = groups == 1 ? 1 : block_parts * groups / CONSUMER_WARPS;
        const int first = groups == 1 ? own_part() : warpgroup::warpid() / groups * count;
        const int last = first + count - 1;
        int& part = this->part;
        const auto keys_at = at;
        auto values_at = at;
        values_at.advance();
#pragma unroll 1
        for (part = first; part <= last; ++part) {
            scores x;
            at = keys_at;
            if (part == first) wait(shared.full[at.stage], at.phase);
            score<format>(x, query);
            if (part == last) release();
            weigh(x, segment, block, o, softmax);
            at = values_at;
            if (part == first) wait(shared.full[at.stage], at.phase);
            if constexpr (Kernel::token_scales) {
                if (g.v_scale.tokens) scale_weights(x, o, token_scales_of_slot(), v_exponent);
            }
            weights p;
            convert_scores(p, x);
            add_values<format>(o, p);
        }
        release();
    }
    template <CacheFormat format>
    __device__ __forceinline__ void score(scores& x, const Query& query) {
        zero_tile(x);
        score_keys<format>(x, query);
        if constexpr (has_infinities<Kernel::portable, format>) forget_infinities(x);
        if constexpr (Kernel::codes)
            scale_rows(x, {query_factor(laneid() / 4), query_factor(laneid() / 4 + 8)});
        if constexpr (Kernel::token_scales) {
            if (g.k_scale.tokens) scale_columns(x, token_scales_of_slot(), 1.0f);
        }
    }
    __device__ __forceinline__ void weigh(scores& x, const Segments& segment, int block, output& o,
                                          OnlineSoftmax& softmax) {
        const auto visible = [&](const Segments& here) {
            const auto row = [&](int lower) {
                return Row(g.work, here.s, here.item, first_row() + laneid() / 4 + 8 * lower);
            };
            return VisibleKeys<Kernel, decltype(row)>{g, here, row}.apply(
                x, block, block * BLOCK_N + first_key());
        };
        Shift shift;
        if constexpr (!Kernel::portable)
            shift = visible(segment);
        else if (is_cut<Kernel>(shared, segment, block) || g.score_mod.has_slopes())
            shift = visible(restored<Kernel>(shared, segment));
        else
            shift = g.score_mod.template apply<T>(x, {0, 0}, {0.0f, 0.0f});
        float2 rescale = {1.0f, 1.0f};
        if (softmax.update(x, g.score_mod.unit_log2, shift, rescale)) scale_rows(o, rescale);
    }

    // What this warp has, relative to bases of its own, of the columns from `first` on that pass
    // through shared memory together.
    __device__ __forceinline__ void leave(const output& o, const OnlineSoftmax& softmax,
                                          int first) {
        constexpr int width = Kernel::pass_columns / 16;  // in tiles
        const int warp = warpgroup::warpid(), row = laneid() / 4;
        warpgroup::sync(1);  // what was there has been read
        const auto store = [](auto& to, const auto& value) {
            arch::store_shared(arch::shared_address(&to), value);
        };
        if (laneid() % 4 == 0 && first == 0) {
            store(shared.base[warp][row], softmax.base.x);
            store(shared.base[warp][row + 8], softmax.base.y);
            store(shared.sum[warp][row], softmax.sum.x);
            store(shared.sum[warp][row + 8], softmax.sum.y);
        }
        const auto store_row = [&](int lower, int j, const float4& x) {
            store(shared.out[warp][row + 8 * lower][j], x);
        };
        const auto store_pair = [&](int lower, int column, const float2& x) {
            auto* const to = reinterpret_cast<float2*>(shared.out[warp][row + 8 * lower]);
            store(to[column / 2], x);
        };
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            if (first_row() + 8 * i >= g.results.slot_rows) break;
            if constexpr (Kernel::nvfp4) {
#pragma unroll
                for (int j = 0; j < width; j += 2) {
                    const auto &x = o.tiles[0][first / 16 + j].data,
                               &y = o.tiles[0][first / 16 + j + 1].data;
                    const int column = 4 * j + 2 * (laneid() % 4);
                    store_row(i, column, {x[i].x, x[i + 2].x, y[i].x, y[i + 2].x});
                    store_row(i, column + 1, {x[i].y, x[i + 2].y, y[i].y, y[i + 2].y});
                }
            } else {
#pragma unroll
                for (int j = 0; j < width; ++j) {
                    const auto& x = o.tiles[0][first / 16 + j].data;
                    if constexpr (Kernel::codes) {
                        store_row(i, 4 * j + laneid() % 4,
                                  {x[i].x, x[i + 2].x, x[i].y, x[i + 2].y});
                    } else {
                        store_pair(i, 16 * j + 2 * (laneid() % 4), x[i]);
                        store_pair(i, 16 * j + 2 * (laneid() % 4) + 8, x[i + 2]);
                    }
                }
            }
        }
        warpgroup::sync(1);
    }
    __device__ __forceinline__ bool has_none(int warp, int row) const {
        return rows_apart() && (warp & (row_groups(g) - 1)) != row / FEW_ROWS;
    }
    // Rows, four columns at a time.
    __device__ __forceinline__ void add_up(const Segments& segment, int first) {
        const auto& to = g.results;
        constexpr int row_parts = Kernel::pass_columns / 4;
        const int rows = rows_apart() ? TILE_ROWS : operand_rows;
        for (int i = warpgroup::laneid(); i < rows * row_parts; i += WARPGROUP_THREADS) {
            const int index = i / row_parts, part = i - index * row_parts;
            const int column = first + 4 * part;
            if (index >= to.slot_rows) break;
            if (column >= to.value_dim) continue;
            const Row row(g.work, segment.s, segment.item, index);
            const auto load = [](const auto& from) {
                using X = std::remove_cvref_t<decltype(from)>;
                return arch::load_shared<X>(arch::shared_address(&from));
            };
            const int own = rows_apart() ? index % FEW_ROWS : index;
            float base = OnlineSoftmax::NO_KEY;
            for (int w = 0; w < CONSUMER_WARPS; ++w) {
                if (has_none(w, index)) continue;
                base = fmaxf(base, load(shared.base[w][own]));
            }
            OnlineSoftmax softmax;
            softmax.base = {base, base};
            float4 sum = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
            for (int w = 0; w < CONSUMER_WARPS; ++w) {
                if (has_none(w, index)) continue;
                const float factor = arch::exp2_approx(load(shared.base[w][own]) - base);
                softmax.sum.x = fmaf(load(shared.sum[w][own]), factor, softmax.sum.x);
                const float4 x = load(shared.out[w][own][part]);
                sum = {fmaf(x.x, factor, sum.x), fmaf(x.y, factor, sum.y), fmaf(x.z, factor, sum.z),
                       fmaf(x.w, factor, sum.w)};
            }
            float factor = 1.0f;
            if (segment.whole && to.sink != nullptr) {
                const float logit =
                    LOG2_E * arch::load_global_readonly(to.sink + (row.exists ? row.head : 0));
                factor = softmax.add_sink({logit, logit}).x;
            }
            factor *= softmax.reciprocal_sum().x;
            sum = {sum.x * factor, sum.y * factor, sum.z * factor, sum.w * factor};
            if (segment.whole) {
                if (row.exists) store_final(segment, row, column, sum, softmax.lse().x);
            } else {
                const int64_t slot_row = int64_t(segment.at.slot) * to.slot_rows + index;
                arch::store_global(
                    reinterpret_cast<float4*>(to.partial_out + slot_row * to.value_dim + column),
                    sum);
                if (column == 0) arch::store_global(to.partial_lse + slot_row, softmax.lse().x);
            }
        }
    }
    __device__ __forceinline__ void store_final(const Segments& segment, const Row& row, int column,
                                                const float4& x, float lse) const {
        const auto& to = g.results;
        const int b = segment.b(), position = segment.s.q_begin + row.position;
        const uint2 packed = {arch::bit_cast<uint32_t>(pack_pair<T>(x.x, x.y)),
                              arch::bit_cast<uint32_t>(pack_pair<T>(x.z, x.w))};
        arch::store_global(reinterpret_cast<uint2*>(to.out.at(b, row.head, position, column)),
                           packed);
        if (column == 0 && to.lse != nullptr) {
            arch::store_global(to.lse + to.lse_row(b, row.head, position), lse);
        }
    }
};

}  // namespace thunderkittens::attention::decode
