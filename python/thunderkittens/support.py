"""Whether an op takes a call, asked without running it."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from . import _build, _load, emulation
from .ops import _attention as shared

#: The functions that are ops, with the op of the kernels where the name is another one.
KERNELS = {
    **{
        name: name
        for name in (
            *("append_kv", "attention", "attention_paged", "based", "based_decode", "fp8_gemm"),
            *("causal_conv1d", "causal_conv1d_update"),
            *("fp8_quantize", "gated_delta_rule", "gated_delta_rule_decode", "gemm"),
            *("grouped_gemm", "lolcats", "lolcats_decode"),
            *(
                "merge_attention",
                "mxfp8_dequantize",
                "mxfp8_gemm",
                "mxfp8_prepare",
                "mxfp8_quantize",
            ),
            *("nvfp4_dequantize", "nvfp4_gemm", "nvfp4_prepare", "nvfp4_quantize"),
            *("ssd", "ssd_decode"),
            *("rms_norm", "rms_norm_quantize", "rotary"),
        )
    },
    "attention_decode": "attention_paged",
    "attention_schedule": "attention_paged",
    "attention_varlen": "attention",
    "based_linear_prefill": "based",
    "fp8_linear": "fp8_gemm",
    "hedgehog": "lolcats",
    "linear_attention": "ssd",
    "linear_attention_decode": "ssd_decode",
    "layer_norm": "rms_norm",
    "layer_norm_quantize": "rms_norm_quantize",
}


@dataclass(frozen=True)
class Support:
    """An answer of `is_supported`: true or false, and why not."""

    supported: bool
    reason: str = ""  # empty where the call is supported

    def __bool__(self) -> bool:
        return self.supported


def is_supported(op: str, *args: Any, **options: Any) -> Support:
    """Whether a call would be taken, without running it.

    The function itself is called, on tensors without data, so that the checks are its own; then
    the GPU is looked at. No values are read, nothing is written and nothing is launched. What a
    function checks of values, such as the order of cumulative lengths on a CPU, remains.

    Args:
        op: the name of a function of this package, as "attention".
        args: its arguments.
        options: its keyword arguments.

    Returns:
        An answer that is true or false, with `reason`: the error that the call would raise, or what
        the GPU or this installation lacks. On CPU tensors, where the reference formula runs, every
        call that the checks let through is supported; inside `with tk.emulate():`, those that the
        emulator has a kernel for.

    Raises:
        ValueError: there is no such op.

    Example:
        >>> answer = tk.is_supported("attention", q, k, v, causal=True)
        >>> bool(answer), answer.reason
        (False, 'tk.attention: q has head dim 60; it must be a multiple of 8 from 8 to 256')
    """
    import thunderkittens

    if op not in KERNELS:
        raise ValueError(
            f"tk.is_supported: there is no op {op!r}; it must be one of {', '.join(KERNELS)}"
        )
    given = (args, options)
    try:
        with _without_data(given):
            getattr(thunderkittens, op)(*args, **options)
    except (TypeError, ValueError, RuntimeError) as error:
        return Support(False, str(error))
    reason = _missing(KERNELS[op], list(_tensors(given)))
    return Support(not reason, f"tk.{op}: {reason}" if reason else "")


def _without_data(given: Any) -> Any:
    """Under it, ops are called on tensors that have shapes, dtypes, strides and devices alone."""
    from torch._guards import detect_fake_mode
    from torch._subclasses.fake_tensor import FakeTensorMode

    mode = detect_fake_mode(list(_tensors(given)))
    return FakeTensorMode(allow_non_fake_inputs=True) if mode is None else mode


def _tensors(given: Any) -> Iterator[Tensor]:
    """All tensors of arguments, which may hold them in tuples, dictionaries and dataclasses."""
    if isinstance(given, Tensor):
        yield given
    elif isinstance(given, dict):
        for x in given.values():
            yield from _tensors(x)
    elif isinstance(given, list | tuple):
        for x in given:
            yield from _tensors(x)
    elif hasattr(given, "__dataclass_fields__") and not inspect.isclass(given):
        for name in given.__dataclass_fields__:
            yield from _tensors(getattr(given, name))


def _missing(kernels: str, tensors: list[Tensor]) -> str:
    """What the device of the tensors lacks to run the kernels, or nothing."""
    device = tensors[0].device if tensors else torch.device("cpu")
    if device.type == "cpu":
        if emulation.active() and not emulation.has(kernels):
            return "the emulator has no kernel of it"
        return ""
    if device.type == "meta":
        return ""
    if device.type != "cuda":
        return f"tensors are on {device}; there are kernels for CUDA devices, and the CPU"
    if _load.cuda_problem is not None:
        return _load.cuda_problem
    module = _load.compiled_module()
    if kernels not in module.ops():
        families = ", ".join(_build.record()["families"]) or "no op"
        return (
            f"this build of thunderkittens has no CUDA kernel of it; it was built for: {families}"
        )
    if not torch.cuda.is_available():
        return "torch sees no CUDA device"
    index = torch.cuda.current_device() if device.index is None else device.index
    reason: str = module.no_code_for(shared._device_properties(index), kernels)
    return reason
