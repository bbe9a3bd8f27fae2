// Checks that throw std::runtime_error with a message put together from values: TK_CHECK(n > 0,
// "tk.gemm: n is ", n). The message is built only when the check fails, and holds no source path.
// Checks stay on in release builds. Every file of kernels includes this header, three times over
// for nvcc: streams would cost more to compile than the rest of it.
#pragma once

#include <cstdio>
#include <stdexcept>
#include <string>
#include <string_view>
#include <type_traits>

namespace thunderkittens {

// As a stream prints it.
inline void append(std::string& text, std::string_view part) { text += part; }
inline void append(std::string& text, char part) { text += part; }
template <typename T>
    requires std::is_arithmetic_v<T>
void append(std::string& text, T part) {
    if constexpr (std::is_floating_point_v<T>) {
        char digits[32];
        std::snprintf(digits, sizeof(digits), "%g", static_cast<double>(part));
        text += digits;
    } else {
        text += std::to_string(part);
    }
}

template <typename... Parts>
std::string concat(const Parts&... parts) {
    std::string text;
    (append(text, parts), ...);
    return text;
}

// "(2, 3, 5)", as Python prints a shape; `(7,)` for one element.
template <typename Range>
std::string tuple_text(const Range& values) {
    std::string text = "(";
    std::size_t count = 0;
    for (const auto& value : values) {
        append(text, count++ ? ", " : "");
        append(text, value);
    }
    return text + (count == 1 ? ",)" : ")");
}

}  // namespace thunderkittens

#define TK_CHECK(condition, ...)                                                           \
    do {                                                                                   \
        if (!(condition)) throw std::runtime_error(::thunderkittens::concat(__VA_ARGS__)); \
    } while (false)
