// error: the blocks of the layout do not fit into shared memory
#include <prototype.cuh>

struct Template {
    struct layout {
        struct globals {};
        struct input_block {
            kittens::st_bf<64, 256> tile;
        };
    };
    static constexpr int INPUT_PIPE_STAGES = 8;
    struct producer {};
    struct consumer {};
};
constexpr int bytes = kittens::prototype::lcf::shared_bytes<Template>;
