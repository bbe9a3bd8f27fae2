// The kernels of the gradient that do not depend on a type, which one file of the build has.
#pragma once

#include "csrc/recurrent/gradient/finish_sm90.cuh"
#include "csrc/recurrent/gradient/gates_sm90.cuh"
#include "csrc/recurrent/gradient/scan_sm90.cuh"
