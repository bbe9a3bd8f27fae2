// The passes over MXFP8 operands as portable kernels, which do not overlap with what comes before
// and after them.
#pragma once

#include "csrc/gemm/mxfp8/passes_sm90.cuh"
