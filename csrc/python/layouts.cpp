// The tile library's layouts as NumPy arrays, computed by the very functions that the kernels use:
// for tests, and to draw pictures of them.
#include "csrc/python/layouts.h"

#include <pybind11/numpy.h>
#include <pybind11/stl.h>

#include <cstdint>
#include <optional>
#include <string>

#include "csrc/common/registry.h"
#include "kittens/pipeline/schedule.h"
#include "kittens/types/register/fragment.h"
#include "kittens/types/shared/swizzle.h"
#if THUNDERKITTENS_HAS_GEMM
#include "csrc/gemm/dense/gemm.h"
#endif

namespace py = pybind11;
namespace tk = thunderkittens;

namespace {

constexpr int lanes = 32;
constexpr int registers_per_base = 4;

void check_element_bytes(int element_bytes) {
    TK_CHECK(element_bytes == 1 || element_bytes == 2 || element_bytes == 4,
             "element_bytes must be 1, 2 or 4, got ", element_bytes);
}

// (lanes, elements per lane, 2): row and column of every element, in the order of the lane's
// registers.
py::array_t<int> register_tile_positions(int rows, int cols, const std::string& layout,
                                         int element_bytes) {
    check_element_bytes(element_bytes);
    TK_CHECK(layout == "row" || layout == "col", "layout must be 'row' or 'col', got '", layout,
             "'");
    const bool row_layout = layout == "row";
    const int packing = element_bytes == 1 ? 4 : 2;
    const int base_rows = row_layout ? 16 : 8 * packing, base_cols = row_layout ? 8 * packing : 16;
    TK_CHECK(rows > 0 && rows % base_rows == 0, "rows must be a multiple of ", base_rows, ", got ",
             rows);
    TK_CHECK(cols > 0 && cols % base_cols == 0, "cols must be a multiple of ", base_cols, ", got ",
             cols);
    py::array_t<int> positions({lanes, rows * cols / lanes, 2});
    auto out = positions.mutable_unchecked<3>();
    for (int lane = 0; lane < lanes; ++lane) {
        int slot = 0;
        for (int row = 0; row < rows; row += base_rows) {
            for (int col = 0; col < cols; col += base_cols) {
                for (int index = 0; index < registers_per_base; ++index) {
                    for (int element = 0; element < packing; ++element, ++slot) {
                        using namespace kittens::fragment;
                        const Position at = row_layout ? kittens::fragment::row_layout(
                                                             lane, index, element, packing)
                                                       : col_layout(lane, index, element, packing);
                        out(lane, slot, 0) = row + at.row;
                        out(lane, slot, 1) = col + at.col;
                    }
                }
            }
        }
    }
    return positions;
}

// (rows, cols): byte offset of every element from the start of a tile that is aligned to 1024
// bytes.
py::array_t<unsigned> shared_tile_offsets(int rows, int cols, int element_bytes,
                                          std::optional<int> swizzle_bytes) {
    check_element_bytes(element_bytes);
    TK_CHECK(rows > 0 && cols > 0, "rows and cols must be positive, got ", rows, " and ", cols);
    const int swizzle = swizzle_bytes.value_or(kittens::swizzle::widest(cols * element_bytes));
    TK_CHECK(swizzle == 0 || swizzle == 32 || swizzle == 64 || swizzle == 128,
             "swizzle_bytes must be 0, 32, 64 or 128, got ", swizzle);
    TK_CHECK(swizzle == 0 || cols * element_bytes % swizzle == 0, "a row of ", cols * element_bytes,
             " bytes is no multiple of the swizzle's width, ", swizzle);
    py::array_t<unsigned> offsets({rows, cols});
    auto out = offsets.mutable_unchecked<2>();
    for (int row = 0; row < rows; ++row) {
        for (int col = 0; col < cols; ++col) {
            using namespace kittens::swizzle;
            out(row, col) = permute(linear(row, col, rows, cols, element_bytes, swizzle), swizzle);
        }
    }
    return offsets;
}

// (tiles, 3): batch, row and column of the tiles in the order of a schedule of the tile library.
py::array_t<int> tile_schedule(int rows, int cols, int batch, const std::string& order, int group) {
    TK_CHECK(rows > 0 && cols > 0 && batch > 0, "rows, cols and batch must be positive, got ", rows,
             ", ", cols, " and ", batch);
    TK_CHECK(group > 0, "group must be positive, got ", group);
    const kittens::schedule::TileGrid grid{rows, cols, batch};
    py::array_t<int> tiles({grid.size(), 3});
    auto out = tiles.mutable_unchecked<2>();
    for (int task = 0; task < grid.size(); ++task) {
        kittens::schedule::Tile tile{};
        if (order == "row_major") {
            tile = kittens::schedule::row_major(task, grid);
        } else if (order == "grouped_raster") {
            tile = kittens::schedule::grouped_raster(task, grid, group);
        } else if (order == "grouped_raster_columns") {
            tile = kittens::schedule::grouped_raster_columns(task, grid, group);
        } else {
            throw std::runtime_error(
                tk::concat("order must be 'row_major', 'grouped_raster' or "
                           "'grouped_raster_columns', got '",
                           order, "'"));
        }
        out(task, 0) = tile.batch;
        out(task, 1) = tile.row;
        out(task, 2) = tile.col;
    }
    return tiles;
}

// (tiles, 5): batch, row and column of the tiles in the order in which they are dealt, then each
// one's first column of the output and how many it has (with a gate that is interleaved, of z).
py::array_t<std::uint32_t> gemm_tile_order(const tk::Fields& fields,
                                           const tk::DeviceProperties& device) {
    tk::find_op("gemm");  // throws where the build leaves it out
#if THUNDERKITTENS_HAS_GEMM
    const auto problem = tk::detail::struct_from<tk::gemm::Problem>("gemm", fields);
    const auto choice = tk::gemm::choose(problem, device);
    const bool halves = problem.gate == tk::gemm::Gate::blocked;
    const auto order =
        tk::gemm::make_two_width_order(tk::gemm::tile_walk(choice.config, choice.schedule),
                                       problem.m, problem.n, problem.batch, true, halves);
    const auto width = static_cast<std::uint32_t>(choice.config.block_n / (halves ? 2 : 1));
    py::array_t<std::uint32_t> tiles({static_cast<py::ssize_t>(order.total), py::ssize_t{5}});
    auto out = tiles.mutable_unchecked<2>();
    for (std::uint32_t index = 0; index < order.total; ++index) {
        const auto at = order.at(index);
        out(index, 0) = at.batch;
        out(index, 1) = at.m;
        out(index, 2) = at.n;
        out(index, 3) = at.column(width);
        out(index, 4) = at.narrow() ? width - tk::gemm::NARROW_BY : width;
    }
    return tiles;
#else
    (void)fields, (void)device;
    return {};
#endif
}

}  // namespace

void bind_layouts(py::module_& m) {
    m.def("register_tile_positions", &register_tile_positions, py::arg("rows"), py::arg("cols"),
          py::arg("layout") = "row", py::arg("element_bytes") = 2,
          "(32, elements per lane, 2): row and column of each element that each lane holds.");
    m.def("shared_tile_offsets", &shared_tile_offsets, py::arg("rows"), py::arg("cols"),
          py::arg("element_bytes") = 2, py::arg("swizzle_bytes") = py::none(),
          "(rows, cols): byte offset of each element of a shared tile; None is its own swizzle.");
    m.def("tile_schedule", &tile_schedule, py::arg("rows"), py::arg("cols"), py::arg("batch") = 1,
          py::arg("order") = "row_major", py::arg("group") = 8,
          "(tiles, 3): batch, row, column of the tiles in the order of kittens::schedule.");
    m.def("gemm_tile_order", &gemm_tile_order, py::arg("problem"), py::arg("device"),
          "(tiles, 5): batch, row, column, first column and width, in the order of the work.");
}
