// The unit tests on the emulator. The environment variables KITTENS_POLICY and KITTENS_SEED choose
// the order in which things happen.
#include "../device_memory.h"

#include <cstdlib>
#include <cstring>

#include "arch/emulated/machine/options.h"

namespace unit::device {
namespace emu = kittens::emulated;

uint8_t* arena() {
    static uint8_t* memory = static_cast<uint8_t*>(std::aligned_alloc(4096, arena_bytes));
    return memory;
}
void upload(const std::vector<uint8_t>& bytes) {
    emu::options.regions = {{arena(), bytes.size(), "arena", true}};
    std::memcpy(arena(), bytes.data(), bytes.size());
}
void download(std::vector<uint8_t>& bytes) { std::memcpy(bytes.data(), arena(), bytes.size()); }
void wait() {}
bool is_lost() { return false; }

}  // namespace unit::device
