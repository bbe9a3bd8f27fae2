// Shared and register tiles of 16-bit types.
#include "memory_tile_shared.cuh"

namespace unit {
namespace {

template <class T, class L>
void shapes() {
    shared_register_scopes<T, T, 16, 16, L>();
    shared_register_scopes<T, T, 16, 64, L>();
    shared_register_scopes<T, T, 32, 48, L>();
    shared_register_scopes<T, T, 32, 96, L>();
    shared_register_scopes<T, T, 16, 128, L, true, 64>();
    shared_register_scopes<T, T, 16, 32, L, false>();
}

void transfers() {
    for_types<row_l, col_l>([]<class L>(std::type_identity<L>) {
        shapes<bf16, L>();
        if constexpr (intensity >= 2) shapes<half, L>();
    });
}
const Section section("memory/tile/shared", transfers);

}  // namespace
}  // namespace unit
