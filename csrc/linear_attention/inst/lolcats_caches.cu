#include "csrc/linear_attention/lolcats_caches_sm90.cuh"
