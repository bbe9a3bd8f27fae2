// Runs the kernels of flags.cuh on the emulator, as defects.cpp does those of defects.cuh. Each is
// launched twice on the same memory, as a replayed graph does.
#include "flags.cuh"

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
    {"missing_barrier_before_release", "handover"},
    {"missing_barrier_after_acquire", "handover"},
    {"missing_acquire", "handover"},
    {"released_too_early", "handover"},
    {"flag_left_set", "handover"},
    {"missing_release_fence", "counter"},
    {"missing_acquire_fence", "counter"},
    {"miscounted", "counter"},
    {"counter_left_set", "counter"},
    {"missing_proxy_fence", "stores"},
    {"fence_of_shared_memory", "stores"},
    {"missing_store_wait", "copies"},
    {"wait_for_reads_only", "copies"},
    {"two_writers", "sums"},
    {"addition_before_store", "sums"},
    {"copy_onto_addition", "sums"},
    {"overlapping_copies_differ", "overlap"},
    {"store_differs_from_copy", "store below copy"},
};
static_assert(std::size(NAMES) == std::size_t(Defect::count));

struct Memory {
    std::vector<float> in = std::vector<float>(256), work = std::vector<float>(256),
                       out = std::vector<float>(256);
    std::vector<int> flags = std::vector<int>(4);

    Memory() {
        for (int i = 0; i < 256; ++i) in[i] = float(i);
        const auto region = [](const char* name, auto& v, bool writable) {
            emu::options.regions.push_back({v.data(), v.size() * 4, name, writable});
        };
        emu::options.regions.clear();
        region("in", in, false);
        region("work", work, true);
        region("out", out, true);
        region("flags", flags, true);
    }
    FlagGlobals globals() { return {in.data(), work.data(), out.data(), flags.data()}; }
};

// `expected`: of out[i].
template <class Launch, class Expected>
bool twice(int values, Launch launch, Expected expected) {
    Memory memory;
    for (int turn = 0; turn < 2; ++turn) {
        std::memset(static_cast<void*>(memory.out.data()), 0xff, memory.out.size() * 4);
        launch(memory.globals());
        for (int i = 0; i < values; ++i) {
            if (!(memory.out[i] == expected(i))) return false;
        }
    }
    return true;
}
template <Defect D>
bool run(const std::string& kernel) {
    const auto is = [&](const char* name) { return kernel == "all" || kernel == name; };
    const auto plus_one = [](int i) { return 2.0f * float(i) + 1; };
    if (is("handover") &&
        !twice(
            VALUES,
            [](const FlagGlobals& g) { launch(handover_kernel<D>, 2, THREADS, 1, 0, nullptr, g); },
            plus_one))
        return false;
    if (is("counter") && !twice(
                             THREADS,
                             [](const FlagGlobals& g) {
                                 launch(counter_kernel<D>, PARTS + 1, THREADS, 1, 0, nullptr, g);
                             },
                             [](int i) { return 3.0f * float(i) + 3; }))
        return false;
    constexpr auto bytes = sizeof(CopyShared) + 1024;
    if (is("stores") && !twice(
                            VALUES,
                            [](const FlagGlobals& g) {
                                launch(copies_kernel<D, false>, 2, THREADS, 1, bytes, nullptr, g);
                            },
                            plus_one))
        return false;
    if (is("copies") && !twice(
                            VALUES,
                            [](const FlagGlobals& g) {
                                launch(copies_kernel<D, true>, 2, THREADS, 1, bytes, nullptr, g);
                            },
                            plus_one))
        return false;
    if (is("sums") &&
        !twice(
            4 * 32, [](const FlagGlobals& g) { launch(sums_kernel<D>, 3, 32, 1, 0, nullptr, g); },
            [](int i) { return 3.0f * float(i); }))
        return false;
    if (is("store below copy") && emu::options.host_threads > 1 &&
        !twice(
            VALUES,
            [](const FlagGlobals& g) {
                launch(store_below_copy_kernel<D>, 2, THREADS, 1, bytes, nullptr, g);
            },
            [](int i) { return float(i); }))
        return false;
    return !is("overlap") ||
           twice((OVERLAP_BLOCKS + 1) * OVERLAP_STEP,
                 [](const FlagGlobals& g) {
                     launch(overlap_kernel<D>, OVERLAP_BLOCKS, THREADS, 1, bytes, nullptr, g);
                 },
                 [](int i) { return float(i); });
}
template <std::size_t... i>
bool run_named(const std::string& name, std::index_sequence<i...>) {
    bool right = false;
    (void)((name == NAMES[i].name ? (right = run<Defect(i)>(NAMES[i].kernel), true) : false) ||
           ...);
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
        options.host_threads = 1 + seed % 2;
        const emu::OptionsScope scope(options);
        try {
            const bool right =
                run_named(arguments[1], std::make_index_sequence<std::size(NAMES)>());
            std::puts(right ? "right" : "wrong values");
        } catch (const std::exception& error) {
            std::printf("error: %s\n", error.what());
        }
    }
}
