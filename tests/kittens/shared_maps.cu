// Maps of shared tiles and vectors, and conversions between them.
#include "conversions.cuh"
#include "maps.cuh"

namespace unit {
namespace {

template <int WARPS, class O>
void all_maps() {
    map_cases<WARPS, Family::unary, O>();
    map_cases<WARPS, Family::binary, O>();
    if constexpr (any_tile<O> && sizeof(typename O::T) > 1) map_cases<WARPS, Family::tile, O>();
}
void tiles() {
    all_maps<1, st_bf<32, 64>>();
    all_maps<4, st_fl<64, 32>>();
    all_maps<8, st_hf<48, 48>>();
    if constexpr (intensity >= 2) {
        all_maps<2, st_bf<16, 24, false>>();
        all_maps<4, st_fp8e4m3<32, 64>>();
        all_maps<4, st_bf<64, 128, true, 64>>();
    }
    if constexpr (intensity >= 3) {
        all_maps<1, st_fl<16, 16>>();
        all_maps<8, st_bf<64, 64>>();
        all_maps<2, st_fp8e5m2<64, 32>>();
        all_maps<4, st_hf<128, 80>>();
    }
}
void vectors() {
    all_maps<1, sv_fl<64>>();
    all_maps<4, sv_bf<200>>();
    if constexpr (intensity >= 2) {
        all_maps<8, sv_hf<1024>>();
        all_maps<2, sv<fp8e4m3, 48>>();
    }
}
void conversions() {
    for_values<1, 8>([](auto warps) {
        for_types<float, bf16, half, fp8e4m3, fp8e5m2>([]<class D>(std::type_identity<D>) {
            for_types<float, bf16, half, fp8e4m3, fp8e5m2>([]<class S>(std::type_identity<S>) {
                constexpr int WARPS = decltype(warps)::value;
                if constexpr (WARPS == 1 || intensity >= 3) {
                    conversion_case<WARPS, Convert::copy, st<D, 16, 64>, st<S, 16, 64>>();
                } else {
                    conversion_case<WARPS, Convert::copy, sv<D, 160>, sv<S, 160>>();
                }
            });
        });
    });
}
const Section tile_section("shared/maps", tiles);
const Section conversion_section("shared/conversions", conversions);
const Section vector_section("shared/vec", vectors);

}  // namespace
}  // namespace unit
