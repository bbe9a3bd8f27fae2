// Register vectors: maps, reductions to a number, copies between layouts and element types.
#include "conversions.cuh"
#include "reductions.cuh"

namespace unit {
namespace {

template <int length, class L>
void vectors() {
    map_cases<1, Family::unary, rv_fl<length, L>>();
    map_cases<1, Family::binary, rv_bf<length, L>>();
    vector_reduction_cases<1, rv_fl<length, L>, float>();
    vector_reduction_cases<1, rv_bf<length, L>, bf16>();
    if constexpr (intensity >= 2) {
        map_cases<1, Family::unary, rv_hf<length, L>>();
        map_cases<2, Family::binary, rv_fl<length, L>>();
        vector_reduction_cases<1, rv_hf<length, L>, half>();
        vector_reduction_cases<4, rv_bf<length, L>, float>();
    }
}
template <int length>
void copies() {
    for_types<align_l, ortho_l, naive_l>([]<class D>(std::type_identity<D>) {
        for_types<align_l, ortho_l, naive_l>([]<class S>(std::type_identity<S>) {
            conversion_case<1, Convert::copy, rv<float, length, D>, rv<float, length, S>>();
            conversion_case<1, Convert::copy, rv<bf16, length, D>, rv<float, length, S>>();
            conversion_case<1, Convert::copy, rv<float, length, D>, rv<half, length, S>>();
        });
    });
}

void run_vectors() {
    for_types<align_l, ortho_l, naive_l>([]<class L>(std::type_identity<L>) {
        vectors<16, L>();
        vectors<80, L>();
        if constexpr (intensity >= 3) {
            vectors<64, L>();
            vectors<256, L>();
        }
    });
    copies<32>();
    copies<80>();
    if constexpr (intensity >= 2) {
        copies<16>();
        copies<128>();
    }
}
const Section section("register/vec", run_vectors);

}  // namespace
}  // namespace unit
