// The registry of kernels: each family's choose.cpp enters what it has, and the module _C shows it
// to Python. A family gives, in its header,
//
//   struct Problem; struct Config;             plain fields
//   void visit_fields(Problem&, visitor);      calls visitor("name", field) for each field
//   void visit_fields(Config&, visitor);       in the order in which they are declared; TK_FIELDS
//                                              of fields.h defines it
//   std::string unsupported(const Problem&, const DeviceProperties&);    empty, or the reason
//   Config choose(const Problem&, const DeviceProperties&);
//   std::string kernel_name(const Config&);    of the kernel that runs it, as in kernels()
//   std::vector<KernelInfo> kernels();
//
// and ends its choose.cpp with
//
//   static const bool registered = register_op("gemm", "gemm", &kernels, &unsupported, &choose);
//
// A choice may say which kernel runs by an enumeration, whose values have names in its namespace:
//
//   constexpr const char* strategy_name(Kernel);    nullptr past the last
//
// An op may also have, by register_candidates(), the choice and what else could run, which
// `bench OP --regret` times:
//
//   std::vector<Config> candidates(const Problem&, const DeviceProperties&);
//
// Host C++ only. Problems and configs travel as maps of names to values, so that _C needs no code
// per family.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <type_traits>
#include <utility>
#include <variant>
#include <vector>

#include "csrc/common/check.h"
#include "csrc/common/device.h"
#include "csrc/common/dtype.h"

namespace thunderkittens {

using Value = std::variant<bool, std::int64_t, double, std::string>;
using Fields = std::map<std::string, Value>;

// The architectures of kernels: Hopper's, and the least that portable ones need.
constexpr int NATIVE = 90, PORTABLE = 80;

struct KernelInfo {
    std::string name;    // unique within the op, readable: "bf16_128x256x64_2cta"
    std::string config;  // one line for people: tile shape, stages, roles
    // Part of the mangled name, which tells it from the family's other kernels for `arch`. `*`
    // stands for any letters and digits, `<enum>` for an enumeration's name, see symbol_of().
    std::string symbol;
    int arch = NATIVE;
    int threads = 0;       // per block
    int shared_bytes = 0;  // dynamic, per block
    Fields fields = {};    // of the Config, for tests and tools
};

struct OpEntry {
    std::string op;
    std::string family;
    std::vector<std::string> problem_fields;
    std::function<std::vector<KernelInfo>()> kernels;
    std::function<std::string(const Fields&, const DeviceProperties&)> unsupported;
    std::function<Fields(const Fields&, const DeviceProperties&)>
        choose;  // Config's fields and "kernel"
};

// What could run, by op: a Config's fields and "kernel" each.
using Candidates = std::function<std::vector<Fields>(const Fields&, const DeviceProperties&)>;
inline std::map<std::string, Candidates>& candidates_of_ops() {
    static std::map<std::string, Candidates> functions;
    return functions;
}

inline std::vector<OpEntry>& registry() {
    static std::vector<OpEntry> entries;
    return entries;
}

inline const OpEntry& find_op(const std::string& op) {
    std::string known;
    for (const OpEntry& entry : registry()) {
        if (entry.op == op) return entry;
        known += (known.empty() ? "" : ", ") + entry.op;
    }
    throw std::runtime_error(
        concat("no op '", op, "' in this build; it has: ", known.empty() ? "none" : known));
}

namespace detail {

template <typename T>
concept named_strategy = requires(T kernel) { strategy_name(kernel); };

template <typename T>
Value to_value(const T& field) {
    if constexpr (std::is_same_v<T, DType>) {
        return std::string(name_of(field));
    } else if constexpr (named_strategy<T>) {
        return std::string(strategy_name(field));
    } else if constexpr (std::is_same_v<T, bool>) {
        return field;
    } else if constexpr (std::is_integral_v<T> || std::is_enum_v<T>) {
        return static_cast<std::int64_t>(field);
    } else if constexpr (std::is_floating_point_v<T>) {
        return static_cast<double>(field);
    } else {
        return std::string(field);
    }
}

template <typename T>
void from_value(const std::string& where, const Value& value, T& field) {
    const auto number = [&]() -> double {
        if (const auto* b = std::get_if<bool>(&value)) return *b;
        if (const auto* i = std::get_if<std::int64_t>(&value)) return static_cast<double>(*i);
        if (const auto* d = std::get_if<double>(&value)) return *d;
        throw std::runtime_error(
            concat(where, " must be a number, got '", std::get<std::string>(value), "'"));
    };
    if constexpr (std::is_same_v<T, DType>) {
        const auto* text = std::get_if<std::string>(&value);
        const auto dtype = text ? dtype_from_name(*text) : std::nullopt;
        TK_CHECK(dtype, where, " must be one of 'bf16', 'fp16', 'fp32', 'int32', 'e4m3', 'e5m2'");
        field = *dtype;
    } else if constexpr (named_strategy<T>) {
        const auto* text = std::get_if<std::string>(&value);
        std::string known;
        for (int i = 0; const char* const name = strategy_name(T(i)); ++i) {
            if (text && *text == name) return void(field = T(i));
            known += concat(i > 0 ? ", '" : "'", name, '\'');
        }
        throw std::runtime_error(concat(where, " must be one of ", known));
    } else if constexpr (std::is_same_v<T, std::string>) {
        const auto* text = std::get_if<std::string>(&value);
        TK_CHECK(text, where, " must be a string");
        field = *text;
    } else if (const auto* i = std::get_if<std::int64_t>(&value);
               i && !std::is_floating_point_v<T>) {
        field = static_cast<T>(*i);
    } else {
        field = static_cast<T>(number());
    }
}

template <typename Struct>
Fields fields_of(const Struct& values) {
    Fields fields;
    // Both directions share one visitor function; this one only reads.
    visit_fields(const_cast<Struct&>(values), [&](const char* name, auto& field) {
        fields.emplace(name, to_value(std::as_const(field)));
    });
    return fields;
}

// Overwrites fields of a choice, for tests and measurements of it; what follows from them is the
// op's matter, which has a function for that. False where one is none of the choice's.
template <typename Choice>
bool force_fields(Choice& choice, const Fields& forced) {
    const Choice before = choice;
    std::size_t used = 0;
    visit_fields(choice, [&](const char* name, auto& field) {
        const auto found = forced.find(name);
        if (found == forced.end()) return;
        from_value(name, found->second, field);
        ++used;
    });
    if constexpr (requires { follow_forced(choice, before, false); }) {
        follow_forced(choice, before, forced.contains("strategy"));
    }
    return used == forced.size();
}

template <typename Config>
Fields named_fields_of(const Config& config) {
    Fields fields = fields_of(config);
    fields.emplace("kernel", kernel_name(config));
    return fields;
}

template <typename Struct>
Struct struct_from(const std::string& op, const Fields& fields) {
    Struct values{};
    std::size_t used = 0;
    std::string known;
    visit_fields(values, [&](const char* name, auto& field) {
        known += concat(known.empty() ? "" : ", ", name);
        if (const auto found = fields.find(name); found != fields.end()) {
            from_value(concat(op, ": ", name), found->second, field);
            ++used;
        }
    });
    if (used != fields.size()) {
        for (const auto& [name, value] : fields) {
            const bool is_known = (", " + known + ",").find(", " + name + ",") != std::string::npos;
            TK_CHECK(is_known, op, ": a problem has no field '", name, "'; its fields are ", known);
        }
    }
    return values;
}

}  // namespace detail

// The symbol of a kernel that is a template over one type, which holds `config`, a value of the
// struct `type`: kernel<Traits<config>>. The Itanium C++ ABI writes a length before a name, and for
// each field L, its type, its value and E; so the pattern is made from visit_fields(Config&), which
// therefore visits the fields in the order of their declaration. How a name that has occurred
// before is abbreviated depends on the rest of the symbol: the pattern leaves that open.
template <typename Config>
std::string symbol_of(const std::string& kernel, const std::string& type, const Config& config) {
    std::string pattern = concat(kernel.size(), kernel, "I*", type.size(), type, 'E');
    visit_fields(const_cast<Config&>(config), [&](const char*, auto& field) {
        using T = std::remove_reference_t<decltype(field)>;
        static_assert(std::is_enum_v<T> || std::is_same_v<T, int> || std::is_same_v<T, bool>);
        const char* const code = std::is_enum_v<T> ? "<enum>" : std::is_same_v<T, int> ? "i" : "b";
        pattern += concat('L', code, static_cast<int>(field), 'E');
    });
    return pattern;
}
// The same for kernel<Traits<value>>, a value of an enumeration.
template <typename Enum>
    requires std::is_enum_v<Enum>
std::string symbol_of(const std::string& kernel, Enum value) {
    return concat(kernel.size(), kernel, "I*L<enum>", static_cast<int>(value), 'E');
}

// What a type is in the symbol of a template over it.
constexpr const char* symbol_of(DType dtype) {
    return dtype == DType::bf16 ? "13__nv_bfloat16" : dtype == DType::fp16 ? "6__half" : "f";
}

template <typename Problem, typename Config>
bool register_op(const std::string& op, const std::string& family,
                 std::vector<KernelInfo> (*kernels)(),
                 std::string (*unsupported)(const Problem&, const DeviceProperties&),
                 Config (*choose)(const Problem&, const DeviceProperties&)) {
    OpEntry entry{.op = op, .family = family, .kernels = kernels};
    for (const auto& [name, value] : detail::fields_of(Problem{}))
        entry.problem_fields.push_back(name);
    entry.unsupported = [=](const Fields& fields, const DeviceProperties& device) {
        return unsupported(detail::struct_from<Problem>(op, fields), device);
    };
    entry.choose = [=](const Fields& fields, const DeviceProperties& device) {
        return detail::named_fields_of(choose(detail::struct_from<Problem>(op, fields), device));
    };
    registry().push_back(std::move(entry));
    return true;
}

template <typename Problem, typename Config>
bool register_candidates(const std::string& op,
                         std::vector<Config> (*candidates)(const Problem&,
                                                           const DeviceProperties&)) {
    candidates_of_ops()[op] = [=](const Fields& fields, const DeviceProperties& device) {
        std::vector<Fields> list;
        for (const Config& config : candidates(detail::struct_from<Problem>(op, fields), device)) {
            list.push_back(detail::named_fields_of(config));
        }
        return list;
    };
    return true;
}

}  // namespace thunderkittens
