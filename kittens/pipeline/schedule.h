// Which tile a block works on, and when: pure arithmetic on plain integers, the same on the host
// and on the device, so that an order can be listed, drawn and tested without a GPU.
#pragma once

#include "../types/register/fragment.h"

namespace kittens::schedule {

// The tiles of one output matrix, `batch` times over.
struct TileGrid {
    int rows, cols, batch = 1;

    KITTENS_HOST_DEVICE constexpr int size() const { return rows * cols * batch; }
};

struct Tile {
    int row, col, batch = 0;
};

// Persistent blocks take every `blocks`-th task. -1 when this block has no task left.
KITTENS_HOST_DEVICE constexpr int persistent_task(int task_iter, int block, int blocks, int tasks) {
    const long long task = static_cast<long long>(task_iter) * blocks + block;
    return task < tasks ? static_cast<int>(task) : -1;
}

// A grid that persistent_task covers: no block without work, none more than fit at once.
KITTENS_HOST_DEVICE constexpr int persistent_blocks(int tasks, int blocks_at_once) {
    return tasks < 1 ? 1 : tasks < blocks_at_once ? tasks : blocks_at_once;
}

// Row after row.
KITTENS_HOST_DEVICE constexpr Tile row_major(int task, TileGrid grid) {
    const int per_matrix = grid.rows * grid.cols;
    const int index = task % per_matrix;
    return {index / grid.cols, index % grid.cols, task / per_matrix};
}

// Bands of `group` rows of tiles, each walked down its columns. The tiles that run at one time then
// form a block that is about square, and what they read of both operands stays in L2. The last band
// is as high as what is left.
KITTENS_HOST_DEVICE constexpr Tile grouped_raster(int task, TileGrid grid, int group) {
    const int per_matrix = grid.rows * grid.cols;
    const int batch = task / per_matrix;
    const int index = task - batch * per_matrix;
    const int band = index / (group * grid.cols);
    const int first_row = band * group;
    const int height = grid.rows - first_row < group ? grid.rows - first_row : group;
    const int inside = index - first_row * grid.cols;
    return {first_row + inside % height, inside / height, batch};
}

// The same with bands of columns, for outputs that are wider than high.
KITTENS_HOST_DEVICE constexpr Tile grouped_raster_columns(int task, TileGrid grid, int group) {
    const Tile t = grouped_raster(task, {grid.cols, grid.rows, grid.batch}, group);
    return {t.col, t.row, t.batch};
}

}  // namespace kittens::schedule
