// error: the consumer needs finish(consumer_finish_args<layout>)
#include <prototype.cuh>

using namespace kittens::prototype::lcf;

struct Template {
    struct layout {
        struct globals {};
        struct input_block {};
    };
    static __device__ void common_setup(common_setup_args<layout>) {}
    struct producer {
        static __device__ void setup(producer_setup_args<layout>) {}
        static __device__ void load(producer_load_args<layout>) {}
    };
    struct consumer {
        static __device__ void setup(consumer_setup_args<layout>) {}
        static __device__ void compute(consumer_compute_args<layout>) {}
    };
};
auto* instance = &kernel<Template>;
