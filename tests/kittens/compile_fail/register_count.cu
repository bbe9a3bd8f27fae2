// error: setmaxnreg takes a multiple of 8 from 24 to 256
#include <kittens.cuh>

using namespace kittens;

__global__ void kernel() { warpgroup::increase_registers<100>(); }
