// Tile schedules are pure functions: their properties are checked while this file is compiled.
#include "../../kittens/pipeline/schedule.h"

namespace unit {
namespace {

using namespace kittens::schedule;

using Order = Tile (*)(int, TileGrid);

// Every tile is worked on exactly once.
constexpr bool is_permutation(TileGrid grid, Order order) {
    bool seen[256] = {};
    for (int task = 0; task < grid.size(); ++task) {
        const Tile t = order(task, grid);
        if (t.row < 0 || t.row >= grid.rows || t.col < 0 || t.col >= grid.cols || t.batch < 0 ||
            t.batch >= grid.batch) {
            return false;
        }
        bool& mark = seen[(t.batch * grid.rows + t.row) * grid.cols + t.col];
        if (mark) return false;
        mark = true;
    }
    return true;
}
template <int group>
constexpr bool permutes_all() {
    for (int rows = 1; rows <= 9; ++rows) {
        for (int cols = 1; cols <= 5; ++cols) {
            for (int batch = 1; batch <= 2; ++batch) {
                const TileGrid grid{rows, cols, batch};
                const bool by_rows = is_permutation(
                    grid, [](int t, TileGrid g) { return grouped_raster(t, g, group); });
                const bool by_columns = is_permutation(
                    grid, [](int t, TileGrid g) { return grouped_raster_columns(t, g, group); });
                if (!by_rows || !by_columns || !is_permutation(grid, row_major)) return false;
            }
        }
    }
    return true;
}
static_assert(permutes_all<1>() && permutes_all<2>() && permutes_all<4>() && permutes_all<100>());

// A group's tiles are close together: the first `group * n` tasks cover `group` rows and n columns.
constexpr bool is_compact(TileGrid grid, int group) {
    for (int task = 0; task < group * grid.cols; ++task) {
        const Tile t = grouped_raster(task, grid, group);
        if (t.row >= group || t.col != task / group) return false;
    }
    return true;
}
static_assert(is_compact({8, 7}, 4) && is_compact({9, 3}, 2));
static_assert(grouped_raster(5, {3, 4}, 1).col == row_major(5, {3, 4}).col);

// Blocks together take every task once, and stop.
constexpr bool is_complete(int tasks, int blocks) {
    int done = 0, sum = 0;
    for (int block = 0; block < blocks; ++block) {
        for (int iter = 0;; ++iter) {
            const int task = persistent_task(iter, block, blocks, tasks);
            if (task < 0) break;
            ++done, sum += task;
        }
    }
    return done == tasks && sum == tasks * (tasks - 1) / 2;
}
static_assert(is_complete(0, 3) && is_complete(1, 3) && is_complete(17, 4) && is_complete(4, 4));
static_assert(persistent_task(2147483647, 3, 1 << 20, 7) == -1);
static_assert(persistent_blocks(5, 132) == 5 && persistent_blocks(500, 132) == 132 &&
              persistent_blocks(0, 132) == 1);

}  // namespace
}  // namespace unit
