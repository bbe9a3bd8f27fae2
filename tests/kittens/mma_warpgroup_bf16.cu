// wgmma on bf16: every N, all forms.
#include "mma_warpgroup.cuh"

namespace unit {
namespace {

void products() {
    for_range<16, 256, intensity >= 2 ? 16 : 48>(
        [](auto n) { warpgroup_forms<float, bf16, bf16, n, 64>(); });
}
const Section section("mma/warpgroup/bf16", products);

}  // namespace
}  // namespace unit
