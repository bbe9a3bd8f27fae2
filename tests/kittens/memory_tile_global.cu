// Register tiles from and to global memory.
#include "memory_global.cuh"

namespace unit {
namespace {

template <class L>
void layouts() {
    transfer_cases<1, 2, rt_bf<16, 32, L>>();
    transfer_cases<4, 2, rt_fl<16, 64, L>>();
    transfer_cases<1, 2, rt_fl<32, 16, L>, bf16>();
    transfer_cases<1, 1, rt_bf<16, 32, L>>();
    if constexpr (intensity >= 2) {
        transfer_cases<1, 0, rt_hf<32, 32, L>>();
        transfer_cases<2, 1, rt_fl<16, 16, L>, half>();
        transfer_cases<8, 2, rt_bf<16, 16, L>, float>();
        transfer_cases<1, 2, rt_fp8e4m3<32, 32, L>>();
    }
    if constexpr (intensity >= 3) {
        transfer_cases<1, 2, rt_hf<48, 80, L>>();
        transfer_cases<4, 0, rt_bf<16, 128, L>>();
        transfer_cases<2, 2, rt_fp8e5m2<32, 64, L>>();
    }
}
void transfers() {
    layouts<row_l>();
    layouts<col_l>();
}
const Section section("memory/tile/global", transfers);

}  // namespace
}  // namespace unit
