// Maps of register tiles with a second operand: a tile, a number, a vector along rows or columns.
#include "maps.cuh"

namespace unit {
namespace {

template <class L>
void layouts() {
    map_cases<1, Family::binary, rt_fl<16, 32, L>>();
    map_cases<1, Family::tile, rt_fl<16, 32, L>>();
    map_cases<1, Family::binary, rt_bf<32, 16, L>>();
    map_cases<1, Family::tile, rt_bf<32, 16, L>>();
    map_cases<4, Family::binary, rt_bf<16, 64, L>>();
    map_cases<4, Family::tile, rt_bf<16, 64, L>>();
    map_cases<1, Family::binary, rt_hf<16, 48, L>>();
    map_cases<1, Family::tile, rt_hf<16, 48, L>>();
    if constexpr (intensity >= 2) {
        map_cases<2, Family::binary, rt_fl<32, 48, L>>();
        map_cases<2, Family::tile, rt_fl<32, 48, L>>();
        map_cases<1, Family::binary, rt_fp8e4m3<32, 32, L>>();
    }
    if constexpr (intensity >= 3) {
        map_cases<8, Family::binary, rt_hf<32, 32, L>>();
        map_cases<8, Family::tile, rt_hf<32, 32, L>>();
        map_cases<1, Family::binary, rt_fl<64, 64, L>>();
        map_cases<1, Family::tile, rt_fl<64, 64, L>>();
        map_cases<1, Family::binary, rt_fp8e5m2<32, 64, L>>();
        map_cases<4, Family::binary, rt_bf<48, 80, L>>();
        map_cases<4, Family::tile, rt_bf<48, 80, L>>();
    }
    if constexpr (intensity >= 4) {
        for_values<16, 32, 48, 64>([](auto rows) {
            for_values<16, 32, 64, 96>([](auto cols) {
                for_types<float, bf16, half>([]<class T>(std::type_identity<T>) {
                    map_cases<2, Family::binary,
                              rt<T, decltype(rows)::value, decltype(cols)::value, L>>();
                    map_cases<2, Family::tile,
                              rt<T, decltype(rows)::value, decltype(cols)::value, L>>();
                });
            });
        });
    }
}
void maps() {
    layouts<row_l>();
    layouts<col_l>();
}
const Section section("register/maps", maps);

}  // namespace
}  // namespace unit
