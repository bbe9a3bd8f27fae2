// wgmma. The 128 threads of a warpgroup issue a product one by one; it exists when all have. Its
// accumulator is kept outside the registers, which hold NaN until each thread waits for the
// product; only then are they written, as on the hardware nothing is promised before.
#pragma once

#include "copies.h"
#include "tensor_core.h"

namespace kittens::inline on_cpu {
namespace emulated {

struct Accumulator {
    int n = 0;
    bool is_half = false;
    std::vector<float> values;             // 64 x n
    std::array<uint32_t*, 128> registers;  // of each thread
    int words() const { return is_half ? n / 4 : n / 2; }
};

struct Product {
    ProductShape shape;
    uint64_t a_descriptor = 0, b_descriptor = 0;
    bool accumulate = false, chained = false;
    int issued = 0;
    std::shared_ptr<Accumulator> accumulator;
    std::vector<std::array<uint32_t, 4>> a_registers;
};

// ---- operands in shared memory ----

// Calls visit(address, outer index, k index) for every 16 bytes of an operand of `outer` x 32
// bytes of K, where the descriptor says it is (PTX ISA, "Asynchronous warpgroup level matrix shared
// memory layout").
template <class Visit>
inline void for_each_chunk(uint64_t descriptor, int outer, bool transposed, int element_bytes,
                           Visit visit) {
    const auto start = static_cast<uint32_t>(descriptor & 0x3fff) << 4;
    const auto leading = static_cast<uint32_t>(descriptor >> 16 & 0x3fff) << 4;
    const auto stride = static_cast<uint32_t>(descriptor >> 32 & 0x3fff) << 4;
    const auto mode = static_cast<int>(descriptor >> 62);
    const int width = mode == 1 ? 128 : mode == 2 ? 64 : mode == 3 ? 32 : 16;
    const int swizzle = mode == 0 ? 0 : width;
    if ((descriptor >> 49 & 7) != 0) fail("wgmma descriptor with a base offset: not supported");
    if (!transposed) {
        // Rows of K: groups of 8 rows lie `stride` apart; without a swizzle, 16 bytes of 8 rows are
        // a block and such blocks lie `leading` apart.
        for (int row = 0; row < outer; ++row) {
            for (int byte = 0; byte < 32; byte += 16) {
                const uint32_t address = start + static_cast<uint32_t>(row / 8) * stride +
                                         static_cast<uint32_t>(row % 8 * width) +
                                         (mode == 0 ? static_cast<uint32_t>(byte / 16) * leading
                                                    : static_cast<uint32_t>(byte));
                visit(swizzled(address, swizzle), row, byte / element_bytes);
            }
        }
        return;
    }
    if (mode == 0) fail("wgmma of a transposed operand without a swizzle: not supported");
    // Rows of M or N, one per k: stripes of the swizzle's width lie `leading` apart, groups of 8 k
    // `stride`.
    for (int k = 0; k < 16; ++k) {
        for (int byte = 0; byte < outer * 2; byte += 16) {
            const uint32_t address = start + static_cast<uint32_t>(byte / width) * leading +
                                     static_cast<uint32_t>(k / 8) * stride +
                                     static_cast<uint32_t>(k % 8 * width) +
                                     static_cast<uint32_t>(byte % width);
            visit(swizzled(address, swizzle), byte / 2, k);
        }
    }
}

// The last writes of what a product reads, checked for every thread that issues it. Each warp's
// part reads its own 16 rows of A, and all of B.
inline void check_operand(Warpgroup& group, uint64_t number, uint64_t descriptor, int outer,
                          bool transposed, Element type, bool is_a, const char* what) {
    Block& block = *self().block;
    if (group.reads.empty()) group.reads.resize(block.copies_from.size());
    group.seen_by_all.resize(machine->clock_entries);
    const auto mark = static_cast<uint32_t>(number + 1);
    group.last_reader = mark;
    for_each_chunk(descriptor, outer, transposed, bytes_of(type), [&](uint32_t a, int row, int) {
        const Place place{&block, a};
        check_shared(place, 16, 16, what);
        auto& reads = group.reads[a / 16];
        if (is_a)
            reads[static_cast<size_t>(row / 16)] = mark;
        else
            reads.fill(mark);
        if (!machine->check_order) return;
        for (uint32_t i = 0; i < 16; i += 4) {
            const Granule& g = block.granules[(a + i) / 4];
            uint32_t& known = group.seen_by_all[g.writer];
            if (g.time <= known) continue;
            for (const Thread* t : group.threads) check_visible(*t, g, a + i, 15, true, what);
            known = g.time;
        }
    });
}

// ---- arithmetic ----

inline void load_operand(const Block& block, uint64_t descriptor, int outer, bool transposed,
                         Element type, float* to, int outer_stride, int k_stride) {
    const int bytes = bytes_of(type);
    for_each_chunk(descriptor, outer, transposed, bytes, [&](uint32_t a, int o, int k) {
        to_floats(type, block.shared + a, 16, to + o * outer_stride + k * k_stride,
                  transposed ? outer_stride : k_stride);
    });
}
inline void execute(Product& p, Warpgroup& group) {
    constexpr int MAX_K = 32;
    static thread_local float a[64 * MAX_K], b[MAX_K * 256];
    const Block& block = *group.threads[0]->block;
    const int n = p.shape.n, k = 32 / bytes_of(p.shape.b);
    load_operand(block, p.b_descriptor, n, p.shape.transpose_b, p.shape.b, b, 1, n);
    if (p.shape.a_in_registers) {
        const int per_word = 4 / bytes_of(p.shape.a);
        for (int t = 0; t < 128; ++t) {
            for (int i = 0; i < 4; ++i) {
                const int row = t / 32 * 16 + t % 32 / 4 + 8 * (i % 2);
                const int col = per_word * (t % 4) + 4 * per_word * (i / 2);
                to_floats(p.shape.a, &p.a_registers[static_cast<size_t>(t)][static_cast<size_t>(i)],
                          4, a + row * k + col, 1);
            }
        }
    } else {
        load_operand(block, p.a_descriptor, 64, p.shape.transpose_a, p.shape.a, a, k, 1);
    }
    std::vector<float>& c = p.accumulator->values;
    if (!p.accumulate) std::fill(c.begin(), c.end(), 0.0f);
    multiply(c.data(), a, b, 64, n, k,
             wgmma_arithmetic(p.shape.a, p.shape.b, p.shape.half_accumulator));
}

// Fragment of the accumulator: calls visit(register, row, column) for the first of each pair.
template <class Visit>
inline void for_each_pair(int thread, int n, Visit visit) {
    const int row = thread / 32 * 16 + thread % 32 / 4, col = 2 * (thread % 4);
    for (int j = 0; j < n / 8; ++j) {
        visit(2 * j, row, 8 * j + col);
        visit(2 * j + 1, row + 8, 8 * j + col);
    }
}
inline void take_registers(Accumulator& acc, int thread) {
    const uint32_t* r = acc.registers[static_cast<size_t>(thread)];
    for_each_pair(thread, acc.n, [&](int pair, int row, int col) {
        float* to = &acc.values[static_cast<size_t>(row * acc.n + col)];
        if (acc.is_half) {
            to[0] = half_to_float(static_cast<uint16_t>(r[pair]));
            to[1] = half_to_float(static_cast<uint16_t>(r[pair] >> 16));
        } else {
            std::memcpy(to, r + 2 * pair, 8);
        }
    });
}
inline void give_registers(const Accumulator& acc, int thread) {
    uint32_t* r = acc.registers[static_cast<size_t>(thread)];
    for_each_pair(thread, acc.n, [&](int pair, int row, int col) {
        const float* from = &acc.values[static_cast<size_t>(row * acc.n + col)];
        if (acc.is_half) {
            const __half2 packed = __floats2half2_rn(from[0], from[1]);
            std::memcpy(r + pair, &packed, 4);
        } else {
            std::memcpy(r + 2 * pair, from, 8);
        }
    });
}

// ---- issue, execution, wait ----

uint64_t describe_operand(uint32_t shared_address, int leading_bytes, int stride_bytes,
                          int swizzle_bytes) {
    const uint64_t mode = swizzle_bytes == 128  ? 1
                          : swizzle_bytes == 64 ? 2
                          : swizzle_bytes == 32 ? 3
                                                : 0;
    if (shared_address % 16 != 0 || leading_bytes % 16 != 0 || stride_bytes % 16 != 0 ||
        leading_bytes >= 1 << 18 || stride_bytes >= 1 << 18) {
        fail("wgmma_descriptor: address " + hex(shared_address) + ", leading " +
             std::to_string(leading_bytes) + " and stride " + std::to_string(stride_bytes) +
             " bytes must be multiples of 16, the latter below 2^18");
    }
    return static_cast<uint64_t>((shared_address & 0x3FFFF) >> 4) |
           (static_cast<uint64_t>(leading_bytes >> 4) << 16) |
           (static_cast<uint64_t>(stride_bytes >> 4) << 32) | (mode << 62);
}
void fence_products() { self().products_fenced = true; }

inline bool product_can_execute(const Warpgroup& group) {
    const uint64_t next = group.executed;
    return next < group.first + group.products.size() &&
           group.products[next - group.first]->issued == 128;
}
inline bool execute_next_product(Warpgroup& group) {
    if (!product_can_execute(group)) return false;
    execute(*group.products[group.executed - group.first], group);
    ++group.executed;
    ++machine->progress;
    for (Thread* t : group.threads) {
        if (t->waiting.kind == Wait::products && t->waiting.value <= group.executed) make_ready(t);
    }
    return true;
}

void issue_product(const ProductShape& shape, uint32_t* d, const uint32_t* a, uint64_t a_descriptor,
                   uint64_t b_descriptor, bool accumulate) {
    Thread& t = self();
    Warpgroup& group = warpgroup_of(t);
    if (group.threads.size() != 128) fail("wgmma needs a whole warpgroup of 128 threads");
    const auto lane = static_cast<size_t>(t.id % 128);
    const uint64_t number = t.products++;
    if (number >= group.first + group.products.size()) {
        auto p = std::make_shared<Product>();
        p->shape = shape;
        p->a_descriptor = a_descriptor;
        p->b_descriptor = b_descriptor;
        p->accumulate = accumulate;
        if (shape.a_in_registers) p->a_registers.resize(128);
        group.products.push_back(std::move(p));
    }
    Product& p = *group.products[number - group.first];
    if (p.shape != shape || p.b_descriptor != b_descriptor || p.accumulate != accumulate ||
        p.a_descriptor != a_descriptor) {
        fail(
            "the warpgroup diverges: this thread issues another wgmma than the others (shape, "
            "descriptor or scale of the accumulator)");
    }
    // A product on registers that are in flight continues the earlier one.
    auto used = std::find_if(t.in_flight.begin(), t.in_flight.end(),
                             [&](const auto& f) { return f.accumulator->registers[lane] == d; });
    const bool chained = used != t.in_flight.end();
    if (!t.products_fenced && (!chained || shape.a_in_registers)) {
        fail("wgmma without wgmma_fence since the thread could last access its registers");
    }
    if (chained &&
        (used->accumulator->n != shape.n || used->accumulator->is_half != shape.half_accumulator)) {
        fail("wgmma of another shape on an accumulator that is in flight");
    }
    if (p.issued == 0) {
        p.chained = chained;
        if (chained) {
            p.accumulator = used->accumulator;
        } else {
            p.accumulator = std::make_shared<Accumulator>();
            p.accumulator->n = shape.n;
            p.accumulator->is_half = shape.half_accumulator;
            p.accumulator->values.resize(static_cast<size_t>(64 * shape.n));
        }
    } else if (p.chained != chained || (chained && p.accumulator != used->accumulator)) {
        fail("the warpgroup diverges: this thread's wgmma uses another accumulator");
    }
    if (chained) {
        used->last = number;
    } else {
        p.accumulator->registers[lane] = d;
        if (accumulate) take_registers(*p.accumulator, static_cast<int>(lane));
        std::memset(d, 0xff, static_cast<size_t>(p.accumulator->words()) * 4);
        t.in_flight.push_back({p.accumulator, number});
    }
    if (shape.a_in_registers) {
        std::memcpy(p.a_registers[lane].data(), a, 16);
        t.held_operands.push_back({a, p.a_registers[lane], number});
    }
    if (++p.issued < 128) return;
    if (!shape.a_in_registers) {
        check_operand(group, number, a_descriptor, 64, shape.transpose_a, shape.a, true,
                      "wgmma reading A");
    }
    check_operand(group, number, b_descriptor, shape.n, shape.transpose_b, shape.b, false,
                  "wgmma reading B");
    if (machine->options->policy == Policy::eager) {
        while (execute_next_product(group)) {
        }
    }
    // Those that wait for products until all threads have issued them get another look.
    for (Thread* other : group.threads) {
        if (other->waiting.kind == Wait::products && other->waiting.value <= group.executed) {
            make_ready(other);
        }
    }
}

void commit_products() {
    Thread& t = self();
    Warpgroup& group = warpgroup_of(t);
    const uint64_t number = t.commits++;
    if (number >= group.commits.size()) group.commits.push_back(t.products);
    if (group.commits[number] != t.products) {
        fail("the warpgroup diverges: wgmma_commit after " + std::to_string(t.products) +
             " products here, after " + std::to_string(group.commits[number]) +
             " in other threads");
    }
}

inline void check_held_operands(Thread& t, uint64_t until) {
    std::erase_if(t.held_operands, [&](const Thread::HeldOperand& held) {
        if (held.product >= until) return false;
        if (std::memcmp(held.registers, held.value.data(), 16) != 0) {
            fail("registers that are operand A of a wgmma in flight were written before its wait");
        }
        return true;
    });
}

void wait_for_products(uint64_t pending) {
    Thread& t = self();
    Warpgroup& group = warpgroup_of(t);
    t.products_fenced = false;
    if (t.commits <= pending) return;
    const uint64_t until = group.commits[t.commits - pending - 1];
    while (group.executed < until) {
        wait_for({.kind = Wait::products, .object = &group, .value = until});
    }
    check_held_operands(t, until);
    const auto lane = t.id % 128;
    std::erase_if(t.in_flight, [&](const Thread::InFlight& f) {
        if (f.last >= until) return false;
        if (f.accumulator->registers[static_cast<size_t>(lane)] <
            static_cast<const void*>(__builtin_frame_address(0))) {
            fail("the accumulator of a wgmma has gone out of scope before its wait");
        }
        give_registers(*f.accumulator, lane);
        return true;
    });
    // This warp's part is over; of the others' it is not known.
    const auto over = static_cast<uint32_t>(until);
    Warp& warp = warp_of(t);
    warp.products_waited = std::max(warp.products_waited, over);
    if (machine->check_order) {
        const size_t entry = machine->product_entry(*t.block, static_cast<size_t>(t.warp));
        uint32_t& known = t.clock.seen[entry];
        known = std::max(known, over);
        t.clock.change_version(uint64_t(over) << 32 | entry);
    }
    group.acknowledged = std::max(group.acknowledged, until);
    while (!group.products.empty() && group.first < group.acknowledged &&
           group.first < group.executed) {
        group.products.pop_front();
        ++group.first;
    }
}

}  // namespace emulated
}  // namespace kittens::inline on_cpu
