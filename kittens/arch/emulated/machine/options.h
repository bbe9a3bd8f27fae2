// How a launch is emulated, and what it throws.
//
// Completion policies. Hardware promises of an asynchronous operation only that it has completed
// after the wait that needs it. A policy picks one legal order:
//   on_wait   everything as late as possible: when nothing can run without it (shows missing waits)
//   late_mma  copies at issue, products as late as possible (shows memory that is reused too early)
//   eager     everything at issue
//   random    operations complete, and threads run, in an order drawn from the seed
#pragma once

#include <cstdint>
#include <cstdlib>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

namespace kittens::inline on_cpu {
namespace emulated {

enum class Policy { on_wait, late_mma, eager, random };

constexpr const char* name_of(Policy policy) {
    constexpr const char* names[] = {"on_wait", "late_mma", "eager", "random"};
    return names[static_cast<int>(policy)];
}

// A range of global memory that kernels may access.
struct Region {
    const void* begin;
    size_t bytes;
    std::string name;
    bool writable = true;
    // There before the previous kernel began: may be read before wait_for_dependencies.
    bool settled = false;
};

struct Options {
    Policy policy = Policy::on_wait;
    uint64_t seed = 0;
    int host_threads = 1;     // that clusters are spread over
    bool check_order = true;  // happens-before checks on shared memory; costs about half the time
    std::string kernel;       // its name in messages, where the symbol has none
    std::vector<Region> regions;  // when not empty, every access to global memory must lie in one
    bool from_environment = false;
};

// Of the launches of this host thread. As long as nobody has set a policy, the environment does:
// KITTENS_POLICY names one, KITTENS_SEED seeds it.
inline thread_local Options options{.from_environment = true};

inline Options chosen_options() {
    Options chosen = options;
    if (!chosen.from_environment) return chosen;
    if (const char* name = std::getenv("KITTENS_POLICY")) {
        bool found = false;
        for (const Policy p : {Policy::on_wait, Policy::late_mma, Policy::eager, Policy::random}) {
            if (std::string(name) == name_of(p)) chosen.policy = p, found = true;
        }
        if (!found) {
            throw std::runtime_error(std::string("kittens emulator: KITTENS_POLICY is '") + name +
                                     "'; it is on_wait, late_mma, eager or random");
        }
    }
    if (const char* seed = std::getenv("KITTENS_SEED")) {
        chosen.seed = std::strtoull(seed, nullptr, 10);
    }
    return chosen;
}

// Changes the options until the end of a scope.
class OptionsScope {
  public:
    explicit OptionsScope(Options changed) : saved_(std::exchange(options, std::move(changed))) {}
    ~OptionsScope() { options = std::move(saved_); }
    OptionsScope(const OptionsScope&) = delete;
    OptionsScope& operator=(const OptionsScope&) = delete;

  private:
    Options saved_;
};

// An illegal operation of a kernel. The message names kernel, block, warp and what was touched.
struct Error : std::runtime_error {
    using std::runtime_error::runtime_error;
};
// No thread of a cluster can run. The message lists what each warp waits for.
struct Deadlock : Error {
    using Error::Error;
};

}  // namespace emulated
}  // namespace kittens::inline on_cpu
