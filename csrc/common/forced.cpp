// The function that forces fields of an op's choice, for measurements. Python calls it by ctypes.
#include "csrc/common/forced.h"

#include <algorithm>
#include <charconv>
#include <map>
#include <mutex>
#include <string>
#include <string_view>
#include <utility>

namespace thunderkittens {

std::atomic<const Forced*> forced_choice{nullptr};

// `fields` are "name=integer" or "name=word", with blanks between: what is neither a number nor the
// name of a kernel follows from the problem. An empty op ends it. False for what cannot be read.
extern "C" __attribute__((visibility("default"))) bool thunderkittens_force(const char* op,
                                                                            const char* fields) {
    // A call of another thread may still read an old one, so all are kept, once each.
    static std::mutex mutex;
    static std::map<std::string, Forced> all;
    const std::lock_guard lock(mutex);
    if (*op == '\0') {
        forced_choice.store(nullptr, std::memory_order_release);
        return true;
    }
    const std::string key = std::string(op) + '\n' + fields;
    auto found = all.find(key);
    if (found == all.end()) {
        Forced forced{.op = op};
        for (std::string_view rest = fields; !rest.empty();) {
            const std::string_view word = rest.substr(0, rest.find(' '));
            rest.remove_prefix(std::min(word.size() + 1, rest.size()));
            const std::size_t at = std::min(word.find('='), word.size());
            const std::string name(word.substr(0, at));
            const std::string_view value = word.substr(std::min(at + 1, word.size()));
            int64_t number = 0;
            const auto [end, error] =
                std::from_chars(value.data(), value.data() + value.size(), number);
            if (error == std::errc() && end == value.data() + value.size())
                forced.fields.emplace(name, number);
            else if (!value.empty() && value[0] >= 'a' && value[0] <= 'z')
                forced.fields.emplace(name, std::string(value));
            else
                return false;
        }
        found = all.emplace(key, std::move(forced)).first;
    }
    forced_choice.store(&found->second, std::memory_order_release);
    return true;
}

}  // namespace thunderkittens
