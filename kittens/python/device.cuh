// The device that the functions of a module run on: a GPU where nvcc compiles it, or the emulator.
#pragma once

#if defined(__CUDACC__)
#include "gpu.cuh"
#else
#include "emulator.cuh"
#endif
