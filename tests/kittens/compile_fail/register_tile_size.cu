// error: a register tile's rows must be a multiple of its base tile's rows
#include <kittens.cuh>

using namespace kittens;

rt_fl<24, 16> tile;
