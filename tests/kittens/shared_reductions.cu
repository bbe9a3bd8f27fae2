// Reductions and masks of shared tiles, reductions of shared vectors.
#include "masks.cuh"
#include "reductions.cuh"

namespace unit {
namespace {

template <int WARPS, class ST, class TV>
void rows_and_columns() {
    tile_reduction_cases<WARPS, true, ST, sv<TV, ST::rows>>();
    tile_reduction_cases<WARPS, false, ST, sv<TV, ST::cols>>();
}
void tiles() {
    rows_and_columns<1, st_fl<32, 32>, float>();
    rows_and_columns<4, st_bf<64, 64>, float>();
    rows_and_columns<8, st_hf<128, 48>, half>();
    if constexpr (intensity >= 2) {
        rows_and_columns<2, st_bf<16, 24, false>, bf16>();
        rows_and_columns<4, st_fp8e4m3<32, 64>, float>();
        rows_and_columns<8, st_bf<64, 128, true, 32>, bf16>();
    }
    if constexpr (intensity >= 3) {
        rows_and_columns<1, st_bf<16, 16>, float>();
        rows_and_columns<2, st_hf<96, 80>, float>();
        rows_and_columns<4, st_fp8e5m2<64, 32>, half>();
    }
}
void run_masks() {
    mask_cases<1, st_bf<32, 64>>();
    mask_cases<4, st_fl<48, 32>>();
    if constexpr (intensity >= 2) mask_cases<8, st_hf<64, 48>>();
    if constexpr (intensity >= 2) mask_cases<2, st_fp8e4m3<16, 64>>();
}
void vectors() {
    vector_reduction_cases<1, sv_fl<64>, float>();
    vector_reduction_cases<4, sv_bf<200>, float>();
    vector_reduction_cases<8, sv_hf<512>, half>();
    if constexpr (intensity >= 2) {
        vector_reduction_cases<2, sv_bf<48>, bf16>();
        vector_reduction_cases<1, sv<fp8e4m3, 48>, float>();
    }
}
const Section tile_section("shared/reductions", tiles);
const Section mask_section("shared/masks", run_masks);
const Section vector_section("shared/vec", vectors);

}  // namespace
}  // namespace unit
