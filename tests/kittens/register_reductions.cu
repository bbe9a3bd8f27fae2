// Reductions of register tiles along rows and columns.
#include "reductions.cuh"

namespace unit {
namespace {

template <int WARPS, class RT, class TV>
void rows_and_columns() {
    using per_row = rv<TV, RT::rows, typename RT::col_vec::layout>;
    using per_col = rv<TV, RT::cols, typename RT::row_vec::layout>;
    tile_reduction_cases<WARPS, true, RT, per_row>();
    if constexpr (WARPS == 1) tile_reduction_cases<1, false, RT, per_col>();
}

template <class L>
void layouts() {
    rows_and_columns<1, rt_fl<16, 16, L>, float>();
    rows_and_columns<1, rt_fl<32, 64, L>, float>();
    rows_and_columns<1, rt_bf<16, 128, L>, float>();
    rows_and_columns<4, rt_fl<16, 64, L>, float>();
    if constexpr (intensity >= 2) {
        rows_and_columns<1, rt_bf<48, 16, L>, bf16>();
        rows_and_columns<1, rt_hf<16, 48, L>, half>();
        rows_and_columns<2, rt_hf<32, 32, L>, float>();
        rows_and_columns<8, rt_bf<16, 32, L>, bf16>();
    }
    if constexpr (intensity >= 3) {
        for_values<16, 48, 64>([](auto rows) {
            for_types<float, bf16, half>([]<class T>(std::type_identity<T>) {
                rows_and_columns<1, rt<T, decltype(rows)::value, 80, L>, T>();
                rows_and_columns<1, rt<T, decltype(rows)::value, 32, L>, float>();
            });
        });
    }
}
void reductions() {
    layouts<row_l>();
    layouts<col_l>();
}
const Section section("register/reductions", reductions);

}  // namespace
}  // namespace unit
