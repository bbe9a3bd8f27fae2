// TMA transfers of tiles that end with their segment of a ragged layout: the rows behind a segment
// belong to the next one.
#include "memory_tile_tma.cuh"

namespace unit {
namespace {

template <class ST>
using ragged = ragged_gl<typename ST::T, ST>;

template <class ST>
__global__ void ragged_load_kernel(const __grid_constant__ ragged<ST> source,
                                   const __grid_constant__ global<typename ST::T> seen,
                                   const ragged_coord at) {
    shared_allocator<> al(shared_memory());
    ST& tile = al.allocate<ST>();
    semaphore& arrived = al.allocate<semaphore>();
    poison_shared(tile);
    if (threadIdx.x == 0) {
        init_semaphore(arrived, 0, 1);
        arch::mbarrier_init_fence();
        tma::prefetch_map<ST>(source);
        tma::expect(arrived, tile);
        tma::load_async(tile, source, at, arrived);
    }
    arch::sync_block();
    wait(arrived, 0);
    write(seen, tile);
}

// The places of a tile's pieces, each loaded by a thread of its own.
struct Places {
    ragged_coord of[32];
};
template <class ST>
__global__ void ragged_pieces_kernel(const __grid_constant__ ragged<ST> source,
                                     const __grid_constant__ global<typename ST::T> seen,
                                     const __grid_constant__ Places places, const int piece) {
    shared_allocator<> al(shared_memory());
    ST& tile = al.allocate<ST>();
    semaphore& arrived = al.allocate<semaphore>();
    poison_shared(tile);
    if (threadIdx.x == 0) {
        init_semaphore(arrived, 0, 1);
        arch::mbarrier_init_fence();
        tma::expect(arrived, tile);
    }
    arch::sync_block();
    const int row = static_cast<int>(threadIdx.x) * piece;
    if (row < ST::rows) tma::load_piece_async(tile, row, source, places.of[threadIdx.x], arrived);
    wait(arrived, 0);
    write(seen, tile);
}

template <class ST>
__global__ void ragged_store_kernel(const __grid_constant__ ragged<ST> destination,
                                    const __grid_constant__ global<typename ST::T> values,
                                    const ragged_coord at, const bool adds) {
    shared_allocator<> al(shared_memory());
    ST& tile = al.allocate<ST>();
    read(tile, values);
    arch::sync_block();
    if (threadIdx.x != 0) return;
    if constexpr (!float_8bit<typename ST::T>) {
        if (adds) tma::store_add_async(destination, tile, at);
    }
    if (!adds) tma::store_async(destination, tile, at);
    tma::store_async_wait();
}

struct Shape {
    int heads, rows, cols;
    View view;  // depth: heads
};

// f(index in the tile, index in the view) for the elements of the tile that are in the segment.
template <class ST, class F>
void for_each_in_segment(const Shape& s, const ragged_coord& at, int cols, F f) {
    for (int i = 0; i < ST::rows && at.row + i < at.length; ++i) {
        for (int j = 0; j < ST::cols && at.col + j < cols; ++j) {
            f(static_cast<size_t>(i) * ST::cols + j,
              s.view.index(0, at.head, at.begin + at.row + i, at.col + j));
        }
    }
}

template <class ST>
ragged<ST> layout(typename ST::T* data, const Shape& s, int piece = 0) {
    return ragged<ST>(data, s.heads, s.rows, s.cols,
                      ragged_strides{s.view.depth_stride, s.view.row_stride}, piece);
}

template <class ST>
void load_case(const Shape& s, const ragged_coord& at, const std::string& name) {
    using T = typename ST::T;
    run("load " + name, [&](Case& c) {
        const Values values = c.uniform(type_of<T>, s.view, -8, 8);
        T* source = c.input<T>("source", values);
        T* seen = c.output<T>("tile", size_t(ST::num_elements));
        Values expected(ST::num_elements, 0.0);
        for_each_in_segment<ST>(s, at, s.cols,
                                [&](size_t i, size_t k) { expected[i] = values[k]; });
        c.expect(expected, bit_exact, ST::cols);
        c.launch([&] {
            kittens::launch(ragged_load_kernel<ST>, 1, 128, 1, sizeof(ST) + 4096, nullptr,
                            layout<ST>(source, s), matrix(seen, ST::rows, ST::cols), at);
        });
    });
}
template <class ST>
void pieces_case(const Shape& s, const Places& places, int piece, const std::string& name) {
    using T = typename ST::T;
    run("load pieces " + name, [&](Case& c) {
        const Values values = c.uniform(type_of<T>, s.view, -8, 8);
        T* source = c.input<T>("source", values);
        T* seen = c.output<T>("tile", size_t(ST::num_elements));
        Values expected(ST::num_elements, 0.0);
        for (int i = 0; i < ST::rows; ++i) {
            const ragged_coord& at = places.of[i / piece];
            const int row = at.row + i % piece;
            for (int j = 0; row < at.length && j < ST::cols && at.col + j < s.cols; ++j) {
                expected[static_cast<size_t>(i) * ST::cols + j] =
                    values[s.view.index(0, at.head, at.begin + row, at.col + j)];
            }
        }
        c.expect(expected, bit_exact, ST::cols);
        c.launch([&] {
            kittens::launch(ragged_pieces_kernel<ST>, 1, 128, 1, sizeof(ST) + 4096, nullptr,
                            layout<ST>(source, s, piece), matrix(seen, ST::rows, ST::cols), places,
                            piece);
        });
    });
}
template <class ST>
void store_case(const Shape& s, const ragged_coord& at, bool adds, const std::string& name) {
    using T = typename ST::T;
    run((adds ? "add " : "store ") + name, [&](Case& c) {
        const Type type = type_of<T>;
        const Values values = c.uniform(type, ST::num_elements, -8, 8);
        const Values initial =
            adds ? c.uniform(type, s.view, -8, 8) : Values(s.view.extent(), poison);
        T* tile = c.input<T>("tile", values);
        T* destination = c.output<T>("destination", initial);
        Values expected = initial;
        constexpr int chunk = 16 / int(sizeof(T));  // columns are clipped in such steps
        for_each_in_segment<ST>(
            s, at, (s.cols + chunk - 1) / chunk * chunk, [&](size_t i, size_t k) {
                expected[k] = adds ? rounded(type, initial[k] + values[i]) : values[i];
            });
        c.expect(expected, bit_exact, static_cast<int>(s.view.row_stride));
        c.launch([&] {
            kittens::launch(ragged_store_kernel<ST>, 1, 128, 1, sizeof(ST) + 4096, nullptr,
                            layout<ST>(destination, s), matrix(tile, ST::rows, ST::cols), at, adds);
        });
    });
}

template <class ST>
void cases(bool heads_inside) {
    using T = typename ST::T;
    constexpr int chunk = 16 / int(sizeof(T));
    constexpr int rows = ST::rows;
    // Lengths of the segments, which fill the layout.
    const int lengths[] = {rows + 3, 0, 5, rows, 1, 2 * rows - 1};
    int total = 0;
    for (int length : lengths) total += length;
    const int cols = ST::cols + ST::stripe_cols / 2;  // the second tile of columns is ragged
    const int pitch = (cols / chunk + 2) * chunk;
    Shape s{3, total, cols, {}};
    s.view = {1, 3, total, cols, 0, 0, 0};
    s.view.depth_stride = heads_inside ? pitch : int64_t(pitch) * (total + 2);
    s.view.row_stride = heads_inside ? 3 * pitch : pitch;
    int begin = 0;
    for (int length : lengths) {
        for (int row : {0, 2, rows, 3 * rows}) {
            for (int col : {0, ST::cols}) {
                const ragged_coord at{
                    .head = 1 + row % 2, .begin = begin, .length = length, .row = row, .col = col};
                const std::string name =
                    tile_name<ST>() + text(" segment %d+%d of %d head %d row %d col %d%s", begin,
                                           length, total, at.head, row, col,
                                           heads_inside ? " heads inside" : "");
                load_case<ST>(s, at, name);
                store_case<ST>(s, at, false, name);
                if constexpr (!float_8bit<T>) {
                    if (row == 2) store_case<ST>(s, at, true, name);
                }
            }
        }
        begin += length;
    }
    for (int piece = 8; piece <= rows; piece *= 2) {
        if (rows / piece > 32) continue;
        Places places;
        for (int i = 0; i < rows / piece; ++i) {
            const int which = (5 * i + 3) % 6, length = lengths[which];
            places.of[i] = {.head = i % 3, .length = length, .row = i % 4 * 5, .col = 0};
            for (int j = 0; j < which; ++j) places.of[i].begin += lengths[j];
        }
        pieces_case<ST>(
            s, places, piece,
            tile_name<ST>() + text(" of %d rows%s", piece, heads_inside ? " heads inside" : ""));
    }
}

void segments() {
    cases<st_bf<16, 64>>(true);
    cases<st_bf<64, 128>>(false);
    cases<st_fl<8, 32>>(true);
    if constexpr (intensity >= 2) {
        cases<st_fp8e4m3<32, 128>>(true);
        cases<st_hf<512, 32>>(false);
        cases<st_hf<16, 24, false>>(true);
    }
}
const Section section("memory/ragged", segments);

}  // namespace
}  // namespace unit
