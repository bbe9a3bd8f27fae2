// The mistakes that are planted, by the kernel that has a switch for them.
#pragma once

#include "kittens.cuh"

namespace defects {

using namespace kittens;

enum class Defect {
    none,
    // product_kernel
    missing_full_wait,
    wrong_phase,
    early_release,
    missing_empty_wait,
    expect_too_few_bytes,
    expect_too_many_bytes,
    missing_mma_wait,
    missing_accumulator_fence,
    missing_commit,
    wrong_swizzle,
    swapped_transpose,
    wrong_tile_coordinate,
    misaligned_coordinate,
    lost_arrive,
    too_many_arrivals,
    missing_init_fence,
    missing_init_barrier,
    missing_store_fence,
    store_without_read_wait,
    too_many_registers,
    registers_of_one_block,
    registers_past_launch,
    wrong_barrier_count,
    early_access_to_global_memory,
    diverging_warpgroup,
    // operand_kernel
    missing_operand_fence,
    missing_operand_barrier,
    operand_written_in_flight,
    tile_written_in_flight,
    // exchange_kernel
    missing_block_barrier,
    missing_warp_barrier,
    diverging_shuffle,
    missing_cp_async_wait,
    tall_grid,
    global_store_out_of_bounds,
    shared_store_out_of_bounds,
    misaligned_load,
    store_into_input,
    // cluster_kernel
    missing_cluster_barrier,
    missing_exit_barrier,
    relaxed_release,
    wrong_multicast_mask,
    // turns_kernel
    lost_turn,
    // segments_kernel
    tile_before_segment,
    segment_beyond_rows,
    wrong_segment,
    // reuse_kernel
    store_before_others_have_read,
    store_before_other_lanes_have_read,
    cp_async_before_others_have_read,
    arrival_before_other_lanes_have_read,
    arrival_of_half_the_warps,
    store_before_a_copy_has_read,
    stmatrix_before_ldmatrix,
    // remote_kernel
    message_taken_by_a_relaxed_arrival,
    store_before_the_peer_has_read,
    store_before_the_peer_has_copied,
    block_ends_before_its_copy,
    // parts_kernel
    rows_of_another_warp,
    operand_before_all_parts_are_over,
    one_part_tells_of_all,
    // ring_kernel
    stage_of_one_block,
    stage_of_a_product_in_flight,
    count
};

}  // namespace defects
