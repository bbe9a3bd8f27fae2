// Checks that throw std::runtime_error with a message put together from values: TK_CHECK(n > 0,
// "tk.gemm: n is ", n). The message is built only when the check fails, and holds no source path.
// Checks stay on in release builds.
#pragma once

#include <sstream>
#include <stdexcept>
#include <string>

namespace thunderkittens {

template <typename... Parts>
std::string concat(const Parts&... parts) {
    std::ostringstream text;
    (text << ... << parts);
    return text.str();
}

// "(2, 3, 5)", as Python prints a shape; `(7,)` for one element.
template <typename Range>
std::string tuple_text(const Range& values) {
    std::ostringstream text;
    text << '(';
    std::size_t count = 0;
    for (const auto& value : values) text << (count++ ? ", " : "") << value;
    text << (count == 1 ? ",)" : ")");
    return text.str();
}

}  // namespace thunderkittens

#define TK_CHECK(condition, ...)                                                           \
    do {                                                                                   \
        if (!(condition)) throw std::runtime_error(::thunderkittens::concat(__VA_ARGS__)); \
    } while (false)
