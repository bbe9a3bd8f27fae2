// Prints the tile library's layout functions as tables, for test_kittens.py to compare with
// formulas of its own. Plain C++: the layouts are arithmetic that needs neither CUDA nor a GPU.
//
//   fragment LAYOUT COUNT LANE REGISTER ELEMENT ROW COLUMN
//   tile SWIZZLE ELEMENT_BYTES ROWS COLS ADDRESS...
//   widest ROW_BYTES SWIZZLE
#include <cstdio>
#include <initializer_list>

#include "types/register/fragment.h"
#include "types/shared/swizzle.h"

namespace {

void fragments(int count) {
    for (const bool row : {true, false}) {
        for (int lane = 0; lane < 32; ++lane) {
            for (int index = 0; index < 4; ++index) {
                for (int element = 0; element < count; ++element) {
                    const auto p = row ? kittens::fragment::row_layout(lane, index, element, count)
                                       : kittens::fragment::col_layout(lane, index, element, count);
                    std::printf("fragment %s %d %d %d %d %d %d\n", row ? "row" : "col", count, lane,
                                index, element, p.row, p.col);
                }
            }
        }
    }
}

void tile(int swizzle, int element_bytes, int rows, int cols) {
    std::printf("tile %d %d %d %d", swizzle, element_bytes, rows, cols);
    for (int row = 0; row < rows; ++row) {
        for (int col = 0; col < cols; ++col) {
            const unsigned offset =
                kittens::swizzle::linear(row, col, rows, cols, element_bytes, swizzle);
            std::printf(" %u", kittens::swizzle::permute(offset, swizzle));
        }
    }
    std::printf("\n");
}

}  // namespace

int main() {
    fragments(2);
    fragments(4);
    for (const int bytes : {1, 2, 4}) {
        for (const int swizzle : {0, 32, 64, 128}) {
            for (const int stripes : {1, 2, 3}) {
                const int width = swizzle ? swizzle : 48;
                tile(swizzle, bytes, 16, stripes * width / bytes);
                tile(swizzle, bytes, 40, stripes * width / bytes);
            }
        }
    }
    for (int row_bytes = 16; row_bytes <= 1024; row_bytes += 16) {
        std::printf("widest %d %d\n", row_bytes, kittens::swizzle::widest(row_bytes));
    }
}
