// The kernels for every GPU from compute capability 8.0 on: those of Hopper, compiled once more.
// Codes are made by operations on bits where the GPU has no conversion.
#pragma once

#include "csrc/norm/quantize/quantize_sm90.cuh"
