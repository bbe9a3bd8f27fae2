#include "csrc/linear_attention/based/scan_sm90.cuh"

namespace thunderkittens::linear_attention {
template void launch_based_scan<false>(const BasedParams&, const ScanParams&, Stream);
template void launch_based_scan<true>(const BasedParams&, const ScanParams&, Stream);
}  // namespace thunderkittens::linear_attention
