// error: the layout needs a struct globals: the kernel's only argument
#include <prototype.cuh>

struct Template {
    struct layout {
        struct input_block {};
    };
    struct producer {};
    struct consumer {};
};
auto* kernel = &kittens::prototype::lcf::kernel<Template>;
