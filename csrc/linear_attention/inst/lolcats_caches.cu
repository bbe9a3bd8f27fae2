#include "csrc/linear_attention/lolcats/caches_sm90.cuh"
