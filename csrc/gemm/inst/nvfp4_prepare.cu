// NVFP4 weights into the layout of the product, and back.
#include "csrc/gemm/nvfp4/prepare_sm90.cuh"

namespace thunderkittens::nvfp4_gemm {
template void run<Nvfp4Pass::prepare>(const PrepareParams&, Stream);
template void run<Nvfp4Pass::restore>(const PrepareParams&, Stream);
}  // namespace thunderkittens::nvfp4_gemm
