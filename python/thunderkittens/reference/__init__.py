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
from .mxfp8_dequantize import mxfp8_dequantize
from .mxfp8_quantize import mxfp8_quantize
from .nvfp4_dequantize import nvfp4_dequantize
from .nvfp4_gemm import nvfp4_gemm
from .nvfp4_prepare import Nvfp4Weight, nvfp4_prepare
from .nvfp4_quantize import nvfp4_quantize

__all__ = [
    "BasedState",
    "Nvfp4Weight",
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
    "mxfp8_dequantize",
    "mxfp8_quantize",
    "nvfp4_dequantize",
    "nvfp4_gemm",
    "nvfp4_prepare",
    "nvfp4_quantize",
]
