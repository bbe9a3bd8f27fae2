// A small framework for unit tests of the tile library. A section is a function that runs cases; a
// case declares inputs and outputs, launches a kernel and states what every output must hold. Host
// values are doubles; the framework encodes them in the case's number formats with code of its own,
// poisons everything that a case does not declare with NaN, and checks after the launch that
// inputs, padding and the regions around the outputs are untouched.
//
// Nothing here depends on what a kernel is made of: device memory is reached through `unit.cu`
// alone.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <limits>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#ifndef INTENSITY
#define INTENSITY 2
#endif

namespace unit {

inline constexpr int intensity = INTENSITY;
static_assert(intensity >= 1 && intensity <= 4, "INTENSITY is 1, 2, 3 or 4");

using Values = std::vector<double>;
inline constexpr double poison = std::numeric_limits<double>::quiet_NaN();

// Number formats. NaN is encoded as all ones, which is a NaN in each of them, and the poison.
enum class Type { f32, bf16, f16, e4m3, e5m2 };
struct Format {
    const char* name;
    int bytes, exponent_bits, mantissa_bits;
    double largest;
};
const Format& format(Type type);
uint32_t encode(Type type, double value);  // to nearest even; 8-bit types saturate
double decode(Type type, uint32_t bits);
double rounded(Type type, double value);
Values rounded(Type type, Values values);
// Half a unit in the last place, relative.
double unit_roundoff(Type type);

// |actual - expected| <= absolute + relative * |expected|; bitwise equality when `exact`.
struct Tolerance {
    bool exact = true;
    double relative = 0, absolute = 0;
};
inline constexpr Tolerance bit_exact{};
// The expected value goes through `roundings` roundings to the type; `absolute` bounds what came
// before.
Tolerance within(Type type, double roundings = 1, double absolute = 0);

// A strided tensor of four dimensions in a buffer.
struct View {
    int b = 1, d = 1, r = 1, c = 1;
    int64_t batch_stride = 0, depth_stride = 0, row_stride = 0;

    static View contiguous(int b, int d, int r, int c);
    // Rows padded by `row_pad` elements, depth and batch by `pad` rows of that length.
    static View padded(int b, int d, int r, int c, int row_pad, int pad);
    size_t extent() const;  // elements of the buffer that holds it
    size_t index(int ib, int id, int ir, int ic) const;
    bool contains(int ib, int id, int ir, int ic) const;
};

class Case {
  public:
    explicit Case(std::string name);

    const std::string& name() const { return name_; }
    // Pseudo-random values, the same in every run of this case, representable in `type`.
    Values uniform(Type type, size_t count, double low = -1, double high = 1);
    Values integers(size_t count, int low, int high);
    // For a view: values in its elements, poison in its padding.
    Values uniform(Type type, const View& view, double low = -1, double high = 1);

    // Device address of a new buffer; unused elements are poison.
    void* input(const char* name, Type type, const Values& values);
    void* output(const char* name, Type type, size_t count);
    void* output(const char* name, Type type, const Values& initial);
    template <class T>
    T* input(const char* name, const Values& values);
    template <class T>
    T* output(const char* name, size_t count);
    template <class T>
    T* output(const char* name, const Values& initial);

    // States what the output declared last, or `name`, must hold.
    void expect(const Values& expected, Tolerance tolerance = bit_exact, int columns = 0);
    void expect(const char* name, const Values& expected, Tolerance tolerance = bit_exact,
                int columns = 0);

    // Copies the inputs to the device, calls `launch`, copies everything back.
    void launch(const std::function<void()>& launch);

  private:
    friend class Runner;
    struct Buffer {
        std::string name;
        Type type;
        size_t offset, count;
        bool is_output = false, has_expectation = false;
        Values expected;
        Tolerance tolerance;
        int columns = 0;
    };
    void* add(const char* name, Type type, const Values& values, bool is_output);
    double next();
    std::string verify();  // empty when all is well, else the first difference
    std::string compare(const Buffer& buffer) const;
    void dump(const std::string& folder, const std::string& reason) const;
    double element(const Buffer& buffer, size_t i) const;

    std::string name_;
    uint64_t state_;
    std::vector<Buffer> buffers_;
    std::vector<uint8_t> before_, after_;
    bool launched_ = false;
};

// Runs one case, unless the command line filters it out. Exceptions fail the case.
void run(const std::string& name, const std::function<void(Case&)>& body);

// Registers a section; `name` is the first part of its cases' names.
struct Section {
    Section(const char* name, void (*body)());
};

std::string text(const char* format, ...);

// Calls body(std::integral_constant) for every value, body(std::type_identity) for every type.
template <int... values, class Body>
void for_values(Body body) {
    (body(std::integral_constant<int, values>{}), ...);
}
template <class... Types, class Body>
void for_types(Body body) {
    (body(std::type_identity<Types>{}), ...);
}
// first, first + step, ..., last
template <int first, int last, int step, class Body>
void for_range(Body body) {
    [&]<int... i>(std::integer_sequence<int, i...>) {
        for_values<(first + i * step)...>(body);
    }(std::make_integer_sequence<int, (last - first) / step + 1>{});
}

}  // namespace unit
