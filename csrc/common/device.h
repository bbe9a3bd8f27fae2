// What a kernel's choice depends on of the GPU, as a plain struct that a test can fill in for any
// device, and the cached properties of the real ones. Host C++ only.
#pragma once

#include <algorithm>
#include <cstdlib>
#include <string>
#include <string_view>

#include "csrc/common/check.h"

// The opaque type behind cudaStream_t, so that launch declarations need no CUDA header.
struct CUstream_st;

namespace thunderkittens {

using Stream = CUstream_st*;

struct DeviceProperties {
    int sm_count = 0;
    int shared_bytes_per_block = 0;  // the opt-in maximum of dynamic shared memory
    int l2_bytes = 0;
    int major = 0;  // compute capability
    int minor = 0;
    // Whether only portable kernels may run, also where there are some for the very GPU.
    bool portable_only = false;

    bool operator==(const DeviceProperties&) const = default;
};

// Properties of a CUDA device, read once per device; safe to call from several threads. Needs the
// CUDA runtime: defined in device.cpp, which only _cuda.so holds.
const DeviceProperties& device_properties(int index);

// A device as the environment restricts it, so that portable kernels can be tried on a GPU that has
// others: THUNDERKITTENS_PORTABLE=1 forbids kernels for one architecture alone, and
// THUNDERKITTENS_SHARED_BYTES is the most shared memory of a block.
inline DeviceProperties restricted(DeviceProperties device) {
    const char* const portable = std::getenv("THUNDERKITTENS_PORTABLE");
    if (portable != nullptr && std::string_view(portable) == "1") device.portable_only = true;
    if (const char* const most = std::getenv("THUNDERKITTENS_SHARED_BYTES")) {
        const int bytes = std::atoi(most);
        TK_CHECK(bytes > 0, "thunderkittens: THUNDERKITTENS_SHARED_BYTES is '", most,
                 "'; it must be a number of bytes");
        device.shared_bytes_per_block = std::min(device.shared_bytes_per_block, bytes);
    }
    return device;
}

// The architectures that this build holds kernels for, as THUNDERKITTENS_CUDA_ARCHS names them,
// with commas between ("80,90a"), or "". There are two kinds of kernels. Native ones, with a
// letter, run on exactly their own compute capability. Portable ones are machine code for later
// minor versions of their major one ("120-real"), code that the driver compiles for all later ones
// ("80-virtual"), or both ("80").
constexpr std::string_view built_architectures() { return THUNDERKITTENS_ARCHS; }

struct Architecture {
    int number = 0;
    bool native = false, machine_code = true, later = false;

    // "sm_90a", "sm_80 and later"
    std::string text() const {
        return concat("sm_", number, native ? "a" : "", later ? " and later" : "");
    }
    bool runs_on(const DeviceProperties& device) const {
        const int capability = device.major * 10 + device.minor;
        if (native) return capability == number && !device.portable_only;
        return (later && capability >= number) ||
               (machine_code && capability >= number && device.major == number / 10);
    }
};
// Each entry of a list of architectures.
template <class F>
constexpr void for_each_architecture(std::string_view list, F f) {
    while (!list.empty()) {
        const std::string_view entry = list.substr(0, list.find(','));
        list.remove_prefix(std::min(entry.size() + 1, list.size()));
        const std::size_t digits = std::min(entry.find_first_not_of("0123456789"), entry.size());
        Architecture found;
        for (const char digit : entry.substr(0, digits)) {
            found.number = found.number * 10 + (digit - '0');
        }
        const std::string_view rest = entry.substr(digits);
        found.native = !rest.empty() && rest[0] != '-';
        found.machine_code = rest != "-virtual";
        found.later = !found.native && rest != "-real";
        f(found);
    }
}
inline bool holds_code_for(const DeviceProperties& device, bool native,
                           std::string_view architectures = built_architectures()) {
    bool found = false;
    for_each_architecture(architectures, [&](const Architecture& a) {
        found |= a.native == native && a.runs_on(device);
    });
    return found;
}

// Whether this build has portable kernels: what calls them is left out where they are not there.
constexpr bool BUILDS_PORTABLE = [] {
    bool found = false;
    for_each_architecture(built_architectures(),
                          [&](const Architecture& a) { found |= !a.native; });
    return found;
}();

// Whether an op's kernels for sm_90a run on a device; else its portable ones do. A build without
// kernels answers as one that has them all.
inline bool runs_native(const DeviceProperties& device) {
    if (!built_architectures().empty()) return holds_code_for(device, true);
    return Architecture{.number = 90, .native = true}.runs_on(device);
}

// Empty when this build holds code for the device, native or portable, else the reason in a
// sentence.
inline std::string no_code_for(const DeviceProperties& device) {
    if (built_architectures().empty()) {
        return "this build of thunderkittens holds no CUDA kernels (THUNDERKITTENS_CUDA=OFF); "
               "install "
               "it again without that "
               "option: pip install --force-reinstall --no-deps .";
    }
    if (holds_code_for(device, true) || holds_code_for(device, false)) return "";
    std::string built;
    for_each_architecture(built_architectures(), [&](const Architecture& a) {
        built += concat(built.empty() ? "" : ", ", a.text());
    });
    return concat("this build of thunderkittens holds kernels for ", built, ", this GPU is sm_",
                  device.major, device.minor, device.portable_only ? " without those for it" : "",
                  "; move the tensors to the CPU, or use a GPU of that architecture");
}
// The same for an op that has no portable kernel.
inline std::string no_native_code_for(const DeviceProperties& device) {
    if (std::string reason = no_code_for(device); !reason.empty()) return reason;
    if (runs_native(device)) return "";
    if (device.portable_only) {
        return "this op has kernels for sm_90a alone, which THUNDERKITTENS_PORTABLE forbids";
    }
    return concat("this op has kernels for sm_90a alone, and this GPU is sm_", device.major,
                  device.minor, " or this build leaves them out; move the tensors to the CPU");
}

}  // namespace thunderkittens
