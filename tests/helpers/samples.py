"""One small call per op and variant, for the tests of what every op must do."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

import thunderkittens as tk

from .layouts import heads, matrix


@dataclass(frozen=True)
class Sample:
    """A call of a public function.

    `shapes` and `layouts` describe the tensors; dimensions named in `dynamic`, as (tensor,
    dimension), may change together. `ops` are the overload packets behind the function.
    """

    op: str
    shapes: tuple[tuple[int, ...], ...]
    layouts: tuple[str, ...]
    options: dict[str, Any] = field(default_factory=dict)
    keywords: tuple[str, ...] = ()
    dynamic: tuple[tuple[int, int], ...] = ()
    dtype: torch.dtype = torch.bfloat16

    def tensors(
        self, device: str, longer: int = 0, dtype: torch.dtype | None = None
    ) -> list[Tensor]:
        """Random normal operands; the dynamic dimensions are `longer` than in `shapes`."""
        place = heads if self.op == "attention" else matrix
        result = []
        for index, (shape, layout) in enumerate(zip(self.shapes, self.layouts, strict=True)):
            sizes = [n + longer * ((index, i) in self.dynamic) for i, n in enumerate(shape)]
            values = torch.randn(sizes, device=device).to(dtype or self.dtype)
            result.append(place(values, layout) if len(shape) > 1 else values)
        return result

    @property
    def function(self) -> Callable[..., tuple[Tensor, ...]]:
        """The call as a function of the tensors alone; it always returns a tuple."""
        return self._bind(getattr(tk, self.op))

    @property
    def reference(self) -> Callable[..., tuple[Tensor, ...]]:
        return self._bind(getattr(tk.reference, self.op))

    def _bind(self, function: Callable[..., Any]) -> Callable[..., tuple[Tensor, ...]]:
        positional = len(self.shapes) - len(self.keywords)

        def call(*tensors: Tensor) -> tuple[Tensor, ...]:
            named = dict(zip(self.keywords, tensors[positional:], strict=True))
            result = function(*tensors[:positional], **named, **self.options)
            return result if isinstance(result, tuple) else (result,)

        return call


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
}
