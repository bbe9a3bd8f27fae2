"""The package's ops: one module per op, with its public function and all that PyTorch has to know.

A module holds the public function (checks, then the cheapest op that does the job), the shape
function that words the errors and serves the eager checks, the fake and the CPU implementation
alike, and the op's fake, autograd, autocast, vmap and flop registrations. The schemas and the CUDA
implementations come from the compiled libraries, which the package loads before this folder.
"""

from ._fp8_linear import Fp8Linear, fp8_linear
from .append_kv import append_kv
from .attention import attention
from .attention_paged import attention_decode, attention_paged
from .attention_schedule import attention_schedule
from .attention_varlen import attention_varlen
from .based import based, based_linear_prefill
from .based_decode import based_decode
from .causal_conv1d import causal_conv1d
from .causal_conv1d_update import causal_conv1d_update
from .fp8_gemm import fp8_gemm
from .fp8_quantize import fp8_quantize
from .gated_delta_rule import gated_delta_rule
from .gated_delta_rule_decode import gated_delta_rule_decode
from .gemm import gemm
from .grouped_gemm import grouped_gemm
from .layer_norm import layer_norm
from .layer_norm_quantize import layer_norm_quantize
from .linear_attention import linear_attention
from .linear_attention_decode import linear_attention_decode
from .lolcats import hedgehog, lolcats
from .lolcats_decode import lolcats_decode
from .merge_attention import merge_attention
from .mxfp8_dequantize import mxfp8_dequantize
from .mxfp8_gemm import mxfp8_gemm
from .mxfp8_prepare import mxfp8_prepare
from .mxfp8_quantize import mxfp8_quantize
from .nvfp4_dequantize import nvfp4_dequantize
from .nvfp4_gemm import nvfp4_gemm
from .nvfp4_prepare import nvfp4_prepare
from .nvfp4_quantize import nvfp4_quantize
from .rms_norm import rms_norm
from .rms_norm_quantize import rms_norm_quantize
from .rotary import rotary
from .ssd import ssd
from .ssd_decode import ssd_decode

__all__ = [
    "Fp8Linear",
    "append_kv",
    "attention",
    "attention_decode",
    "attention_paged",
    "attention_schedule",
    "attention_varlen",
    "based",
    "based_decode",
    "based_linear_prefill",
    "causal_conv1d",
    "causal_conv1d_update",
    "fp8_gemm",
    "fp8_linear",
    "fp8_quantize",
    "gated_delta_rule",
    "gated_delta_rule_decode",
    "gemm",
    "grouped_gemm",
    "hedgehog",
    "layer_norm",
    "layer_norm_quantize",
    "linear_attention",
    "linear_attention_decode",
    "lolcats",
    "lolcats_decode",
    "merge_attention",
    "mxfp8_dequantize",
    "mxfp8_gemm",
    "mxfp8_prepare",
    "mxfp8_quantize",
    "nvfp4_dequantize",
    "nvfp4_gemm",
    "nvfp4_prepare",
    "nvfp4_quantize",
    "rms_norm",
    "rms_norm_quantize",
    "rotary",
    "ssd",
    "ssd_decode",
]
