// The framework's back: device memory, comparison, dumps, the command line.
#include "unit.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdarg>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <map>
#include <stdexcept>

#include "device_memory.h"

namespace unit {
namespace {

constexpr size_t guard_bytes = 1024;

struct Options {
    std::vector<std::string> filters;
    std::string dump, after;
    bool list = false, verbose = false;
    int max_reports = 20;
};
Options options;

struct Totals {
    int passed = 0, failed = 0;
};
struct State {
    std::string section;
    std::map<std::string, Totals> totals;
    int reports = 0;
};
State state;

struct SectionEntry {
    std::string name;
    void (*body)();
};
std::vector<SectionEntry>& sections() {
    static std::vector<SectionEntry> list;
    return list;
}

bool selected(const std::string& name) {
    if (options.filters.empty()) return true;
    return std::any_of(options.filters.begin(), options.filters.end(),
                       [&](const auto& f) { return name.find(f) != std::string::npos; });
}

}  // namespace

const Format& format(Type type) {
    static const Format formats[] = {{"f32", 4, 8, 23, std::numeric_limits<float>::max()},
                                     {"bf16", 2, 8, 7, 0x1.FEp127},
                                     {"f16", 2, 5, 10, 65504},
                                     {"e4m3", 1, 4, 3, 448},
                                     {"e5m2", 1, 5, 2, 57344}};
    return formats[static_cast<int>(type)];
}

// In the range of normal doubles.
static double power_of_two(int exponent) {
    return std::bit_cast<double>(static_cast<uint64_t>(exponent + 1023) << 52);
}

uint32_t encode(Type type, double value) {
    const Format& f = format(type);
    const uint32_t sign = std::signbit(value) ? 1u << (8 * f.bytes - 1) : 0;
    if (std::isnan(value)) return f.bytes == 4 ? ~0u : (1u << (8 * f.bytes)) - 1;
    const int bias = (1 << (f.exponent_bits - 1)) - 1;
    const uint32_t all_ones = ((1u << f.exponent_bits) - 1) << f.mantissa_bits;
    // The code behind that of the largest number: infinity, or what would be it.
    const uint32_t beyond = type == Type::e4m3 ? 0x7F : all_ones;
    const uint32_t last = f.bytes == 1 ? beyond - 1 : beyond;
    const double magnitude = std::fabs(value);
    if (magnitude > 2 * f.largest) return sign | last;
    const int exponent =
        std::max(static_cast<int>(std::bit_cast<uint64_t>(magnitude) >> 52) - 1023, 1 - bias);
    // In units of the last place; nearbyint rounds ties to even. Added to the exponent of subnormal
    // numbers, a mantissa's hidden bit makes it that of normal ones, and what was rounded up to the
    // next power of two raises it once more.
    const double mantissa = std::nearbyint(magnitude * power_of_two(f.mantissa_bits - exponent));
    const uint32_t code = (static_cast<uint32_t>(exponent + bias - 1) << f.mantissa_bits) +
                          static_cast<uint32_t>(mantissa);
    return sign | std::min(code, last);
}

double decode(Type type, uint32_t bits) {
    const Format& f = format(type);
    const int bias = (1 << (f.exponent_bits - 1)) - 1;
    const double sign = (bits >> (8 * f.bytes - 1)) & 1 ? -1 : 1;
    const auto exponent =
        static_cast<int>((bits >> f.mantissa_bits) & ((1u << f.exponent_bits) - 1));
    const uint32_t mantissa = bits & ((1u << f.mantissa_bits) - 1);
    if (type == Type::e4m3) {
        if ((bits & 0x7F) == 0x7F) return poison;
    } else if (exponent == (1 << f.exponent_bits) - 1) {
        return mantissa ? poison : sign * std::numeric_limits<double>::infinity();
    }
    if (exponent == 0) return sign * mantissa * power_of_two(1 - bias - f.mantissa_bits);
    return sign * (mantissa + double(1u << f.mantissa_bits)) *
           power_of_two(exponent - bias - f.mantissa_bits);
}

double rounded(Type type, double value) { return decode(type, encode(type, value)); }
Values rounded(Type type, Values values) {
    for (double& v : values) v = rounded(type, v);
    return values;
}
double unit_roundoff(Type type) { return std::scalbn(1.0, -format(type).mantissa_bits - 1); }
Tolerance within(Type type, double roundings, double absolute) {
    const Format& f = format(type);
    const double smallest = std::scalbn(1.0, 2 - (1 << (f.exponent_bits - 1)) - f.mantissa_bits);
    return {false, roundings * unit_roundoff(type) * 1.0001, absolute + roundings * smallest};
}

View View::contiguous(int b, int d, int r, int c) { return padded(b, d, r, c, 0, 0); }
View View::padded(int b, int d, int r, int c, int row_pad, int pad) {
    View v{b, d, r, c};
    v.row_stride = c + row_pad;
    v.depth_stride = (r + pad) * v.row_stride;
    v.batch_stride = d * v.depth_stride + pad * v.row_stride;
    return v;
}
size_t View::extent() const { return index(b - 1, d - 1, r - 1, c - 1) + 1; }
size_t View::index(int ib, int id, int ir, int ic) const {
    return static_cast<size_t>(ib * batch_stride + id * depth_stride + ir * row_stride + ic);
}
bool View::contains(int ib, int id, int ir, int ic) const {
    return ib >= 0 && ib < b && id >= 0 && id < d && ir >= 0 && ir < r && ic >= 0 && ic < c;
}

Case::Case(std::string name) : name_(std::move(name)), state_(1469598103934665603ull) {
    for (char ch : name_) state_ = (state_ ^ static_cast<uint8_t>(ch)) * 1099511628211ull;
    before_.assign(guard_bytes, 0xFF);
}

// splitmix64, in [0, 1)
double Case::next() {
    uint64_t z = (state_ += 0x9E3779B97F4A7C15ull);
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ull;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBull;
    return static_cast<double>((z ^ (z >> 31)) >> 11) * 0x1p-53;
}
Values Case::uniform(Type type, size_t count, double low, double high) {
    Values values(count);
    for (double& v : values) v = rounded(type, low + (high - low) * next());
    return values;
}
Values Case::integers(size_t count, int low, int high) {
    Values values(count);
    for (double& v : values) v = low + std::floor((high - low + 1) * next());
    return values;
}
Values Case::uniform(Type type, const View& v, double low, double high) {
    Values values(v.extent(), poison);
    for (int b = 0; b < v.b; ++b)
        for (int d = 0; d < v.d; ++d)
            for (int r = 0; r < v.r; ++r)
                for (int c = 0; c < v.c; ++c)
                    values[v.index(b, d, r, c)] = rounded(type, low + (high - low) * next());
    return values;
}

void* Case::add(const char* name, Type type, const Values& values, bool is_output) {
    const int bytes = format(type).bytes;
    Buffer buffer;
    buffer.name = name;
    buffer.type = type;
    buffer.offset = before_.size();
    buffer.count = values.size();
    buffer.is_output = is_output;
    const size_t padded = (values.size() * bytes + guard_bytes - 1) / guard_bytes * guard_bytes;
    before_.resize(buffer.offset + padded + guard_bytes, 0xFF);
    if (before_.size() > device::arena_bytes)
        throw std::runtime_error("the case's buffers exceed the arena");
    for (size_t i = 0; i < values.size(); ++i) {
        const uint32_t bits = encode(type, values[i]);
        std::memcpy(&before_[buffer.offset + i * bytes], &bits, bytes);
    }
    buffers_.push_back(std::move(buffer));
    return device::arena() + buffers_.back().offset;
}
void* Case::input(const char* name, Type type, const Values& values) {
    return add(name, type, values, false);
}
void* Case::output(const char* name, Type type, size_t count) {
    return add(name, type, Values(count, poison), true);
}
void* Case::output(const char* name, Type type, const Values& initial) {
    return add(name, type, initial, true);
}

void Case::expect(const Values& expected, Tolerance tolerance, int columns) {
    for (size_t i = buffers_.size(); i-- > 0;) {
        if (buffers_[i].is_output)
            return expect(buffers_[i].name.c_str(), expected, tolerance, columns);
    }
    throw std::logic_error("expect: the case has no output");
}
void Case::expect(const char* name, const Values& expected, Tolerance tolerance, int columns) {
    for (Buffer& buffer : buffers_) {
        if (buffer.name != name || !buffer.is_output) continue;
        if (expected.size() != buffer.count) {
            throw std::logic_error(text("expect: %s has %zu elements, %zu are expected", name,
                                        buffer.count, expected.size()));
        }
        buffer.expected = expected;
        buffer.tolerance = tolerance;
        buffer.columns = columns;
        buffer.has_expectation = true;
        return;
    }
    throw std::logic_error(std::string("expect: no output ") + name);
}

void Case::launch(const std::function<void()>& launch) {
    device::upload(before_);
    launch();
    device::wait();
    after_.resize(before_.size());
    device::download(after_);
    launched_ = true;
}

double Case::element(const Buffer& buffer, size_t i) const {
    uint32_t bits = 0;
    const int bytes = format(buffer.type).bytes;
    const auto& memory = after_.empty() ? before_ : after_;
    std::memcpy(&bits, &memory[buffer.offset + i * bytes], bytes);
    return decode(buffer.type, bits);
}

std::string Case::compare(const Buffer& buffer) const {
    size_t wrong = 0, first = 0;
    for (size_t i = 0; i < buffer.count; ++i) {
        const double actual = element(buffer, i), expected = buffer.expected[i];
        bool ok;
        if (std::isnan(expected))
            ok = std::isnan(actual);
        else if (buffer.tolerance.exact)
            ok = actual == rounded(buffer.type, expected) &&
                 std::signbit(actual) == std::signbit(expected);
        else
            ok = actual == expected ||
                 std::fabs(actual - expected) <=
                     buffer.tolerance.absolute + buffer.tolerance.relative * std::fabs(expected);
        if (!ok && wrong++ == 0) first = i;
    }
    if (wrong == 0) return {};
    const size_t columns = buffer.columns ? buffer.columns : buffer.count;
    return text("%s: %zu of %zu elements differ, first [%zu, %zu]: expected %.9g, actual %.9g",
                buffer.name.c_str(), wrong, buffer.count, first / columns, first % columns,
                buffer.expected[first], element(buffer, first));
}

std::string Case::verify() {
    if (!launched_) return "the case launched nothing";
    int stated = 0;
    for (const Buffer& buffer : buffers_) {
        if (!buffer.has_expectation) continue;
        ++stated;
        if (std::string difference = compare(buffer); !difference.empty()) return difference;
    }
    if (stated == 0) return "the case expects nothing";
    // Everything else must be as it was.
    std::vector<bool> may_change(before_.size(), false);
    for (const Buffer& buffer : buffers_) {
        if (!buffer.is_output) continue;
        std::fill_n(may_change.begin() + static_cast<ptrdiff_t>(buffer.offset),
                    buffer.count * format(buffer.type).bytes, true);
    }
    for (size_t i = 0; i < before_.size(); ++i) {
        if (may_change[i] || before_[i] == after_[i]) continue;
        std::string nearest = "the first guard";
        for (const Buffer& buffer : buffers_) {
            if (buffer.offset <= i)
                nearest = text("%s + %zu bytes", buffer.name.c_str(), i - buffer.offset);
        }
        return "memory outside the outputs was written: " + nearest;
    }
    return {};
}

void Case::dump(const std::string& folder, const std::string& reason) const {
    std::filesystem::create_directories(folder);
    std::string file = name_;
    for (char& ch : file) {
        if (!std::isalnum(static_cast<unsigned char>(ch)) && ch != '.' && ch != '-') ch = '_';
    }
    std::ofstream out(folder + "/" + file + ".txt");
    out << name_ << "\n" << reason << "\n";
    const auto print = [&](const char* what, const Buffer& buffer, auto value) {
        out << "\n" << what << " " << buffer.name << " (" << format(buffer.type).name << ")\n";
        const size_t columns = buffer.columns ? buffer.columns : 16;
        for (size_t i = 0; i < buffer.count; ++i) {
            out << text("%.9g", value(i))
                << ((i + 1) % columns && i + 1 < buffer.count ? ' ' : '\n');
        }
    };
    for (const Buffer& buffer : buffers_) {
        if (!buffer.is_output) {
            print("input", buffer, [&](size_t i) { return element(buffer, i); });
        } else if (buffer.has_expectation) {
            print("expected", buffer, [&](size_t i) { return buffer.expected[i]; });
            print("actual", buffer, [&](size_t i) { return element(buffer, i); });
        }
    }
}

static int print_totals() {
    int failed = 0, passed = 0;
    for (const auto& [name, totals] : state.totals) {
        std::printf("SECTION %s passed %d failed %d\n", name.c_str(), totals.passed, totals.failed);
        passed += totals.passed, failed += totals.failed;
    }
    std::printf("TOTAL intensity %d passed %d failed %d\n", intensity, passed, failed);
    std::fflush(stdout);
    return failed;
}

class Runner {
  public:
    static void run(const std::string& full_name, const std::function<void(Case&)>& body) {
        Case test(full_name);
        std::string reason;
        bool hangs = false;
        try {
            body(test);
            reason = test.verify();
        } catch (const device::Hang& error) {
            reason = error.what();
            hangs = true;
        } catch (const std::exception& error) {
            reason = error.what();
        }
        Totals& totals = state.totals[state.section];
        if (reason.empty()) {
            ++totals.passed;
            return;
        }
        ++totals.failed;
        if (state.reports++ < options.max_reports) {
            std::printf("FAILED %s: %s\n", full_name.c_str(), reason.c_str());
        }
        if (!options.dump.empty()) test.dump(options.dump, reason);
        if (hangs || device::is_lost()) {
            // An error that the context keeps: no later case could run.
            std::printf("ABORTED %s\n", full_name.c_str());
            print_totals();
            std::_Exit(3);
        }
    }
};

void run(const std::string& name, const std::function<void(Case&)>& body) {
    const std::string full_name = state.section + "/" + name;
    if (!selected(full_name)) return;
    if (!options.after.empty()) {
        if (full_name == options.after) options.after.clear();
        return;
    }
    if (options.list) {
        std::printf("%s\n", full_name.c_str());
        ++state.totals[state.section].passed;
        return;
    }
    if (options.verbose) std::printf("%s\n", full_name.c_str()), std::fflush(stdout);
    Runner::run(full_name, body);
}

Section::Section(const char* name, void (*body)()) { sections().push_back({name, body}); }

std::string text(const char* pattern, ...) {
    char buffer[1024];
    va_list arguments;
    va_start(arguments, pattern);
    std::vsnprintf(buffer, sizeof(buffer), pattern, arguments);
    va_end(arguments);
    return buffer;
}

static int usage() {
    std::printf(
        "unit_tests [--list] [--sections] [--filter TEXT]... [--after NAME] [--dump DIR]\n"
        "           [--max-reports N] [--verbose]\n"
        "  --list      names of the selected cases; nothing runs\n"
        "  --sections  names of the compiled sections\n"
        "  --filter    runs the cases whose name holds TEXT (several: any of them)\n"
        "  --after     skips the cases up to this one (to go on after an error of the device)\n"
        "  --dump      writes input, expected and actual values of failing cases into DIR\n");
    return 2;
}

}  // namespace unit

int main(int argc, char** argv) {
    using namespace unit;
    std::setvbuf(stdout, nullptr, _IOLBF, 1 << 16);
    std::stable_sort(sections().begin(), sections().end(),
                     [](const auto& a, const auto& b) { return a.name < b.name; });
    for (int i = 1; i < argc; ++i) {
        const std::string argument = argv[i];
        const bool has_value = i + 1 < argc;
        if (argument == "--list")
            options.list = true;
        else if (argument == "--verbose")
            options.verbose = true;
        else if (argument == "--filter" && has_value)
            options.filters.push_back(argv[++i]);
        else if (argument == "--after" && has_value)
            options.after = argv[++i];
        else if (argument == "--dump" && has_value)
            options.dump = argv[++i];
        else if (argument == "--max-reports" && has_value)
            options.max_reports = std::atoi(argv[++i]);
        else if (argument == "--sections") {
            for (size_t s = 0; s < sections().size(); ++s) {
                if (s == 0 || sections()[s].name != sections()[s - 1].name) {
                    std::printf("%s\n", sections()[s].name.c_str());
                }
            }
            return 0;
        } else {
            return usage();
        }
    }
    for (const auto& section : sections()) {
        state.section = section.name;
        section.body();
    }
    return print_totals() ? 1 : 0;
}
