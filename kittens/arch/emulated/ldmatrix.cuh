// ldmatrix / stmatrix / movmatrix: four 8x8 matrices of 16-bit elements between shared memory and
// registers. Lane l gives the address of row l%8 of matrix l/8, and holds of each matrix the
// elements 2(l%4) and 2(l%4)+1 of row l/4 (of column l/4 when transposed).
#pragma once

#include "calls.h"

namespace kittens::inline on_cpu {
namespace arch {

inline void load_matrix_x4(uint32_t& r0, uint32_t& r1, uint32_t& r2, uint32_t& r3,
                           uint32_t address) {
    uint32_t r[4];
    emulated::load_matrices(r, address, false);
    r0 = r[0], r1 = r[1], r2 = r[2], r3 = r[3];
}
inline void load_matrix_x4_transposed(uint32_t& r0, uint32_t& r1, uint32_t& r2, uint32_t& r3,
                                      uint32_t address) {
    uint32_t r[4];
    emulated::load_matrices(r, address, true);
    r0 = r[0], r1 = r[1], r2 = r[2], r3 = r[3];
}
inline void store_matrix_x4(uint32_t address, uint32_t r0, uint32_t r1, uint32_t r2, uint32_t r3) {
    emulated::store_matrices(address, {r0, r1, r2, r3}, false);
}
inline void store_matrix_x4_transposed(uint32_t address, uint32_t r0, uint32_t r1, uint32_t r2,
                                       uint32_t r3) {
    emulated::store_matrices(address, {r0, r1, r2, r3}, true);
}
inline uint32_t transpose_matrix(uint32_t r) {
    emulated::Lane& lane = emulated::own_lane();
    lane.words[0] = r;
    emulated::warp_operation("movmatrix", [](emulated::Lane* lanes) {
        uint16_t matrix[8][8];
        for (int l = 0; l < 32; ++l) {
            for (int e = 0; e < 2; ++e) {
                matrix[l / 4][2 * (l % 4) + e] = uint16_t(lanes[l].words[0] >> (16 * e));
            }
        }
        for (int l = 0; l < 32; ++l) {
            const int a = l / 4, b = 2 * (l % 4);
            lanes[l].words[1] = matrix[b][a] | uint32_t(matrix[b + 1][a]) << 16;
        }
    });
    return lane.words[1];
}

}  // namespace arch
}  // namespace kittens::inline on_cpu
