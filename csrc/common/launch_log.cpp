// The launches that are noted, and the function that begins it and reads them. Python calls it by
// ctypes.
#include "csrc/common/launch_log.h"

#include <string>
#include <utility>
#include <variant>

namespace thunderkittens {

std::atomic<bool> launches_noted{false};

namespace {

thread_local std::string noted;

std::string text(const Value& value) {
    if (const auto* b = std::get_if<bool>(&value)) return *b ? "1" : "0";
    if (const auto* i = std::get_if<int64_t>(&value)) return std::to_string(*i);
    if (const auto* d = std::get_if<double>(&value)) return std::to_string(*d);
    return std::get<std::string>(value);
}

}  // namespace

void note_launch(const char* kernel, const Fields& fields) {
    if (!noted.empty()) noted += '\n';
    const auto named = fields.find("kernel");
    noted += named == fields.end() ? std::string(kernel) : text(named->second);
    char before = '\t';
    for (const auto& [name, value] : fields) {
        if (name == "kernel") continue;
        noted += concat(before, name, '=', text(value));
        before = ' ';
    }
}

// The launches of this thread since its last call, a line each: the kernel, a tab and, with blanks
// between, the fields of its choice. Valid until the thread's next call.
extern "C" __attribute__((visibility("default"))) const char* thunderkittens_launches() {
    static thread_local std::string answer;
    launches_noted.store(true, std::memory_order_relaxed);
    answer = std::exchange(noted, {});
    return answer.c_str();
}

}  // namespace thunderkittens
