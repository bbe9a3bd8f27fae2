"""What a sample call of an op is; `samples.py` has one per op and variant."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

import thunderkittens as tk

from .layouts import heads, matrix

DIFFERENTIABLE = ("operand", "sink", "weight", "factor", "plain", "gain", "gate")
# What autocast converts.
CAST = ("operand", "weight", "token")
# Ops that change a state in place, and where that is among the tensors of a call: to their end
# where it is a tuple.
MUTATING = {
    "append_kv": slice(7, None),
    "based_decode": slice(3, None),
    "lolcats_decode": slice(7, None),
    "causal_conv1d_update": slice(1, 2),
    "gated_delta_rule_decode": slice(5, 6),
    "linear_attention_decode": slice(3, 4),
    "ssd_decode": slice(5, 6),
}
HEADS = ("attention", "based", "gated_delta_rule", "linear_attention", "lolcats", "rotary", "ssd")


def state_of(op: str, tensors: Sequence[Tensor]) -> Sequence[Tensor]:
    """The tensors that a call changes."""
    return tensors[MUTATING[op]]


def with_state(op: str, tensors: Sequence[Tensor], state: Sequence[Tensor]) -> list[Any]:
    """The arguments of a call with another state."""
    part = MUTATING[op]
    if part.stop is None:
        return [*tensors[: part.start], tuple(state)]
    return [*tensors[: part.start], *state, *tensors[part.stop :]]


@dataclass(frozen=True)
class Sample:
    """A call of a public function.

    `shapes` and `layouts` describe the tensors; dimensions named in `dynamic`, as (tensor,
    dimension), may change together. `kinds` are "operand" (the default), and of other tensors
    "sink", "slopes" (float32; the latter have no gradient), "gate" (float32, negative), "weight"
    and "factor" (operands, and positive float32, without a batch), "plain" and "gain" (operands
    that autocast leaves, the latter without a batch), "seed", "token" (an operand without a
    gradient), "cache" and "lengths" (of a state), "edges" (cumulative lengths whose last sequence
    grows), "ends" (of groups, the last of which grows; their layout is the sum), "source" (of a
    quantiser: no gradient, no autocast), "codes" (bytes), "rates" (of decays: negative, float32),
    and the dtype of what a quantiser has made or of a state. `op_calls` counts the ops that a call
    is made of. `public` is the function where it has not the op's name.
    """

    op: str
    shapes: tuple[tuple[int, ...], ...]
    layouts: tuple[str, ...]
    options: dict[str, Any] = field(default_factory=dict)
    keywords: tuple[str, ...] = ()
    dynamic: tuple[tuple[int, int], ...] = ()
    dtype: torch.dtype = torch.bfloat16
    kinds: tuple[str, ...] = ()
    op_calls: int = 1
    public: str = ""

    def kind(self, index: int) -> str:
        return self.kinds[index] if self.kinds else "operand"

    @property
    def mappable(self) -> list[bool]:
        """Which tensors `torch.func.vmap` may map."""
        plain_scale = 1 if self.op == "mxfp8_prepare" else -1
        places = range(len(self.shapes))
        fixed = ("edges", "ends", "weight", "factor", "rates", "gain", "seed")
        return [self.kind(i) not in fixed and i != plain_scale for i in places]

    def tensors(
        self, device: str, longer: int = 0, dtype: torch.dtype | None = None
    ) -> list[Tensor]:
        """Random normal operands; the dynamic dimensions are `longer` than in `shapes`."""
        place = heads if self.op in HEADS else matrix
        result = []
        for index, (shape, layout) in enumerate(zip(self.shapes, self.layouts, strict=True)):
            sizes = [n + longer * ((index, i) in self.dynamic) for i, n in enumerate(shape)]
            kind = self.kind(index)
            if kind == "edges":
                # Packed rows are the first dimension, or the third beside a batch of one.
                rows = self.shapes[layout == "k"]
                tokens = rows[2] if len(rows) == 4 else rows[0]
                edges = [0, tokens // 3, tokens // 3, tokens + longer]
                result.append(torch.tensor(edges, dtype=torch.int32, device=device))
                continue
            if kind == "ends":
                total = int(layout)
                ends = [total // 3, total // 3, total + longer]
                result.append(torch.tensor(ends, dtype=torch.int32, device=device))
                continue
            if kind == "seed":
                result.append(torch.tensor([1234567890123], device=device))
                continue
            if kind == "lengths":
                lengths = 127 + 33 * torch.arange(shape[0], device=device, dtype=torch.int32)
                result.append(lengths)
                continue
            values = torch.randn(sizes, device=device)
            if kind == "codes":
                result.append(torch.randint(100, 150, sizes, device=device).to(torch.uint8))
                continue
            if kind == "rates":
                result.append(-values.abs() / 4)
                continue
            if kind.startswith("float"):
                result.append(values.abs().to(getattr(torch, kind)))
                continue
            if kind == "source":
                result.append(place(values.to(self.dtype), layout))
                continue
            if kind == "gate":
                result.append(values.abs() / -8)
            elif kind in ("slopes", "factor"):
                result.append(values.abs() / 8 + (kind == "factor"))
            elif kind == "sink":
                result.append(values)
            else:
                values = values.to(dtype or self.dtype)
                result.append(place(values, layout) if len(shape) > 1 else values)
        return result

    @property
    def function(self) -> Callable[..., tuple[Tensor, ...]]:
        """The call as a function of the tensors alone; it always returns a tuple."""
        return self._bind(getattr(tk, self.public or self.op))

    @property
    def reference(self) -> Callable[..., tuple[Tensor, ...]]:
        return self._bind(getattr(tk.reference, self.op))

    def _bind(self, function: Callable[..., Any]) -> Callable[..., tuple[Tensor, ...]]:
        positional = len(self.shapes) - len(self.keywords)

        def call(*tensors: Tensor) -> tuple[Tensor, ...]:
            named = dict(zip(self.keywords, tensors[positional:], strict=True))
            if self.op in MUTATING:
                state = tuple(x.clone() for x in state_of(self.op, tensors))
                return function(*with_state(self.op, tensors, state), **self.options), *state
            result = function(*tensors[:positional], **named, **self.options)
            if self.op == "lolcats" and isinstance(result, tuple):
                # There is no gradient through a state.
                rest = (x if isinstance(x, tuple) else (x,) for x in result[1:])
                return result[0], *(y.detach() for x in rest for y in x)
            if not isinstance(result, tuple):
                return (result,)
            return tuple(y for x in result for y in (x if isinstance(x, tuple) else (x,)))

        return call
