// Masks of register tiles.
#include "masks.cuh"

namespace unit {
namespace {

template <class L>
void layouts() {
    mask_cases<1, rt_fl<32, 32, L>>();
    mask_cases<4, rt_fl<16, 64, L>>();
    mask_cases<1, rt_bf<16, 48, L>>();
    if constexpr (intensity >= 2) {
        mask_cases<2, rt_hf<32, 16, L>>();
        mask_cases<1, rt_fp8e4m3<32, 32, L>>();
    }
    if constexpr (intensity >= 3) {
        mask_cases<8, rt_bf<16, 80, L>>();
        mask_cases<1, rt_fl<64, 96, L>>();
        mask_cases<1, rt_fp8e5m2<32, 64, L>>();
    }
}
void run_masks() {
    layouts<row_l>();
    layouts<col_l>();
}
const Section section("register/masks", run_masks);

}  // namespace
}  // namespace unit
