// The ops rotary, rotary_forward and rotary_forward.in_place for CUDA.
#include "csrc/common/tensor.h"
#include "csrc/rotary/rotary_body.h"

namespace thunderkittens::rotary {
namespace {

using Given = std::optional<Tensor>;

Tensor rotary(const Tensor& x, const Tensor& cos, const Tensor& sin, const Given& positions,
              const Given& offsets, const Given& cu_seqlens, bool interleaved, bool inverse,
              int64_t heads) {
    Tensor out;
    rotary_body<Tensor>(gpu, x, &out,
                        {cos, sin, positions, offsets, cu_seqlens, interleaved, inverse, heads});
    return out;
}

void rotary_in_place(Tensor x, const Tensor& cos, const Tensor& sin, const Given& positions,
                     const Given& offsets, const Given& cu_seqlens, bool interleaved, bool inverse,
                     int64_t heads) {
    rotary_body<Tensor>(gpu, x, nullptr,
                        {cos, sin, positions, offsets, cu_seqlens, interleaved, inverse, heads});
}

}  // namespace
}  // namespace thunderkittens::rotary

STABLE_TORCH_LIBRARY_IMPL(thunderkittens, CUDA, m) {
    m.impl("rotary", TORCH_BOX(&thunderkittens::rotary::rotary));
    m.impl("rotary_forward", TORCH_BOX(&thunderkittens::rotary::rotary));
    m.impl("rotary_forward.in_place", TORCH_BOX(&thunderkittens::rotary::rotary_in_place));
}
