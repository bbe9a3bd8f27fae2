// error: the layout needs a struct output_block: what a producer stores for one iteration
#include <prototype.cuh>

struct Template {
    struct layout {
        struct globals {};
        struct input_block {};
    };
    struct producer {};
    struct consumer {};
};
auto* kernel = &kittens::prototype::lcsf::kernel<Template>;
