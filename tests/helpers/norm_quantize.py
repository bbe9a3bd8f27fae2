"""Calls of the quantising norms beside the norms and the quantisers."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import thunderkittens as tk

OUTPUTS = ("fp8_tensor", "fp8_row", "fp8_1x128", "nvfp4")
FP32 = torch.float32


def bits(x: Tensor) -> Tensor:
    """The elements as integers, with one pattern for NaN in float32."""
    if x.element_size() == 1:
        return x.view(torch.uint8)
    x = torch.where(x.isnan(), torch.nan, x) if x.dtype == FP32 else x
    return x.view(torch.int32 if x.element_size() == 4 else torch.int16)


def assert_same(actual: Any, expected: Any) -> None:
    """Codes, scales and sums of the same shapes, strides, dtypes and bits."""
    assert len(actual) == len(expected)
    for x, y in zip(actual, expected, strict=True):
        assert (x.shape, x.dtype) == (y.shape, y.dtype)
        if x.numel() > 0:
            strides = [[t.stride(i) for i in range(t.dim()) if t.shape[i] > 1] for t in (x, y)]
            assert strides[0] == strides[1]
        assert torch.equal(bits(x).to(y.device), bits(y))


def scale_for(output: str, device: str, value: float = 0.01) -> dict[str, Tensor]:
    """The options of an output that needs a scale."""
    needs = output in ("fp8_tensor", "nvfp4")
    return {"scale": torch.tensor(value, device=device)} if needs else {}


def in_two_steps(norm: str, x: Tensor, *factors: Tensor | None, **options: Any) -> Any:
    """What the op promises: the norm in float32, and a quantisation of what it gives."""
    output, scale = options.pop("output", "fp8_row"), options.pop("scale", None)
    swizzle, residual = options.pop("swizzle", True), options.pop("residual", None)
    total = x
    if residual is not None:
        total = (x.float() + residual.float()).to(residual.dtype)
    wide = [None if f is None else f.float() for f in factors]
    rows = getattr(tk, norm)(total.float(), *wide, **options)
    matrix = rows.reshape(-1, rows.shape[-1])
    if output == "nvfp4":
        data, scales, _ = tk.nvfp4_quantize(matrix, global_scale=scale, swizzle=swizzle)
        lead = (*x.shape[:-1], x.shape[-1] // 2)
        data = data.view(torch.uint8).reshape(lead).view(data.dtype)
        if not swizzle:
            scales = scales.reshape(*x.shape[:-1], scales.shape[-1])
    else:
        data, scales = tk.fp8_quantize(matrix, output.removeprefix("fp8_"), scale=scale)
        data = data.reshape(x.shape)
        if output != "fp8_tensor":
            scales = scales.reshape(*x.shape[:-1], scales.shape[-1])
    return (data, scales) if residual is None else (data, scales, total)


def values_of(data: Tensor, scales: Tensor, options: dict[str, Any]) -> Tensor:
    """The numbers that codes and plain scales stand for, in float64."""
    output = options.get("output", "fp8_row")
    if output == "nvfp4":
        matrix = data.view(torch.uint8).flatten(0, -2).view(data.dtype)
        found = tk.reference.nvfp4_dequantize(
            matrix, scales.flatten(0, -2), options["scale"], dtype=FP32, swizzle=False
        )
        return found.double().reshape(*data.shape[:-1], 2 * data.shape[-1])
    values = data.double()
    if output == "fp8_1x128":
        scales = scales.repeat_interleave(128, -1)[..., : data.shape[-1]]
    return values * scales.double()


def assert_close_to_formula(norm: str, *args: Tensor | None, **options: Any) -> None:
    """Against the formula in float64: each element within half a step of its code, and what the
    norm may be off in float32."""
    function = getattr(tk, f"{norm}_quantize")
    data, scales, *_ = function(*args, **options, swizzle=False)
    found = values_of(data, scales, options)
    doubles = [None if a is None else a.double() for a in args]
    plain = {k: v for k, v in options.items() if k not in ("output", "scale")}
    exact = getattr(tk.reference, norm)(*doubles, **plain)
    exact = exact[0] if isinstance(exact, tuple) else exact
    output = options.get("output", "fp8_row")
    # Scales of fp8 are exact to fp32; those of NVFP4 are rounded to e4m3, by a 16th at most.
    if output == "nvfp4":
        blocks = torch.nn.functional.pad(exact.abs(), (0, -exact.shape[-1] % 16))
        largest = blocks.unflatten(-1, (-1, 16)).amax(-1).repeat_interleave(16, -1)
        largest = largest[..., : exact.shape[-1]]
        allowed = largest * (1 / 6 + 1 / 16) + 2.0**-9 * 6 * options["scale"].double()
    else:
        spread = scales.double()
        if output == "fp8_1x128":
            spread = spread.repeat_interleave(128, -1)[..., : exact.shape[-1]]
        allowed = exact.abs() / 16 + spread * 2.0**-10
        exact = torch.minimum(torch.maximum(exact, -448 * spread), 448 * spread)
    assert bool(((found - exact).abs() <= allowed * (1 + 1e-4) + 1e-6).all())
