// TMA between global and shared tiles of 32-bit and 8-bit types.
#include "memory_tile_tma.cuh"

namespace unit {
namespace {

void tiles() {
    tma_tile_cases<st_fl<16, 8>, 2>();
    tma_tile_cases<st_fl<64, 32>, 2>();
    tma_tile_cases<st_fl<32, 96>, 1>();
    tma_tile_cases<st_fp8e4m3<32, 128>, 2>();
    tma_tile_cases<st_fp8e4m3<16, 32>, 0>();
    if constexpr (intensity >= 2) {
        tma_tile_cases<st_fl<16, 64, true, 64>, 0>();
        tma_tile_cases<st_fl<8, 20, false>, 2>();
        tma_tile_cases<st_fp8e5m2<64, 64>, 2>();
        tma_tile_cases<st_fp8e5m2<16, 256, true, 32>, 1>();
    }
}
const Section section("memory/tile/tma", tiles);

}  // namespace
}  // namespace unit
