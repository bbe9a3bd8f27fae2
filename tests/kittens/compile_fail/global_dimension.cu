// error: a global layout's dimension is a positive number, or -1 when known at run time
#include <kittens.cuh>

using namespace kittens;

void host(float* data) { gl<float, 1, 1, 0, -1> g(data, nullptr, nullptr, 1, 1); }
