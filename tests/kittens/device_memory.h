// Where the unit tests' buffers live and their kernels run: a GPU (device_memory.cu), or the
// emulator (emulator/device_memory.cpp).
#pragma once

#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <vector>

namespace unit::device {

inline constexpr size_t arena_bytes = size_t(128) << 20;

// A kernel that waits for ever must not take the other cases with it.
struct Hang : std::runtime_error {
    using std::runtime_error::runtime_error;
};

uint8_t* arena();
void upload(const std::vector<uint8_t>& bytes);  // to the arena's beginning
void download(std::vector<uint8_t>& bytes);
void wait();     // for the launched kernel; throws when it has failed
bool is_lost();  // no later kernel could run

}  // namespace unit::device
