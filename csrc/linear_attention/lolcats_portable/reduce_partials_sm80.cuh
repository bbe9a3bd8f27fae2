// The sums of lolcats/reduce_partials_sm90.cuh for every GPU from compute capability 8.0 on.
#pragma once

#include "csrc/linear_attention/lolcats/reduce_partials_sm90.cuh"
