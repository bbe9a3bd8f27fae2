// error: a register vector's length must be a multiple of 16
#include <kittens.cuh>

using namespace kittens;

rv_fl<24> vec;
