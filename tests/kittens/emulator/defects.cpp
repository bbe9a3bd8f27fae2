// Runs the kernels of defects.cuh and reuse.cuh on the emulator:
//   defects <defect> <policy> <seeds>    one line per seed: "right", "wrong values" or the error
//   defects                              the names of the defects, with their kernel's
#include "defects.cuh"
#include "reuse.cuh"
#include "ring.cuh"

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

#include "arch/emulated/machine/options.h"

using namespace defects;
namespace emu = kittens::emulated;

namespace {

struct Name {
    const char* name;
    const char* kernel;
};
constexpr Name NAMES[] = {
    {"none", "all"},
    {"missing_full_wait", "product"},
    {"wrong_phase", "product"},
    {"early_release", "product"},
    {"missing_empty_wait", "product"},
    {"expect_too_few_bytes", "product"},
    {"expect_too_many_bytes", "product"},
    {"missing_mma_wait", "product"},
    {"missing_accumulator_fence", "product"},
    {"missing_commit", "product"},
    {"wrong_swizzle", "product"},
    {"swapped_transpose", "product"},
    {"wrong_tile_coordinate", "product"},
    {"misaligned_coordinate", "product"},
    {"lost_arrive", "product"},
    {"too_many_arrivals", "product"},
    {"missing_init_fence", "product"},
    {"missing_init_barrier", "product"},
    {"missing_store_fence", "product"},
    {"store_without_read_wait", "product"},
    {"too_many_registers", "product"},
    {"registers_of_one_block", "product"},
    {"registers_past_launch", "product"},
    {"wrong_barrier_count", "product"},
    {"early_access_to_global_memory", "product"},
    {"diverging_warpgroup", "product"},
    {"missing_operand_fence", "operand"},
    {"missing_operand_barrier", "operand"},
    {"operand_written_in_flight", "operand"},
    {"tile_written_in_flight", "operand"},
    {"missing_block_barrier", "exchange"},
    {"missing_warp_barrier", "exchange"},
    {"diverging_shuffle", "exchange"},
    {"missing_cp_async_wait", "exchange"},
    {"tall_grid", "exchange"},
    {"global_store_out_of_bounds", "exchange"},
    {"shared_store_out_of_bounds", "exchange"},
    {"misaligned_load", "exchange"},
    {"store_into_input", "exchange"},
    {"missing_cluster_barrier", "cluster"},
    {"missing_exit_barrier", "cluster"},
    {"relaxed_release", "cluster"},
    {"wrong_multicast_mask", "cluster"},
    {"lost_turn", "turns"},
    {"tile_before_segment", "segments"},
    {"segment_beyond_rows", "segments"},
    {"wrong_segment", "segments"},
    {"store_before_others_have_read", "reuse"},
    {"store_before_other_lanes_have_read", "reuse"},
    {"cp_async_before_others_have_read", "reuse"},
    {"arrival_before_other_lanes_have_read", "reuse"},
    {"arrival_of_half_the_warps", "reuse"},
    {"store_before_a_copy_has_read", "reuse"},
    {"stmatrix_before_ldmatrix", "reuse"},
    {"message_taken_by_a_relaxed_arrival", "remote"},
    {"store_before_the_peer_has_read", "remote"},
    {"store_before_the_peer_has_copied", "remote"},
    {"block_ends_before_its_copy", "remote"},
    {"rows_of_another_warp", "parts"},
    {"operand_before_all_parts_are_over", "parts"},
    {"one_part_tells_of_all", "parts"},
    {"stage_of_one_block", "ring"},
    {"stage_of_a_product_in_flight", "ring"},
};
static_assert(std::size(NAMES) == std::size_t(Defect::count));

template <class T>
void region(const char* name, std::vector<T>& v, bool writable) {
    emu::options.regions.push_back({v.data(), v.size() * sizeof(T), name, writable});
}
template <class T>
std::vector<T> nan(std::size_t n) {
    std::vector<T> v(n);
    std::memset(static_cast<void*>(v.data()), 0xff, n * sizeof(T));
    return v;
}
std::vector<bf16> integers(std::size_t n, unsigned seed) {
    std::vector<bf16> v(n);
    for (auto& x : v) {
        seed = seed * 1664525u + 1013904223u;
        x = __float2bfloat16(float(int(seed >> 24) % 5 - 2));
    }
    return v;
}

template <Defect D>
bool run_product() {
    constexpr int M = 128, N = 128, K = 64 * STEPS;
    auto a = integers(M * K, 1), b = integers(K * N, 2), c = nan<bf16>(M * N);
    region("a", a, false);
    region("b", b, false);
    region("c", c, true);
    const ProductGlobals g{{a.data(), nullptr, nullptr, M, K},
                           {b.data(), nullptr, nullptr, K, N},
                           {c.data(), nullptr, nullptr, M, N}};
    const int blocks = D == Defect::registers_of_one_block ? 2 : 1;
    launch(LaunchOptions{.dependent = true, .blocks_per_sm = blocks}, product_kernel<D>, 1, 384, 1,
           sizeof(ProductShared) + 1024, nullptr, g);
    for (int i = 0; i < M; ++i) {
        for (int j = 0; j < N; ++j) {
            float sum = 0;
            for (int k = 0; k < K; ++k) sum += float(a[i * K + k]) * float(b[k * N + j]);
            if (!(float(c[i * N + j]) == float(__float2bfloat16(sum)))) return false;
        }
    }
    return true;
}
template <Defect D>
bool run_operand() {
    auto a = integers(64 * 64, 3), b = integers(64 * 64, 4);
    auto c = nan<float>(64 * 64);
    region("a", a, false);
    region("b", b, false);
    region("c", c, true);
    const OperandGlobals g{{a.data(), nullptr, nullptr, nullptr, nullptr},
                           {b.data(), nullptr, nullptr, nullptr, nullptr},
                           {c.data(), nullptr, nullptr, nullptr, nullptr}};
    launch(operand_kernel<D>, 1, 128, 1, sizeof(OperandShared) + 1024, nullptr, g);
    for (int i = 0; i < 64; ++i) {
        for (int j = 0; j < 64; ++j) {
            float sum = 0;
            for (int k = 0; k < 64; ++k) sum += float(a[i * 64 + k]) * float(b[k * 64 + j]);
            if (!(c[i * 64 + j] == 2 * sum)) return false;
        }
    }
    return true;
}
template <Defect D>
bool run_exchange() {
    std::vector<float> in(256), out = nan<float>(256);
    for (int i = 0; i < 256; ++i) in[i] = float(i);
    region("in", in, false);
    region("out", out, true);
    launch(exchange_kernel<D>, dim3(1, D == Defect::tall_grid ? 65536 : 1), 256, 1, 0, nullptr,
           ExchangeGlobals{in.data(), out.data(), 256});
    for (int i = 0; i < 256; ++i) {
        if (!(out[i] == float(255 - (i ^ 1)) + float(255 - (i ^ 3)))) return false;
    }
    return true;
}
template <Defect D>
bool run_cluster() {
    std::vector<float> in(256), out = nan<float>(512);
    for (int i = 0; i < 256; ++i) in[i] = float(i + 1);
    region("in", in, false);
    region("out", out, true);
    const ClusterGlobals g{{in.data(), nullptr, nullptr, 1, nullptr}, out.data()};
    launch(cluster_kernel<D>, 2, 256, 2, sizeof(ClusterShared) + 1024, nullptr, g);
    for (int i = 0; i < 512; ++i) {
        const int at = i % 256;
        if (!(out[i] == float(at + 1) + 1.0f + float(1 - i / 256) + float(256 - at))) return false;
    }
    return true;
}
template <Defect D>
bool run_turns() {
    std::vector<int> numbers(3);
    region("numbers", numbers, true);
    emu::options.host_threads = 2;
    launch(turns_kernel<D>, TURN_BLOCKS, 32 * TURN_WARPS, 1, 0, nullptr,
           TurnGlobals{&numbers[0], &numbers[1], &numbers[2]});
    emu::options.host_threads = 1;
    int expected = 0;
    for (int i = 0; i < TURN_BLOCKS * TURN_WARPS; ++i) expected = 3 * expected + i;
    return numbers[2] == expected;
}
template <Defect D>
bool run_segments() {
    constexpr int rows = SEGMENTS[3];
    auto in = integers(rows * 64, 5), out = nan<bf16>((rows + 16) * 64);
    region("in", in, false);
    region("out", out, true);
    const SegmentGlobals g{{in.data(), 1, rows, 64, {rows * 64, 64}},
                           {out.data(), 1, rows, 64, {rows * 64, 64}}};
    launch(segments_kernel<D>, 1, 32, 1, sizeof(segment_tile) + 2048, nullptr, g);
    return std::memcmp(in.data(), out.data(), in.size() * sizeof(bf16)) == 0;
}

template <Defect D>
bool run_reuse() {
    std::vector<float> in(256), out = nan<float>(256), copy = nan<float>(256);
    for (int i = 0; i < 256; ++i) in[i] = float(i);
    region("in", in, false);
    region("out", out, true);
    region("copy", copy, true);
    launch(reuse_kernel<D>, 1, 256, 1, sizeof(ReuseShared) + 1024, nullptr,
           ReuseGlobals{in.data(), out.data(), copy.data()});
    for (int i = 0; i < 256; ++i) {
        const float matrices = i < 128 ? float(2 * ((i / 32 + 1) % 4 + 1)) : 0.f;
        const auto swapped = [](int at) { return float(at / 32 == 6 ? 255 - at : at); };
        const int at = 255 - i;
        const float threads = swapped(at % 2 == 1 ? at ^ 1 : at) + float(at);
        if (!(out[i] == threads + float(255 - i) + matrices && copy[i] == float(2 * i))) {
            return false;
        }
    }
    return true;
}
template <Defect D>
bool run_remote() {
    auto out = nan<float>(512);
    region("out", out, true);
    launch(remote_kernel<D>, 2, 256, 2, sizeof(RemoteShared) + 1024, nullptr, out.data());
    for (int i = 0; i < 512; ++i) {
        const int rank = i / 256, at = i % 256;
        const float messages = rank == 1 && at == 0 ? 3.f : 0.f;
        if (!(out[i] == messages + float(255 - at + 1 - rank) + 1.f)) return false;
    }
    return true;
}
template <Defect D>
bool run_parts() {
    auto a = integers(64 * 64, 3), b = integers(64 * 64, 4);
    auto c = nan<float>(64 * 64);
    region("a", a, false);
    region("b", b, false);
    region("c", c, true);
    const PartsGlobals g{{a.data(), nullptr, nullptr, nullptr, nullptr},
                         {b.data(), nullptr, nullptr, nullptr, nullptr},
                         {c.data(), nullptr, nullptr, nullptr, nullptr}};
    launch(parts_kernel<D>, 1, PARTS_THREADS, 1, sizeof(PartsShared) + 1024, nullptr, g);
    for (int i = 0; i < 64; ++i) {
        for (int j = 0; j < 64; ++j) {
            float sum = 0;
            for (int k = 0; k < 64; ++k) sum += float(a[i * 64 + k]) * float(b[k * 64 + j]);
            if (!(c[i * 64 + j] == 2 * sum)) return false;
        }
    }
    return true;
}
template <Defect D>
bool run_ring() {
    auto a = integers(64 * 64, 3), b = integers(RING_STEPS * 64 * 64, 4);
    auto c = nan<float>(128 * 64);
    region("a", a, false);
    region("b", b, false);
    region("c", c, true);
    const RingGlobals g{{a.data(), nullptr, nullptr, nullptr, nullptr},
                        {b.data(), nullptr, nullptr, RING_STEPS * 64, nullptr},
                        {c.data(), nullptr, nullptr, nullptr, nullptr}};
    launch(ring_kernel<D>, 2, RING_THREADS, 2, sizeof(RingShared) + 1024, nullptr, g);
    for (int i = 0; i < 128; ++i) {
        for (int j = 0; j < 64; ++j) {
            float sum = 0;
            for (int k = 0; k < RING_STEPS * 64; ++k) {
                sum += float(a[i % 64 * 64 + k % 64]) * float(b[k * 64 + j]);
            }
            if (!(c[i * 64 + j] == sum)) return false;
        }
    }
    return true;
}

template <Defect D>
bool run() {
    const std::string kernel = NAMES[int(D)].kernel;
    const bool all = kernel == "all";
    if (all || kernel == "product") {
        if (!run_product<D>()) return false;
    }
    emu::options.regions.clear();
    if (all || kernel == "operand") {
        if (!run_operand<D>()) return false;
    }
    emu::options.regions.clear();
    if (all || kernel == "exchange") {
        if (!run_exchange<D>()) return false;
    }
    emu::options.regions.clear();
    if (all || kernel == "cluster") {
        if (!run_cluster<D>()) return false;
    }
    emu::options.regions.clear();
    if (all || kernel == "turns") {
        if (!run_turns<D>()) return false;
    }
    emu::options.regions.clear();
    if (all || kernel == "segments") {
        if (!run_segments<D>()) return false;
    }
    emu::options.regions.clear();
    if (all || kernel == "reuse") {
        if (!run_reuse<D>()) return false;
    }
    emu::options.regions.clear();
    if (all || kernel == "remote") {
        if (!run_remote<D>()) return false;
    }
    emu::options.regions.clear();
    if (all || kernel == "parts") {
        if (!run_parts<D>()) return false;
    }
    emu::options.regions.clear();
    if (all || kernel == "ring") return run_ring<D>();
    return true;
}

template <std::size_t... i>
bool run_named(const std::string& name, std::index_sequence<i...>) {
    bool right = false;
    (void)((name == NAMES[i].name ? (right = run<Defect(i)>(), true) : false) || ...);
    return right;
}

}  // namespace

int main(int count, char** arguments) {
    if (count < 4) {
        for (const Name& n : NAMES) std::printf("%s %s\n", n.name, n.kernel);
        return 0;
    }
    for (int seed = 0; seed < std::atoi(arguments[3]); ++seed) {
        emu::Options options;
        for (const auto p : {emu::Policy::on_wait, emu::Policy::late_mma, emu::Policy::eager,
                             emu::Policy::random}) {
            if (std::string(arguments[2]) == emu::name_of(p)) options.policy = p;
        }
        options.seed = static_cast<uint64_t>(seed);
        const emu::OptionsScope scope(options);
        try {
            const bool right =
                run_named(arguments[1], std::make_index_sequence<std::size(NAMES)>());
            std::puts(right ? "right" : "wrong values");
        } catch (const emu::Deadlock& error) {
            std::string text = error.what();
            for (char& c : text) c = c == '\n' ? '|' : c;
            std::printf("deadlock: %s\n", text.c_str());
        } catch (const std::exception& error) {
            std::printf("error: %s\n", error.what());
        }
    }
}
