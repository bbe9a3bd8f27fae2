// error: a swizzled shared tile's row must be a multiple of 32 bytes
#include <kittens.cuh>

using namespace kittens;

st_bf<16, 24> tile;
