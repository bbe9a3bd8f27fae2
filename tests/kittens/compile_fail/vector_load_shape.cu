// error: the shared vector must have the register vector's length times the group's
#include <kittens.cuh>

using namespace kittens;

__global__ void kernel() {
    shared_allocator al(shared_memory());
    auto& vec = al.allocate<sv_fl<64>>();
    rv_fl<32> registers;
    warp::load(registers, vec);
}
