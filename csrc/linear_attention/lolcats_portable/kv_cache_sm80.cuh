// The rows of lolcats/kv_cache_sm90.cuh for every GPU from compute capability 8.0 on.
#pragma once

#include "csrc/linear_attention/lolcats/kv_cache_sm90.cuh"
