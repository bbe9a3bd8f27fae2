// TMA between global and shared tiles of 16-bit types: every swizzle, axes 0 to 2, ragged edges.
#include "memory_tile_tma.cuh"

namespace unit {
namespace {

template <class T>
void swizzles() {
    tma_tile_cases<st<T, 16, 16>, 2>();
    tma_tile_cases<st<T, 64, 32>, 2>();
    tma_tile_cases<st<T, 64, 64>, 2>();
    tma_tile_cases<st<T, 64, 128, true, 32>, 2>();
    tma_tile_cases<st<T, 64, 128, true, 64>, 2>();
    tma_tile_cases<st<T, 32, 192>, 2>();
    tma_tile_cases<st<T, 16, 80>, 2>();
    tma_tile_cases<st<T, 16, 24, false>, 2>();
    tma_tile_cases<st<T, 32, 128, false>, 2>();
}

void tiles() {
    swizzles<bf16>();
    tma_tile_cases<st_bf<64, 64>, 0>();
    tma_tile_cases<st_bf<64, 64>, 1>();
    tma_tile_cases<st_bf<8, 32>, 0>();
    tma_tile_cases<st_bf<8, 32>, 1>();
    tma_tile_cases<st_bf<32, 256>, 1>();
    tma_tile_cases<st_bf<8, 64>, 2>();
    tma_tile_cases<st_bf<512, 32>, 2>();
    if constexpr (intensity >= 2) swizzles<half>();
}
const Section section("memory/tile/tma", tiles);

}  // namespace
}  // namespace unit
