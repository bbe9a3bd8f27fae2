"""`tk.convert`: the linear layers of a model that exists, on the package's products.

Layers are converted in place: each stays the object that it is, with its name, its hooks and its
parameters, and becomes one of the classes of `nn.linear`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..ops._block_scaled import scale_shape
from ..ops._fp8_linear import Fp8Linear, fp8_linear
from ..ops.gemm import gemm
from ..ops.nvfp4_prepare import prepared_shape
from ..reference.nvfp4_prepare import Nvfp4Weight
from ..support import is_supported
from .linear import (
    HALVES,
    PAIR,
    FusedSwiglu,
    GemmLinear,
    Mxfp8Linear,
    Nvfp4Linear,
    _Quantized,
    base_of,
    fused_class,
    is_swiglu,
    lay_behind,
)

CLASSES: dict[str, Any] = {
    "gemm": GemmLinear,
    "fp8": Fp8Linear,
    "nvfp4": Nvfp4Linear,
    "mxfp8": Mxfp8Linear,
}
_FP8_OPTIONS = {"scaling": "block", "grad_dtype": torch.float8_e4m3fn, "accurate": True}
_ROWS = 1024  # of a batch, that errors are measured on

Filter = Callable[[nn.Module, str], bool]


@dataclass(frozen=True)
class LinearReport:
    """What became of one linear layer."""

    name: str
    shape: tuple[int, int]  #: of the weight, (N, K)
    kind: str  #: what it runs on now: "gemm", "fp8", "nvfp4", "mxfp8", or "" for PyTorch
    fused: bool  #: whether it is half of a SwiGLU pair that is one product
    reason: str  #: why it was left as it was; empty if it was not
    error: float | None  #: of its product, relative to the norm of the exact one, on the batch


@dataclass(frozen=True)
class ConvertReport:
    """What `convert` did, and what it did not do. `print` shows a table."""

    linear: str | None
    layers: tuple[LinearReport, ...]
    memory_before: int  #: bytes of the model's parameters and buffers
    memory_after: int

    @property
    def converted(self) -> tuple[LinearReport, ...]:
        """The layers that run on what was asked for."""
        return tuple(x for x in self.layers if not x.reason)

    @property
    def left(self) -> tuple[LinearReport, ...]:
        """The layers that stayed as they were."""
        return tuple(x for x in self.layers if x.reason)

    def __str__(self) -> str:
        head = (
            f"linear={self.linear!r}: {len(self.converted)} of {len(self.layers)} linear layers; "
            f"{self.memory_before / 2**20:.1f} MiB before, {self.memory_after / 2**20:.1f} after"
        )
        width = max((len(x.name) for x in self.layers), default=0)
        lines = [head]
        for x in self.layers:
            error = "" if x.error is None else f"  error {x.error:.2e}"
            what = f"left: {x.reason}" if x.reason else (x.kind or "PyTorch") + " fused" * x.fused
            lines.append(f"  {x.name:<{width}}  {x.shape[0]:>6} x {x.shape[1]:<6} {what}{error}")
        return "\n".join(lines)


def convert(
    model: nn.Module,
    linear: str | None = "gemm",
    filter: Filter | None = None,
    *,
    batch: Any = None,
) -> ConvertReport:
    """Puts a model's linear layers on this package's products, in place.

    - "gemm": `tk.gemm`, in bfloat16 and float16 (also by autocast), for training and inference.
    - "fp8": `tk.fp8_linear`, for training: products of fp8 matrices, parameters in their dtype.
    - "nvfp4": `tk.nvfp4_gemm`, for inference: weights of 4 bits, activations as they are.
    - "mxfp8": `tk.mxfp8_gemm`, for inference: weights of 8 bits, activations rounded to 8 bits.
    - None: back to `torch.nn.Linear`, from "gemm" and "fp8".

    Layers remain the same objects. With "gemm" and "fp8" so do their parameters: names, shapes and
    values of `state_dict` are unchanged, an optimizer made before goes on, tied weights stay tied.
    Where a layer is `down_proj(silu(gate_proj(x)) * up_proj(x))`, as in Llama, Qwen and Mistral,
    the first two products are one, whose weights are laid behind each other in memory; with "gemm"
    the activation is part of it. With "nvfp4" and "mxfp8" the weight of a layer becomes buffers of
    that format, and is freed; its state is loaded into a model that was converted likewise.

    Only layers whose class is `torch.nn.Linear` itself are converted: subclasses, such as those of
    adapters, are other layers. A layer that is converted already stays so. Works with
    `torch.compile`, `copy.deepcopy`, pickles and `to`; convert before FSDP or DDP wraps the model.

    Args:
        model: the model; a `torch.nn.Linear` itself is one too.
        linear: one of the above.
        filter: called with each `torch.nn.Linear` and its name; those for which it is false stay.
            Output heads lose most by 4 and 8 bits: `filter=lambda layer, name: name != "lm_head"`.
        batch: a tensor, a tuple of arguments or a dictionary of keyword arguments for the model. It
            is called once, before the conversion and without gradients, and each layer's product
            is compared with the exact one of the same activations.

    Returns:
        What was converted, and what was not and why, bytes before and after, and errors where there
        is a batch.

    Raises:
        TypeError: model is no `torch.nn.Module`, or filter cannot be called.
        ValueError: linear is none of the above, or a layer has no data (it is on the meta device).

    Example:
        >>> print(tk.convert(model, "fp8", batch=tokens))
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"tk.convert: model must be a torch.nn.Module, got {type(model).__name__}")
    if linear is not None and linear not in CLASSES:
        raise ValueError(f"tk.convert: linear is {linear!r}; it must be one of {(*CLASSES, None)}")
    if filter is not None and not callable(filter):
        raise TypeError(f"tk.convert: filter must be callable, got {type(filter).__name__}")
    before = _bytes(model)
    layers = list(_linears(model))
    users = _users(model)
    reasons = {name: _refusal(m, name, linear, filter, users) for name, m in layers}
    chosen = [(name, m) for name, m in layers if not reasons[name]]
    errors = {} if batch is None else _errors(model, chosen, linear, batch)
    reports = [
        LinearReport(name, _shape(m), _kind(m), False, reasons[name], errors.get(name))
        for name, m in layers
    ]
    pairs = [] if linear is None else [m for m in model.modules() if is_swiglu(m)]
    for _, layer in chosen:
        _become(layer, linear)
    for block in model.modules():
        if linear is None and isinstance(block, FusedSwiglu):
            _unfuse(block)
    for block in pairs:
        gate, up = (getattr(block, name) for name in PAIR)
        if type(gate) is type(up) is CLASSES[linear or "gemm"]:
            if linear in ("gemm", "fp8"):
                lay_behind(gate.weight, up.weight)
            block.__class__ = fused_class(type(block))
    fused = {
        id(getattr(block, name))
        for block in model.modules()
        if isinstance(block, FusedSwiglu)
        for name in PAIR
    }
    reports = [
        replace(x, kind=_kind(m), fused=id(m) in fused)
        for x, (_, m) in zip(reports, layers, strict=True)
    ]
    return ConvertReport(linear, tuple(reports), before, _bytes(model))


def _linears(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The model's linear layers, converted ones included."""
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear | _Quantized):
            yield name, module


def _kind(module: nn.Module) -> str:
    return next((kind for kind, of in CLASSES.items() if type(module) is of), "")


def _shape(module: Any) -> tuple[int, int]:
    return module.out_features, module.in_features


def _users(model: nn.Module) -> dict[int, list[str]]:
    """The names that each parameter has in different modules, by its identity."""
    users: dict[int, list[str]] = {}
    for name, module in model.named_modules():
        for key, parameter in module._parameters.items():
            users.setdefault(id(parameter), []).append(f"{name}.{key}")
    return users


def _refusal(
    module: Any, name: str, linear: str | None, filter: Filter | None, users: dict[int, list[str]]
) -> str:
    """Why a layer is left as it is, or nothing."""
    kind = _kind(module)
    if isinstance(module, _Quantized):
        return "" if kind == linear else f"its weight is {kind.upper()}; load the model again"
    if not kind and type(module) is not nn.Linear:
        return f"it is a {type(module).__name__}, not torch.nn.Linear itself"
    if kind == linear or (not kind and linear is None):
        return ""
    if filter is not None and not filter(module, name):
        return "the filter left it out"
    weight = module.weight
    if weight.is_meta:
        raise ValueError(
            f"tk.convert: {name or 'the layer'} is on the meta device, without data; load the "
            "weights first"
        )
    if linear is None:
        return ""
    if "forward" in module.__dict__:
        return "its forward has been replaced"
    if type(weight.data) is not Tensor:
        return f"its weight is a {type(weight.data).__name__}"
    if linear in ("nvfp4", "mxfp8"):
        others = [x for x in users[id(weight)] if x != f"{name}.weight"]
        if others:
            return f"its weight is also {others[0]}"
        if weight.dtype not in HALVES:
            return f"its weight is {weight.dtype}; supported are torch.bfloat16 and torch.float16"
    return _unsupported(linear, weight, module.bias)


def _unsupported(linear: str, weight: Tensor, bias: Tensor | None) -> str:
    """What the op has against a layer's product, or nothing."""

    def empty(shape: Any, dtype: torch.dtype) -> Tensor:
        return weight.new_empty((1,) * len(shape), dtype=dtype).expand(tuple(shape))

    n, k = weight.shape
    dtype = weight.dtype if weight.dtype in HALVES else torch.bfloat16
    x = empty((2, k), dtype)
    if linear == "fp8":
        return is_supported("fp8_linear", x.to(weight.dtype), weight, bias).reason
    row = None if bias is None else empty((n,), dtype)
    if linear == "gemm":
        # Other dtypes than these run under autocast.
        other = weight.dtype not in (*HALVES, torch.float32)
        return is_supported("gemm", x, weight if other else empty((k, n), dtype), bias=row).reason
    if linear == "nvfp4":
        if k % 16 != 0:
            return f"it has {k} input features; NVFP4 needs a multiple of 16"
        kept = Nvfp4Weight(
            empty(prepared_shape(n, k), torch.uint8),
            weight.new_empty((), dtype=torch.float32),
            n,
            k,
        )
        return is_supported("nvfp4_gemm", x, kept, bias=row).reason
    codes = [empty(shape, torch.float8_e4m3fn) for shape in ((2, k), (n, k))]
    scales = [empty(scale_shape(y.shape, 32, True), torch.uint8) for y in codes]
    return is_supported("mxfp8_gemm", codes[0], codes[1].t(), *scales).reason


def _become(layer: Any, linear: str | None) -> None:
    """Makes a layer one of the class."""
    kind = _kind(layer)
    if kind == (linear or ""):
        return
    if kind == "fp8":
        for name in _FP8_OPTIONS:
            layer.__dict__.pop(name, None)
    if linear is None:
        layer.__class__ = nn.Linear
        return
    if linear == "fp8":
        layer.__dict__.update(_FP8_OPTIONS)
    if linear in ("nvfp4", "mxfp8"):
        weight, bias = layer.weight, layer.bias
        del layer.weight, layer.bias
        layer.__class__ = CLASSES[linear]
        layer.become(weight, bias)
    layer.__class__ = CLASSES[linear]


def _unfuse(block: Any) -> None:
    """Back to the class that it had, where both halves are PyTorch's again."""
    if all(type(getattr(block, name)) is nn.Linear for name in PAIR):
        block.__class__ = base_of(type(block))


def _bytes(model: nn.Module) -> int:
    """Bytes of parameters and buffers, of tensors that share memory once."""
    seen: dict[Any, int] = {}
    for x in (*model.parameters(), *model.buffers()):
        if x.is_meta or type(x.data) is not Tensor:
            seen[id(x)] = x.nbytes
        else:
            storage = x.untyped_storage()
            seen[(x.device, storage.data_ptr())] = storage.nbytes()
    return sum(seen.values())


def _errors(
    model: nn.Module, layers: list[tuple[str, nn.Module]], linear: str | None, batch: Any
) -> dict[str, float]:
    """Errors of the layers' products on a batch, which goes through the model as it is."""
    errors: dict[str, Tensor] = {}
    handles = []
    for name, layer in layers:
        if isinstance(layer, nn.Linear) and linear is not None:

            def measure(module: Any, given: Any, out: Any, name: str = name) -> None:
                rows = given[0].detach().reshape(-1, module.in_features)[:_ROWS]
                errors[name] = _error(linear, rows, module.weight, module.bias)

            handles.append(layer.register_forward_hook(measure))
    try:
        with torch.no_grad():
            if isinstance(batch, dict):
                model(**batch)
            else:
                model(*(batch if isinstance(batch, tuple) else (batch,)))
    finally:
        for handle in handles:
            handle.remove()
    return {name: float(x) for name, x in errors.items()}


def _error(linear: str, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """The norm of a product's error, as a part of the norm of the exact product."""
    exact = F.linear(x.double(), weight.double(), None if bias is None else bias.double())
    if linear == "fp8":
        out = fp8_linear(x, weight, bias)
    else:
        dtype = x.dtype if x.dtype in HALVES else torch.bfloat16
        row = None if bias is None else bias.to(dtype)
        if linear == "gemm":
            out = gemm(x.to(dtype), weight.to(dtype).t(), bias=row)
        else:
            made = CLASSES[linear]
            out = made.product(x.to(dtype), made.quantized(weight), weight.shape[0], row, None)
    norm = exact.norm()
    error: Tensor = (out.double() - exact).norm() / norm.where(norm > 0, 1)
    return error
