// Shared tiles from and to global memory, with ordinary accesses and with cp.async.
#include "memory_global.cuh"

namespace unit {
namespace {

void transfers() {
    transfer_cases<1, 2, st_bf<16, 32>>();
    transfer_cases<4, 2, st_bf<64, 64>>();
    transfer_cases<8, 2, st_fl<48, 80>>();
    transfer_cases<4, 1, st_bf<32, 32>>();
    if constexpr (intensity >= 2) {
        transfer_cases<2, 0, st_hf<16, 128>>();
        transfer_cases<4, 2, st_fp8e4m3<32, 64>>();
        transfer_cases<2, 2, st_bf<16, 24, false>>();
        transfer_cases<8, 2, st_bf<128, 128, true, 64>>();
    }
    if constexpr (intensity >= 3) {
        transfer_cases<1, 1, st_fl<16, 16>>();
        transfer_cases<4, 0, st_fp8e5m2<64, 128>>();
        transfer_cases<8, 1, st_hf<64, 192>>();
    }
}
const Section section("memory/tile/async", transfers);

}  // namespace
}  // namespace unit
