// ldmatrix / stmatrix / movmatrix: four 8x8 matrices of 16-bit elements between shared memory and
// registers. Lane l gives the address of row l%8 of matrix l/8, and holds of each matrix the
// elements 2(l%4) and 2(l%4)+1 of row l/4 (of column l/4 when transposed).
#pragma once

#include "shadow.h"

namespace kittens::inline on_cpu {
namespace arch {

namespace detail {
struct MatrixRow {
    uint16_t element[8];
};
inline void check_row(uint32_t address, const char* what) {
    emulated::check_shared(emulated::place_of(address), 16, 16, what);
}
template <bool TRANSPOSED>
inline void load_matrices(uint32_t (&out)[4], uint32_t address) {
    const char* what = "ldmatrix";
    check_row(address, what);
    emulated::Lane& lane = emulated::own_lane();
    lane.words[0] = address;
    emulated::warp_operation(TRANSPOSED ? "ldmatrix.trans" : "ldmatrix", [](emulated::Warp& w) {
        uint16_t matrix[4][8][8];
        for (int l = 0; l < 32; ++l) {
            const emulated::Place p{w.threads[0]->block, w.lanes[size_t(l)].words[0]};
            std::memcpy(matrix[l / 8][l % 8], p.block->shared + p.address, 16);
        }
        for (int l = 0; l < 32; ++l) {
            for (int m = 0; m < 4; ++m) {
                const int a = l / 4, b = 2 * (l % 4);
                const uint32_t low = TRANSPOSED ? matrix[m][b][a] : matrix[m][a][b];
                const uint32_t high = TRANSPOSED ? matrix[m][b + 1][a] : matrix[m][a][b + 1];
                w.lanes[size_t(l)].words[4 + m] = low | high << 16;
            }
        }
        if (!emulated::machine->check_order) return;
        // Each lane reads parts of the rows of eight lanes; rows that were written at once are
        // checked once.
        emulated::Granule last{};
        emulated::Block& block = *w.threads[0]->block;
        for (size_t row = 0; row < 32; ++row) {
            const uint32_t address = w.lanes[row].words[0];
            emulated::for_each_granule(address, 16, [&](uint32_t a, uint8_t mask) {
                // Transposed, two lanes read a pair; the first stands for both.
                const size_t pair = (a - address) / 4, r = row % 8;
                const emulated::Thread& reader =
                    *w.threads[TRANSPOSED ? 8 * pair + r / 2 : 4 * r + pair];
                emulated::add_reader(block, a, mask, reader, size_t(reader.index), reader.now());
                const emulated::Granule& g = block.granules[a / 4];
                if (g.kind == last.kind && g.writer == last.writer && g.time == last.time) return;
                last = g;
                for (const emulated::Thread* t : w.threads) {
                    emulated::check_visible(*t, g, a, mask, false, "ldmatrix");
                }
            });
        }
    });
    for (int m = 0; m < 4; ++m) out[m] = lane.words[4 + m];
}
template <bool TRANSPOSED>
inline void store_matrices(uint32_t address, const uint32_t (&in)[4]) {
    const char* what = "stmatrix";
    check_row(address, what);
    emulated::Lane& lane = emulated::own_lane();
    lane.words[0] = address;
    for (int m = 0; m < 4; ++m) lane.words[4 + m] = in[m];
    emulated::warp_operation(TRANSPOSED ? "stmatrix.trans" : "stmatrix", [](emulated::Warp& w) {
        emulated::Block& block = *w.threads[0]->block;
        for (int row = 0; row < 32; ++row) {
            uint16_t values[8];
            const int m = row / 8, r = row % 8;
            for (int c = 0; c < 8; ++c) {
                const int l = TRANSPOSED ? 4 * c + r / 2 : 4 * r + c / 2;
                const uint32_t word = w.lanes[size_t(l)].words[4 + m];
                values[c] = uint16_t(word >> (16 * ((TRANSPOSED ? r : c) % 2)));
            }
            const uint32_t address = w.lanes[size_t(row)].words[0];
            emulated::check_not_being_read({&block, address}, 16, "stmatrix");
            std::memcpy(block.shared + address, values, 16);
        }
        if (!emulated::machine->check_order) return;
        for (int row = 0; row < 32; ++row) {
            const int m = row / 8, r = row % 8;
            (void)m;
            const uint32_t address = w.lanes[size_t(row)].words[0];
            for (uint32_t pair = 0; pair < 4; ++pair) {
                emulated::Granule& g = block.granules[(address + 4 * pair) / 4];
                if (g.kind == emulated::by_copy) {
                    for (const emulated::Thread* t : w.threads) {
                        emulated::check_visible(*t, g, address + 4 * pair, 15, false, "stmatrix");
                    }
                }
                // Transposed, two lanes write a pair; the first stands for both.
                const int l = TRANSPOSED ? 8 * int(pair) + r / 2 : 4 * r + int(pair);
                const emulated::Thread& t = *w.threads[size_t(l)];
                emulated::check_readers(t, block, address + 4 * pair, 15, "stmatrix");
                g = {t.now(), uint16_t(t.index), 15, emulated::by_thread};
            }
        }
    });
}
}  // namespace detail

inline void load_matrix_x4(uint32_t& r0, uint32_t& r1, uint32_t& r2, uint32_t& r3,
                           uint32_t address) {
    uint32_t r[4];
    detail::load_matrices<false>(r, address);
    r0 = r[0], r1 = r[1], r2 = r[2], r3 = r[3];
}
inline void load_matrix_x4_transposed(uint32_t& r0, uint32_t& r1, uint32_t& r2, uint32_t& r3,
                                      uint32_t address) {
    uint32_t r[4];
    detail::load_matrices<true>(r, address);
    r0 = r[0], r1 = r[1], r2 = r[2], r3 = r[3];
}
inline void store_matrix_x4(uint32_t address, uint32_t r0, uint32_t r1, uint32_t r2, uint32_t r3) {
    detail::store_matrices<false>(address, {r0, r1, r2, r3});
}
inline void store_matrix_x4_transposed(uint32_t address, uint32_t r0, uint32_t r1, uint32_t r2,
                                       uint32_t r3) {
    detail::store_matrices<true>(address, {r0, r1, r2, r3});
}
inline uint32_t transpose_matrix(uint32_t r) {
    emulated::Lane& lane = emulated::own_lane();
    lane.words[0] = r;
    emulated::warp_operation("movmatrix", [](emulated::Warp& w) {
        uint16_t matrix[8][8];
        for (int l = 0; l < 32; ++l) {
            for (int e = 0; e < 2; ++e) {
                matrix[l / 4][2 * (l % 4) + e] = uint16_t(w.lanes[size_t(l)].words[0] >> (16 * e));
            }
        }
        for (int l = 0; l < 32; ++l) {
            const int a = l / 4, b = 2 * (l % 4);
            w.lanes[size_t(l)].words[1] = matrix[b][a] | uint32_t(matrix[b + 1][a]) << 16;
        }
    });
    return lane.words[1];
}

}  // namespace arch
}  // namespace kittens::inline on_cpu
