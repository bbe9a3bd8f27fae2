// Operations of a warp on fragments: ldmatrix and stmatrix, between shared memory and registers,
// and mma.sync. The files of these instructions beside machine/ say who holds what.
#pragma once

#include "shadow.h"
#include "tensor_core.h"

namespace kittens::inline on_cpu {
namespace emulated {

inline void check_row(uint32_t address, const char* what) {
    check_shared(place_of(address), 16, 16, what);
}
void load_matrices(uint32_t (&out)[4], uint32_t address, bool transposed) {
    const char* what = "ldmatrix";
    check_row(address, what);
    Lane& lane = own_lane();
    lane.words[0] = address;
    run_in_warp(transposed ? "ldmatrix.trans" : "ldmatrix", [transposed](Warp& w) {
        uint16_t matrix[4][8][8];
        for (int l = 0; l < 32; ++l) {
            const Place p{w.threads[0]->block, w.lanes[size_t(l)].words[0]};
            std::memcpy(matrix[l / 8][l % 8], p.block->shared + p.address, 16);
        }
        for (int l = 0; l < 32; ++l) {
            for (int m = 0; m < 4; ++m) {
                const int a = l / 4, b = 2 * (l % 4);
                const uint32_t low = transposed ? matrix[m][b][a] : matrix[m][a][b];
                const uint32_t high = transposed ? matrix[m][b + 1][a] : matrix[m][a][b + 1];
                w.lanes[size_t(l)].words[4 + m] = low | high << 16;
            }
        }
        if (!machine->check_order) return;
        // Each lane reads parts of the rows of eight lanes; rows that were written at once are
        // checked once.
        Granule last{};
        Block& block = *w.threads[0]->block;
        for (size_t row = 0; row < 32; ++row) {
            const uint32_t address = w.lanes[row].words[0];
            for_each_granule(address, 16, [&](uint32_t a, uint8_t mask) {
                // Transposed, two lanes read a pair; the first stands for both.
                const size_t pair = (a - address) / 4, r = row % 8;
                const Thread& reader = *w.threads[transposed ? 8 * pair + r / 2 : 4 * r + pair];
                add_reader(block, a, mask, reader, size_t(reader.index), reader.now());
                const Granule& g = block.granules[a / 4];
                if (g.kind == last.kind && g.writer == last.writer && g.time == last.time) return;
                last = g;
                for (const Thread* t : w.threads) {
                    check_visible(*t, g, a, mask, false, "ldmatrix");
                }
            });
        }
    });
    for (int m = 0; m < 4; ++m) out[m] = lane.words[4 + m];
}
void store_matrices(uint32_t address, const uint32_t (&in)[4], bool transposed) {
    const char* what = "stmatrix";
    check_row(address, what);
    Lane& lane = own_lane();
    lane.words[0] = address;
    for (int m = 0; m < 4; ++m) lane.words[4 + m] = in[m];
    run_in_warp(transposed ? "stmatrix.trans" : "stmatrix", [transposed](Warp& w) {
        Block& block = *w.threads[0]->block;
        for (int row = 0; row < 32; ++row) {
            uint16_t values[8];
            const int m = row / 8, r = row % 8;
            for (int c = 0; c < 8; ++c) {
                const int l = transposed ? 4 * c + r / 2 : 4 * r + c / 2;
                const uint32_t word = w.lanes[size_t(l)].words[4 + m];
                values[c] = uint16_t(word >> (16 * ((transposed ? r : c) % 2)));
            }
            const uint32_t address = w.lanes[size_t(row)].words[0];
            check_not_being_read({&block, address}, 16, "stmatrix");
            std::memcpy(block.shared + address, values, 16);
        }
        if (!machine->check_order) return;
        for (int row = 0; row < 32; ++row) {
            const int r = row % 8;
            const uint32_t address = w.lanes[size_t(row)].words[0];
            for (uint32_t pair = 0; pair < 4; ++pair) {
                Granule& g = block.granules[(address + 4 * pair) / 4];
                if (g.kind == by_copy) {
                    for (const Thread* t : w.threads) {
                        check_visible(*t, g, address + 4 * pair, 15, false, "stmatrix");
                    }
                }
                // Transposed, two lanes write a pair; the first stands for both.
                const int l = transposed ? 8 * int(pair) + r / 2 : 4 * r + int(pair);
                const Thread& t = *w.threads[size_t(l)];
                check_readers(t, block, address + 4 * pair, 15, "stmatrix");
                g = {t.now(), uint16_t(t.index), 15, by_thread};
            }
        }
    });
}

// ---- mma.sync ----

// C and D of a lane's fragment: its `i`-th pair, as floats, or packed as halves.
inline void load_pair(const uint32_t* c, int i, bool in_half, float* to) {
    if (in_half)
        to_floats(Element::half, c + i, 4, to, 1);
    else
        std::memcpy(to, c + 2 * i, 8);
}
inline void store_pair(uint32_t* d, int i, bool in_half, const float* from) {
    if (in_half) {
        const __half2 packed = __floats2half2_rn(from[0], from[1]);
        std::memcpy(d + i, &packed, 4);
    } else {
        std::memcpy(d + 2 * i, from, 8);
    }
}
// A lane's words 0-3 are A, 4-5 B, 6-9 C and then D, all as the instruction has them.
inline void multiply_lanes(Warp& w, Element a_type, Element b_type, bool in_half) {
    const int per_word = 4 / bytes_of(a_type), K = 8 * per_word;
    const Arithmetic half_arithmetic{Element::half, Element::half, 25, 23, in_half};
    const Arithmetic arithmetic{a_type, b_type, 25, 23, in_half};
    float a[16 * 32], b[32 * 8], c[16 * 8];
    for (int l = 0; l < 32; ++l) {
        const uint32_t* words = w.lanes[size_t(l)].words;
        for (int i = 0; i < 4; ++i) {
            const int row = l / 4 + 8 * (i % 2), k = per_word * (l % 4) + 4 * per_word * (i / 2);
            to_floats(a_type, words + i, 4, a + row * K + k, 1);
        }
        for (int i = 0; i < 2; ++i) {
            const int k = per_word * (l % 4) + 4 * per_word * i;
            to_floats(b_type, words + 4 + i, 4, b + k * 8 + l / 4, 8);
        }
        for (int i = 0; i < 2; ++i)
            load_pair(words + 6, i, in_half, c + (l / 4 + 8 * i) * 8 + 2 * (l % 4));
    }
    if (per_word == 2) {
        multiply(c, a, b, 16, 8, K, arithmetic);
    } else {
        float part_a[16 * 16], part_b[16 * 8], sum[16 * 8]{};
        for (int part = 0; part < 2; ++part) {
            for (int k = 0; k < 16; ++k) {
                const int from = k / 2 * 4 + 2 * part + k % 2;
                for (int i = 0; i < 16; ++i) part_a[i * 16 + k] = a[i * K + from];
                for (int j = 0; j < 8; ++j) part_b[k * 8 + j] = b[from * 8 + j];
            }
            multiply(sum, part_a, part_b, 16, 8, 16, half_arithmetic);
        }
        for (int i = 0; i < 16 * 8; ++i) {
            c[i] += sum[i];
            if (c[i] != c[i]) c[i] = std::bit_cast<float>(0x7fffffffu);
        }
    }
    for (int l = 0; l < 32; ++l) {
        for (int i = 0; i < 2; ++i) {
            store_pair(w.lanes[size_t(l)].words + 6, i, in_half,
                       c + (l / 4 + 8 * i) * 8 + 2 * (l % 4));
        }
    }
}
void multiply_fragments(uint32_t* d, const uint32_t* a, const uint32_t* b, const uint32_t* c,
                        Element a_type, Element b_type, bool in_half) {
    Lane& lane = own_lane();
    const size_t bytes = in_half ? 8 : 16;
    std::memcpy(lane.words, a, 16);
    std::memcpy(lane.words + 4, b, 8);
    std::memcpy(lane.words + 6, c, bytes);
    run_in_warp("mma.sync", [=](Warp& w) { multiply_lanes(w, a_type, b_type, in_half); });
    std::memcpy(d, lane.words + 6, bytes);
}

}  // namespace emulated
}  // namespace kittens::inline on_cpu
