// Shared and register tiles of 32-bit and 8-bit types, and transfers that convert.
#include "memory_tile_shared.cuh"

namespace unit {
namespace {

template <class L>
void layouts() {
    shared_register_scopes<float, float, 16, 16, L>();
    shared_register_scopes<float, float, 32, 64, L>();
    shared_register_scopes<float, bf16, 16, 64, L>();
    shared_register_scopes<fp8e4m3, fp8e4m3, 32, 32, L>();
    if constexpr (intensity >= 2) {
        shared_register_scopes<bf16, float, 32, 32, L>();
        shared_register_scopes<half, bf16, 16, 48, L>();
        shared_register_scopes<float, float, 16, 80, L, true, 32>();
        shared_register_scopes<fp8e5m2, fp8e5m2, 32, 96, L>();
        shared_register_scopes<float, half, 16, 24 * 2, L, false>();
    }
}
void transfers() {
    layouts<row_l>();
    layouts<col_l>();
}
const Section section("memory/tile/shared", transfers);

}  // namespace
}  // namespace unit
