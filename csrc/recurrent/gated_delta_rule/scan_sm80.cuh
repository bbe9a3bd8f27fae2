// The states between segments of scan_sm90.cuh for every GPU from compute capability 8.0 on.
#pragma once

#include "csrc/recurrent/gated_delta_rule/scan_sm90.cuh"
