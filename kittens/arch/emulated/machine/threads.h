// What a thread asks about itself, its block and its cluster, static shared memory, and the
// operations of all lanes of a warp that are no more than an exchange of words.
#pragma once

#include "barriers.h"

namespace kittens::inline on_cpu {
namespace emulated {

uint8_t* own_shared_memory() { return self().block->shared; }
uint32_t dynamic_shared_bytes() { return machine->grid->shared_bytes; }
uint32_t shared_address(const void* pointer) {
    const Block& block = *self().block;
    const auto offset = static_cast<const uint8_t*>(pointer) - block.shared;
    if (offset < 0 || offset > static_cast<std::ptrdiff_t>(block.shared_end)) {
        fail("an object that should lie in the block's shared memory lies outside: at " +
             std::to_string(offset) + " of " + std::to_string(block.shared_end) + " bytes");
    }
    return static_cast<uint32_t>(offset);
}
void wait_for_dependencies() {
    Cluster& m = *machine;
    if (!m.check_order) return;
    self().clock.seen[m.dependency_entry()] = 1;
    self().clock.change_version(~uint64_t(1));
}

uint32_t cluster_rank() { return static_cast<uint32_t>(self().block->rank); }
uint32_t cluster_size() { return static_cast<uint32_t>(machine->blocks.size()); }
uint32_t map_shared_rank(uint32_t address, uint32_t rank) {
    if (rank >= cluster_size()) {
        fail("map_shared_rank to block " + std::to_string(rank) + " of a cluster of " +
             std::to_string(cluster_size()));
    }
    return address % SHARED_WINDOW + SHARED_WINDOW * (rank + 1);
}

// ---- static shared memory ----

// Behind the dynamic one, as threads come to need it.
inline uint32_t reserve_static_shared(Block& block, size_t bytes, size_t alignment) {
    const auto unit = static_cast<uint32_t>(std::max<size_t>(alignment, 16));
    const uint32_t address = (block.shared_end + unit - 1) / unit * unit;
    const uint32_t end = address + static_cast<uint32_t>((bytes + 15) / 16 * 16);
    const uint32_t dynamic_end = SHARED_BASE + machine->grid->shared_bytes;
    if (end > dynamic_end + MAX_STATIC_SHARED || end > SHARED_BASE + MAX_BLOCK_SHARED) {
        fail("static_shared: " + std::to_string(end - dynamic_end) +
             " bytes beside the dynamic shared memory of " +
             std::to_string(machine->grid->shared_bytes) + "; the limit is 48 KiB, and 227 in all");
    }
    block.shared_end = end;
    return address;
}

void* static_shared(const void* key, size_t bytes, size_t alignment) {
    Block& block = *self().block;
    const auto [at, is_new] = block.statics.try_emplace(key, 0u);
    if (is_new) at->second = reserve_static_shared(block, bytes, alignment);
    return block.shared + at->second;
}

// ---- warps ----

void warp_operation(const char* name, void (*compute)(Lane* lanes)) {
    run_in_warp(name, [compute](Warp& w) { compute(w.lanes.data()); });
}
bool elect_one() {
    run_in_warp("elect_one", [](Warp&) {});
    return self().lane == 0;
}
void shuffle(const char* name, void* value, uint32_t bytes, int argument,
             int (*source)(int lane, int argument)) {
    Lane& lane = own_lane();
    std::memcpy(lane.words, value, bytes);
    lane.words[2] = static_cast<uint32_t>(argument);
    run_in_warp(name, [source](Warp& w) {
        for (int l = 0; l < 32; ++l) {
            Lane& to = w.lanes[size_t(l)];
            const Lane& from = w.lanes[size_t(source(l, static_cast<int>(to.words[2])))];
            to.words[4] = from.words[0];
            to.words[5] = from.words[1];
        }
    });
    std::memcpy(value, lane.words + 4, bytes);
}

}  // namespace emulated
}  // namespace kittens::inline on_cpu
