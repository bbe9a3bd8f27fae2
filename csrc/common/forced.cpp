// The function that forces fields of an op's choice, for measurements. Python calls it by ctypes.
#include "csrc/common/forced.h"

#include <cctype>
#include <map>
#include <mutex>
#include <sstream>
#include <string>
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
        std::istringstream words(fields);
        for (std::string word; words >> word;) {
            const std::size_t at = word.find('=');
            const std::string value = at == std::string::npos ? "" : word.substr(at + 1);
            std::istringstream digits(value);
            int64_t number = 0;
            if (digits >> number && digits.eof())
                forced.fields.emplace(word.substr(0, at), number);
            else if (!value.empty() && std::islower(static_cast<unsigned char>(value[0])))
                forced.fields.emplace(word.substr(0, at), value);
            else
                return false;
        }
        found = all.emplace(key, std::move(forced)).first;
    }
    forced_choice.store(&found->second, std::memory_order_release);
    return true;
}

}  // namespace thunderkittens
