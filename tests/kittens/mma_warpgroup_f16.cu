// wgmma on fp16, with float and with half accumulators.
#include "mma_warpgroup.cuh"

namespace unit {
namespace {

void products() {
    for_range<16, 256, intensity >= 2 ? 48 : 80>(
        [](auto n) { warpgroup_forms<float, half, half, n, 64>(); });
    for_range<16, 256,
              intensity >= 3   ? 16
              : intensity == 2 ? 48
                               : 80>([](auto n) { warpgroup_forms<half, half, half, n, 64>(); });
    warpgroup_forms<half, half, half, 64, 128>();
    warpgroup_forms<half, half, half, 128, 32>();
}
const Section section("mma/warpgroup/f16", products);

}  // namespace
}  // namespace unit
