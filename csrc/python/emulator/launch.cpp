// The scope of a family's launches: options of the tile library's emulator.
#include "csrc/common/emulated.h"
#include "kittens/arch/emulated/machine/options.h"

namespace thunderkittens::emulated {
namespace {

kittens::emulated::Options named(const std::string& kernel) {
    kittens::emulated::Options options = kittens::emulated::options;
    options.kernel = kernel;
    return options;
}
void add(const char* name, const Array& a, bool writable, bool settled = false) {
    kittens::emulated::options.regions.push_back(
        {a.data, static_cast<std::size_t>(a.extent()), name, writable, settled});
}

}  // namespace

struct Launch::Scope {
    kittens::emulated::OptionsScope options;
};
Launch::Launch(const std::string& kernel)
    : scope_(new Scope{kittens::emulated::OptionsScope(named(kernel))}) {}
Launch::~Launch() = default;
void Launch::may_read(const char* name, const Array& a) { add(name, a, false); }
void Launch::may_read_early(const char* name, const Array& a) { add(name, a, false, true); }
void Launch::may_write(const char* name, const Array& a) {
    add(name, a, true);
    if (recording == nullptr || a.data == nullptr) return;
    if (a.owner)
        recording->written.push_back(a.owner);
    else
        recording->writes_inputs = true;
}

}  // namespace thunderkittens::emulated
