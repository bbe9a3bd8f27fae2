"""Every op in plain PyTorch: what the kernels compute, and their implementation on CPU tensors.

The functions take any floating-point dtype, float64 for expected values, any device, and are
differentiable by PyTorch's own autograd.
"""

from ._fp8_linear import fp8_linear
from .append_kv import append_kv
from .attention import attention, attention_backward
from .attention_paged import attention_paged
from .attention_schedule import attention_schedule
from .attention_varlen import attention_varlen, attention_varlen_backward
from .based import BasedState, based, based_backward, based_features
from .based_decode import based_decode
from .causal_conv1d import causal_conv1d, causal_conv1d_backward
from .causal_conv1d_update import causal_conv1d_update
from .fp8_gemm import fp8_gemm
from .fp8_quantize import fp8_quantize
from .gated_delta_rule import (
    DeltaRuleOperands,
    delta_rule_chunks,
    delta_rule_gate,
    delta_rule_operands,
    delta_rule_tokens,
    gated_delta_rule,
    gated_delta_rule_chunked,
)
from .gated_delta_rule_decode import gated_delta_rule_decode
from .gemm import gemm
from .grouped_gemm import grouped_gemm
from .layer_norm import layer_norm
from .layer_norm_quantize import layer_norm_quantize
from .linear_attention import linear_attention
from .linear_attention_decode import linear_attention_decode
from .lolcats import (
    LolcatsState,
    cached_positions,
    empty_state,
    folded_tokens,
    lolcats,
    lolcats_features,
    lolcats_rows,
)
from .lolcats_decode import lolcats_decode
from .merge_attention import merge_attention
from .mxfp8_dequantize import mxfp8_dequantize
from .mxfp8_gemm import mxfp8_gemm
from .mxfp8_prepare import Mxfp8Operand, mxfp8_prepare
from .mxfp8_quantize import mxfp8_quantize
from .nvfp4_dequantize import nvfp4_dequantize
from .nvfp4_gemm import nvfp4_gemm
from .nvfp4_prepare import Nvfp4Weight, nvfp4_prepare
from .nvfp4_quantize import nvfp4_quantize
from .rms_norm import rms_norm
from .rms_norm_quantize import rms_norm_quantize
from .rotary import rotary
from .ssd import ssd
from .ssd_decode import ssd_decode

__all__ = [
    "BasedState",
    "DeltaRuleOperands",
    "LolcatsState",
    "Mxfp8Operand",
    "Nvfp4Weight",
    "append_kv",
    "attention",
    "attention_backward",
    "attention_paged",
    "attention_schedule",
    "attention_varlen",
    "attention_varlen_backward",
    "based",
    "based_backward",
    "based_decode",
    "based_features",
    "cached_positions",
    "causal_conv1d",
    "causal_conv1d_backward",
    "causal_conv1d_update",
    "delta_rule_chunks",
    "delta_rule_gate",
    "delta_rule_operands",
    "delta_rule_tokens",
    "empty_state",
    "folded_tokens",
    "fp8_gemm",
    "fp8_linear",
    "fp8_quantize",
    "gated_delta_rule",
    "gated_delta_rule_chunked",
    "gated_delta_rule_decode",
    "gemm",
    "grouped_gemm",
    "layer_norm",
    "layer_norm_quantize",
    "linear_attention",
    "linear_attention_decode",
    "lolcats",
    "lolcats_decode",
    "lolcats_features",
    "lolcats_rows",
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
