// error: a TMA type must have the element type of its global layout
#include <kittens.cuh>

using namespace kittens;

void host(bf16* data) { gl<bf16, -1, -1, -1, -1, st_fl<64, 64>> g(data, 1, 1, 64, 64); }
