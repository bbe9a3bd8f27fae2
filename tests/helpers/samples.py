"""One small call per op and variant, for the tests of what every op must do."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from .sample import (
    CAST,
    DIFFERENTIABLE,
    MUTATING,
    Sample,
    state_of,
    with_state,
)

__all__ = ["CAST", "DIFFERENTIABLE", "MUTATING", "Sample", "state_of", "with_state"]

SAMPLES = {
    "gemm": Sample("gemm", ((33, 72), (72, 40)), ("packed", "packed_t"), dynamic=((0, 0),)),
    "gemm_bias": Sample(
        "gemm",
        ((2, 33, 72), (72, 40), (40,)),
        ("packed", "sliced_t", "packed"),
        keywords=("bias",),
        dynamic=((0, 1),),
        dtype=torch.float16,
    ),
    "gemm_batched": Sample(
        "gemm",
        ((3, 33, 72), (3, 72, 40)),
        ("packed_t", "sliced"),
        {"out_dtype": torch.float32},
        dynamic=((0, 1),),
    ),
    "gemm_fused": Sample(
        "gemm",
        ((33, 72), (72, 40), (40,), (33, 20)),
        ("packed", "packed_t", "packed", "sliced"),
        {"activation": "swiglu", "alpha": 0.5, "beta": 2.0},
        keywords=("bias", "residual"),
        dynamic=((0, 0), (3, 0)),
    ),
    "grouped_gemm": Sample(
        "grouped_gemm",
        ((33, 72), (3, 72, 40), (3,)),
        ("packed", "packed_t", "33"),
        dynamic=((0, 0),),
        kinds=("operand", "operand", "ends"),
    ),
    "grouped_gemm_columns": Sample(
        "grouped_gemm",
        ((3, 24, 72), (72, 45), (3,)),
        ("packed", "sliced", "45"),
        dtype=torch.float16,
        dynamic=((1, 1),),
        kinds=("operand", "operand", "ends"),
    ),
    "grouped_gemm_parts": Sample(
        "grouped_gemm",
        ((24, 81), (81, 40), (3,)),
        ("packed_t", "packed", "81"),
        dynamic=((0, 1), (1, 0)),
        kinds=("operand", "operand", "ends"),
    ),
    "fp8_quantize": Sample(
        "fp8_quantize",
        ((33, 272),),
        ("sliced",),
        {"granularity": "1x128", "transposed": True},
        dynamic=((0, 0),),
        kinds=("source",),
    ),
    "fp8_quantize_tensor": Sample(
        "fp8_quantize",
        ((33, 72), (1,)),
        ("packed_t", "packed"),
        {"granularity": "tensor", "dtype": torch.float8_e5m2},
        keywords=("scale",),
        dynamic=((0, 0),),
        dtype=torch.float32,
        kinds=("source", "float32"),
    ),
    "fp8_gemm": Sample(
        "fp8_gemm",
        ((33, 272), (272, 40), (33, 3), (3, 1)),
        ("packed",) * 4,
        {"activation": "silu"},
        dynamic=((0, 0), (2, 0)),
        kinds=("float8_e4m3fn", "float8_e4m3fn", "float32", "float32"),
    ),
    "fp8_gemm_rows": Sample(
        "fp8_gemm",
        ((33, 72), (72, 40), (33, 1), (1, 40), (40,)),
        ("packed",) * 5,
        {"accurate": False, "out_dtype": torch.float32},
        keywords=("bias",),
        dynamic=((0, 0), (2, 0)),
        kinds=("float8_e5m2", "float8_e4m3fn", "float32", "float32", "float32"),
    ),
    "fp8_gemm_groups": Sample(
        "fp8_gemm",
        ((33, 72), (3, 72, 40), (33, 1), (1, 40), (3,)),
        ("packed", "packed", "packed", "packed", "33"),
        keywords=("offs",),
        dynamic=((0, 0), (2, 0)),
        kinds=("float8_e4m3fn", "float8_e5m2", "float32", "float32", "ends"),
    ),
    "attention": Sample(
        "attention",
        ((2, 4, 33, 64), (2, 2, 45, 64), (2, 2, 45, 64)),
        ("bshd", "bshd", "sliced"),
        {"causal": True},
        dynamic=((0, 2), (1, 2), (2, 2)),
    ),
    "attention_lse": Sample(
        "attention",
        ((2, 4, 70, 72), (2, 1, 70, 72), (2, 1, 70, 72)),
        ("packed", "bshd_sliced", "sbhd"),
        {"causal": "upper_left", "scale": 0.2, "return_lse": True},
        dynamic=((0, 2), (1, 2), (2, 2)),
        dtype=torch.float16,
    ),
    "attention_options": Sample(
        "attention",
        ((2, 4, 37, 40), (2, 2, 45, 40), (2, 2, 45, 72), (2, 4), (4,)),
        ("bshd", "packed", "packed", "packed", "packed"),
        {"causal": True, "window_size": (20, 5), "softcap": 5.0, "return_lse": True},
        keywords=("alibi_slopes", "sink"),
        dynamic=((0, 2), (1, 2), (2, 2)),
        kinds=("operand", "operand", "operand", "slopes", "sink"),
    ),
    "attention_varlen": Sample(
        "attention_varlen",
        ((70, 4, 64), (81, 2, 64), (81, 2, 64), (4,), (4,)),
        ("packed", "sliced", "packed", "q", "k"),
        {"max_seqlen_q": 300, "max_seqlen_k": 311, "causal": True, "return_lse": True},
        dynamic=((0, 0), (1, 0), (2, 0)),
        kinds=("operand", "operand", "operand", "edges", "edges"),
    ),
    "attention_varlen_sink": Sample(
        "attention_varlen",
        ((50, 6, 64), (50, 2, 64), (50, 2, 64), (4,), (4,), (6,), (6,)),
        ("packed", "packed", "packed", "q", "k", "packed", "packed"),
        {"max_seqlen_q": 256, "max_seqlen_k": 256, "window_size": (9, 3)},
        keywords=("alibi_slopes", "sink"),
        dynamic=((0, 0), (1, 0), (2, 0)),
        dtype=torch.float16,
        kinds=("operand", "operand", "operand", "edges", "edges", "slopes", "sink"),
    ),
    "based": Sample(
        "based",
        ((2, 2, 70, 16), (2, 2, 70, 16), (2, 2, 70, 64)),
        ("bshd", "packed", "sliced"),
        {"normalize": True},
        dynamic=((0, 2), (1, 2), (2, 2)),
    ),
    "based_states": Sample(
        "based",
        ((1, 2, 37, 16), (1, 2, 37, 16), (1, 2, 37, 72)),
        ("packed", "bshd", "packed"),
        {"return_state": True},
        dynamic=((0, 2), (1, 2), (2, 2)),
        dtype=torch.float16,
    ),
    "based_decode": Sample(
        "based_decode",
        ((2, 2, 1, 16), (2, 2, 1, 16), (2, 2, 1, 72), (2, 2, 153, 72), (2, 2, 153)),
        ("packed",) * 5,
        {"normalize": True},
        dtype=torch.float16,
        kinds=("token",) * 3 + ("float32",) * 2,
    ),
    "ssd": Sample(
        "ssd",
        ((2, 4, 70, 64), (2, 4, 70), (4,), (2, 2, 70, 64), (2, 2, 70, 64)),
        ("bshd", "packed", "packed", "sliced", "packed"),
        {"dt_softplus": True},
        dynamic=((0, 2), (1, 2), (3, 2), (4, 2)),
        kinds=("operand", "float32", "rates", "operand", "operand"),
    ),
    "ssd_state": Sample(
        "ssd",
        ((1, 2, 37, 40), (1, 2, 37), (2,), (1, 1, 37, 72), (1, 1, 37, 72), (2,), (1, 2, 37, 40)),
        ("packed", "packed", "packed", "packed", "bshd", "packed", "packed"),
        {"return_state": True},
        keywords=("D", "z"),
        dynamic=((0, 2), (1, 2), (3, 2), (4, 2), (6, 2)),
        dtype=torch.float16,
        kinds=("operand", "float32", "rates", "operand", "operand", "float32", "operand"),
    ),
    "ssd_decode": Sample(
        "ssd_decode",
        ((2, 4, 2, 64), (2, 4, 2), (4,), (2, 2, 2, 64), (2, 2, 2, 64), (2, 4, 64, 64)),
        ("packed",) * 6,
        kinds=("token", "float32", "rates", "token", "token", "float32"),
    ),
    "linear_attention": Sample(
        "linear_attention",
        ((2, 2, 70, 64), (2, 2, 70, 64), (2, 4, 70, 40)),
        ("bshd", "packed", "sliced"),
        {"scale": 0.5},
        dynamic=((0, 2), (1, 2), (2, 2)),
    ),
    "linear_attention_state": Sample(
        "linear_attention",
        ((1, 2, 37, 72), (1, 2, 37, 72), (1, 2, 37, 40), (2,), (1, 2, 37)),
        ("packed",) * 5,
        {"return_state": True, "state_v_first": True},
        keywords=("decay", "g"),
        dynamic=((0, 2), (1, 2), (2, 2), (4, 2)),
        dtype=torch.float16,
        kinds=("operand", "operand", "operand", "rates", "rates"),
    ),
    "linear_attention_decode": Sample(
        "linear_attention_decode",
        ((2, 2, 1, 64), (2, 2, 1, 64), (2, 4, 1, 40), (2, 4, 64, 40)),
        ("packed",) * 4,
        dtype=torch.float16,
        kinds=("token",) * 3 + ("float32",),
    ),
    "causal_conv1d": Sample(
        "causal_conv1d",
        ((2, 16, 40), (16, 4), (16,)),
        ("packed_t", "packed", "packed"),
        {"activation": "silu"},
        keywords=("bias",),
        dynamic=((0, 2),),
        kinds=("operand", "factor", "factor"),
    ),
    "causal_conv1d_states": Sample(
        "causal_conv1d",
        ((1, 12, 37), (12, 3), (3, 12, 2), (4,)),
        ("packed", "packed", "packed", "q"),
        {"return_state": True},
        keywords=("initial_state", "cu_seqlens"),
        dynamic=((0, 2),),
        dtype=torch.float16,
        kinds=("operand", "factor", "operand", "edges"),
    ),
    "causal_conv1d_update": Sample(
        "causal_conv1d_update",
        ((3, 16), (3, 16, 5), (16, 4)),
        ("packed", "packed_t", "packed"),
        {"activation": "silu"},
        kinds=("token", "cache", "float32"),
    ),
    "rms_norm": Sample(
        "rms_norm",
        ((2, 9, 72), (72,)),
        ("sliced", "packed"),
        {"eps": 1e-5, "weight_offset": 1.0},
        dynamic=((0, 1),),
        kinds=("plain", "gain"),
    ),
    "rms_norm_residual": Sample(
        "rms_norm",
        ((5, 64), (64,), (5, 64), (1,)),
        ("packed", "packed", "sliced", "packed"),
        {"dropout_p": 0.25},
        keywords=("residual", "seed"),
        dynamic=((0, 0), (2, 0)),
        dtype=torch.float16,
        kinds=("plain", "gain", "plain", "seed"),
    ),
    "rms_norm_gated": Sample(
        "rms_norm",
        ((2, 3, 64), (64,), (2, 3, 64)),
        ("packed", "packed", "sliced"),
        {"group_size": 16},
        keywords=("gate",),
        dynamic=((0, 1), (2, 1)),
        kinds=("plain", "gain", "plain"),
    ),
    "layer_norm": Sample(
        "layer_norm",
        ((4, 40), (40,), (40,)),
        ("packed_t", "packed", "packed"),
        dynamic=((0, 0),),
        kinds=("plain", "gain", "gain"),
    ),
    "layer_norm_residual": Sample(
        "layer_norm",
        ((2, 7, 33), (33,), (33,), (2, 7, 33)),
        ("packed", "packed", "packed", "packed"),
        keywords=("residual",),
        dynamic=((0, 1), (3, 1)),
        dtype=torch.float16,
        kinds=("plain", "gain", "gain", "plain"),
    ),
    "rms_norm_quantize": Sample(
        "rms_norm_quantize",
        ((3, 9, 264), (264,), (3, 9, 264)),
        ("sliced", "packed", "packed"),
        {"output": "fp8_1x128", "weight_offset": 1.0},
        keywords=("residual",),
        dynamic=((0, 1), (2, 1)),
        kinds=("source", "source", "source"),
    ),
    "rms_norm_quantize_nvfp4": Sample(
        "rms_norm_quantize",
        ((33, 72), (72,), (1,)),
        ("packed_t", "packed", "packed"),
        {"output": "nvfp4"},
        keywords=("scale",),
        dynamic=((0, 0),),
        dtype=torch.float16,
        kinds=("source", "source", "float32"),
    ),
    "layer_norm_quantize": Sample(
        "layer_norm_quantize",
        ((4, 40), (40,), (40,), (1,)),
        ("packed_t", "packed", "packed", "packed"),
        {"output": "fp8_tensor"},
        keywords=("scale",),
        dynamic=((0, 0),),
        dtype=torch.float32,
        kinds=("source", "source", "source", "float32"),
    ),
    "layer_norm_quantize_rows": Sample(
        "layer_norm_quantize",
        ((2, 7, 33), (33,), (33,)),
        ("packed", "packed", "packed"),
        dynamic=((0, 1),),
        kinds=("source", "source", "source"),
    ),
    "rotary": Sample(
        "rotary",
        ((2, 4, 9, 32), (512, 8), (512, 8)),
        ("bshd", "packed", "packed"),
        {"interleaved": True, "heads": 3},
        dynamic=((0, 2),),
        kinds=("plain", "float32", "float32"),
    ),
    "gated_delta_rule": Sample(
        "gated_delta_rule",
        ((2, 1, 70, 64), (2, 1, 70, 64), (2, 2, 70, 64), (2, 2, 70), (2, 2, 70)),
        ("bshd", "packed", "sliced", "packed", "packed"),
        {"qk_l2norm": True, "beta_sigmoid": True},
        dynamic=((0, 2), (1, 2), (2, 2), (3, 2), (4, 2)),
        kinds=("operand",) * 3 + ("gate",) * 2,
    ),
    "gated_delta_rule_packed": Sample(
        "gated_delta_rule",
        ((1, 2, 80, 64), (1, 2, 80, 64), (1, 2, 80, 40), (1, 2, 80), (1, 2, 80), (4,)),
        ("packed", "bshd", "packed", "packed", "packed", "edges"),
        {"qk_l2norm": True, "beta_sigmoid": True, "return_state": True},
        keywords=("cu_seqlens",),
        dynamic=((0, 2), (1, 2), (2, 2), (3, 2), (4, 2)),
        dtype=torch.float16,
        kinds=("operand",) * 3 + ("gate",) * 2 + ("edges",),
    ),
    "gated_delta_rule_decode": Sample(
        "gated_delta_rule_decode",
        ((2, 1, 2, 64), (2, 1, 2, 64), (2, 2, 2, 72), (2, 2, 2), (2, 2, 2), (2, 2, 64, 72)),
        ("packed",) * 6,
        {"qk_l2norm": True, "beta_sigmoid": True},
        dtype=torch.float16,
        kinds=("token",) * 3 + ("float32",) * 3,
    ),
    "lolcats": Sample(
        "lolcats",
        ((2, 2, 130, 64), (2, 1, 130, 64), (2, 1, 130, 64), (2, 64, 32), (2, 64, 32), (2,), (2,)),
        ("bshd", "packed", "sliced", "packed", "packed", "packed", "packed"),
        dynamic=((0, 2), (1, 2), (2, 2)),
        kinds=("operand",) * 3 + ("weight",) * 2 + ("factor",) * 2,
    ),
    "lolcats_state": Sample(
        "lolcats",
        ((1, 2, 140, 64), (1, 2, 140, 64), (1, 2, 140, 64), (2, 64, 64), (2, 64, 64), (2,), (2,)),
        ("packed", "bshd", "packed", "packed", "packed", "packed", "packed"),
        {"return_state": True},
        dynamic=((0, 2), (1, 2), (2, 2)),
        dtype=torch.float16,
        kinds=("operand",) * 3 + ("weight",) * 2 + ("factor",) * 2,
    ),
    "lolcats_published": Sample(
        "lolcats",
        ((2, 2, 150, 64), (2, 1, 150, 64), (2, 1, 150, 64), (2, 64, 32), (2, 64, 32), (2,), (2,)),
        ("packed",) * 7,
        {"window": "published", "return_state": True},
        dynamic=((0, 2), (1, 2), (2, 2)),
        kinds=("operand",) * 3 + ("weight",) * 2 + ("factor",) * 2,
        op_calls=2,
    ),
    "hedgehog": Sample(
        "lolcats",
        (
            (1, 2, 128, 128),
            (1, 2, 128, 128),
            (1, 2, 128, 128),
            (2, 128, 64),
            (2, 128, 64),
            (2,),
            (2,),
        ),
        ("packed",) * 7,
        dynamic=((0, 2), (1, 2), (2, 2)),
        kinds=("operand",) * 3 + ("weight",) * 2 + ("factor",) * 2,
        public="hedgehog",
    ),
    "lolcats_decode": Sample(
        "lolcats_decode",
        (
            *((2, 2, 1, 64), (2, 1, 1, 64), (2, 1, 1, 64), (2, 64, 32), (2, 64, 32), (2,), (2,)),
            *((2, 2, 64, 64), (2, 2, 64), (2, 1, 128, 64), (2, 1, 128, 64), (2,)),
        ),
        ("packed",) * 12,
        kinds=("token",) * 5
        + ("slopes",) * 2
        + ("float32", "float32", "cache", "cache", "lengths"),
    ),
    "lolcats_decode_published": Sample(
        "lolcats_decode",
        (
            *((2, 2, 1, 64), (2, 1, 1, 64), (2, 1, 1, 64), (2, 64, 64), (2, 64, 64), (2,), (2,)),
            *((2, 2, 128, 64), (2, 2, 128), (2, 1, 128, 64), (2, 1, 128, 64), (2,)),
        ),
        ("packed",) * 12,
        {"window": "published"},
        dtype=torch.float16,
        kinds=("token",) * 5
        + ("slopes",) * 2
        + ("float32", "float32", "cache", "cache", "lengths"),
    ),
    "mxfp8_quantize": Sample(
        "mxfp8_quantize",
        ((33, 72),),
        ("packed",),
        {"transpose": True, "rule": "floor"},
        dynamic=((0, 0),),
        kinds=("source",),
    ),
    "mxfp8_quantize_columns": Sample(
        "mxfp8_quantize",
        ((2, 33, 72),),
        ("sliced",),
        {"axis": -2, "dtype": torch.float8_e5m2, "swizzle": False},
        dynamic=((0, 1),),
        dtype=torch.float16,
        kinds=("source",),
    ),
    "mxfp8_dequantize": Sample(
        "mxfp8_dequantize",
        ((33, 72), (33, 3)),
        ("packed", "packed"),
        {"swizzle": False},
        dynamic=((0, 0), (1, 0)),
        kinds=("float8_e4m3fn", "codes"),
    ),
    "mxfp8_prepare": Sample(
        "mxfp8_prepare",
        ((33, 72), (33, 3)),
        ("packed", "packed"),
        {"swizzle": False},
        dynamic=((0, 0), (1, 0)),
        kinds=("float8_e4m3fn", "codes"),
    ),
    "mxfp8_gemm": Sample(
        "mxfp8_gemm",
        ((33, 72), (72, 40), (33, 3), (40, 3)),
        ("packed", "packed", "packed", "packed"),
        {"swizzle": False, "path": "rebased"},
        dynamic=((0, 0), (2, 0)),
        kinds=("float8_e4m3fn", "float8_e4m3fn", "codes", "codes"),
    ),
    "mxfp8_gemm_groups": Sample(
        "mxfp8_gemm",
        ((33, 64), (3, 64, 40), (33, 2), (3, 40, 2), (3,)),
        ("packed", "packed", "packed", "packed", "33"),
        {"swizzle": False, "out_dtype": torch.float32},
        keywords=("offs",),
        dynamic=((0, 0), (2, 0)),
        kinds=("float8_e4m3fn", "float8_e4m3fn", "codes", "codes", "ends"),
    ),
    "nvfp4_quantize": Sample(
        "nvfp4_quantize",
        ((33, 72),),
        ("packed",),
        dynamic=((0, 0),),
        kinds=("source",),
    ),
    "nvfp4_quantize_scaled": Sample(
        "nvfp4_quantize",
        ((2, 33, 72), (2,)),
        ("sliced", "packed"),
        {"block": "16x16", "swizzle": False},
        keywords=("global_scale",),
        dynamic=((0, 1),),
        dtype=torch.float32,
        kinds=("source", "float32"),
    ),
    "nvfp4_dequantize": Sample(
        "nvfp4_dequantize",
        ((2, 33, 36), (2, 33, 5), (2,)),
        ("packed", "packed", "packed"),
        {"swizzle": False, "dtype": torch.float32},
        dynamic=((0, 1), (1, 1)),
        kinds=("codes", "float8_e4m3fn", "float32"),
    ),
}


def leaves(sample: Sample, device: str, **options: Any) -> list[Tensor]:
    """Operands that require gradients where they have any."""
    return [
        x.detach().requires_grad_(sample.kind(i) in DIFFERENTIABLE)
        for i, x in enumerate(sample.tensors(device, **options))
    ]


def forward_and_backward(
    function: Callable[..., tuple[Tensor, ...]], tensors: Sequence[Tensor]
) -> list[Tensor]:
    """Outputs and gradients of a call, with a fixed gradient of the outputs."""
    outputs = function(*tensors)
    if not any(x.requires_grad for x in tensors):
        return list(outputs)
    loss = sum((y.float() * torch.cos(torch.arange(y.numel(), device=y.device)).view(y.shape)).sum()
               for y in outputs)  # fmt: skip
    return [*outputs, *torch.autograd.grad(loss, [x for x in tensors if x.requires_grad])]


def assert_equal(actual: Sequence[Tensor], expected: Sequence[Tensor]) -> None:
    """Bit by bit, strides included."""
    assert len(actual) == len(expected)
    for x, y in zip(actual, expected, strict=True):
        assert x.stride() == y.stride()
        assert equal(x, y)


def equal(x: Tensor, y: Tensor) -> bool:
    """`torch.equal`, also of floats of one byte, by their bits."""
    if x.dtype.itemsize > 1 or x.dtype != y.dtype:
        return torch.equal(x, y)
    return torch.equal(x.view(torch.uint8), y.view(torch.uint8))


def assert_close(actual: Tensor, expected: Tensor) -> None:
    """`torch.testing.assert_close`, for floats of one byte by their bits."""
    if expected.dtype.itemsize > 1:
        torch.testing.assert_close(actual, expected)
    else:
        assert actual.dtype == expected.dtype
        assert equal(actual, expected)


every_sample = pytest.mark.parametrize("sample", SAMPLES.values(), ids=SAMPLES)
every_mappable_sample = pytest.mark.parametrize(
    "sample",
    [s for s in SAMPLES.values() if s.op not in MUTATING],
    ids=[name for name, s in SAMPLES.items() if s.op not in MUTATING],
)
_differentiable = {
    name: s
    for name, s in SAMPLES.items()
    if any(s.kind(i) in DIFFERENTIABLE for i in range(len(s.shapes)))
}
every_differentiable_sample = pytest.mark.parametrize(
    "sample", _differentiable.values(), ids=_differentiable
)


def _graphs(samples: dict[str, Sample]) -> pytest.MarkDecorator:
    """For what takes long, such as compiling: of each op the first sample at the lowest
    intensity."""
    first = {s.op: name for name, s in reversed(samples.items())}.values()
    parameters = [
        pytest.param(s, id=name, marks=pytest.mark.intensity(1 if name in first else 2))
        for name, s in samples.items()
    ]
    return pytest.mark.parametrize("sample", parameters)


every_graph = _graphs(SAMPLES)
every_differentiable_graph = _graphs(_differentiable)
# Of the ops that have gradients.
one_per_op = pytest.mark.parametrize(
    "sample",
    [
        SAMPLES["gemm_bias"],
        SAMPLES["attention_lse"],
        SAMPLES["attention_varlen_sink"],
        SAMPLES["based"],
        SAMPLES["lolcats"],
        SAMPLES["gated_delta_rule"],
    ],
    ids=["gemm", "attention", "attention_varlen", "based", "lolcats", "gated_delta_rule"],
)
