"""Every op in plain PyTorch: what the kernels compute, and their implementation on CPU tensors.

The functions take any floating-point dtype, float64 for expected values, any device, and are
differentiable by PyTorch's own autograd.
"""

from .attention import attention, attention_backward
from .attention_varlen import attention_varlen, attention_varlen_backward
from .based import BasedState, based, based_backward, based_features
from .fp8_gemm import fp8_gemm
from .fp8_quantize import fp8_quantize
from .gemm import gemm

__all__ = [
    "BasedState",
    "attention",
    "attention_backward",
    "attention_varlen",
    "attention_varlen_backward",
    "based",
    "based_backward",
    "based_features",
    "fp8_gemm",
    "fp8_quantize",
    "gemm",
]
