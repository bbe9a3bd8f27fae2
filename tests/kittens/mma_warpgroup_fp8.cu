// wgmma on 8-bit floats: every pair of types, K contiguous in both operands.
#include "mma_warpgroup.cuh"

namespace unit {
namespace {

void products() {
    for_range<16, 256, intensity >= 2 ? 16 : 48>(
        [](auto n) { warpgroup_forms<float, fp8e4m3, fp8e4m3, n, 128>(); });
    for_values<16, 64, 112, 256>([](auto n) {
        warpgroup_forms<float, fp8e4m3, fp8e5m2, n, 64>();
        warpgroup_forms<float, fp8e5m2, fp8e4m3, n, 64>();
        warpgroup_forms<float, fp8e5m2, fp8e5m2, n, 64>();
        warpgroup_forms<half, fp8e4m3, fp8e4m3, n, 64>();
    });
    for_values<32, 96, 192, 256>([](auto k) {
        warpgroup_forms<float, fp8e4m3, fp8e4m3, 64, k>();
        warpgroup_forms<half, fp8e4m3, fp8e4m3, 96, k>();
    });
}
const Section section("mma/warpgroup/fp8", products);

}  // namespace
}  // namespace unit
