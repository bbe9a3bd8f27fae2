"""What the recurrent layers share: their cache, the short convolution before the recurrence, and
the gated norm behind it."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from .. import reference
from ..ops._registration import autocast_operands
from ..ops.causal_conv1d import causal_conv1d
from ..ops.causal_conv1d_update import causal_conv1d_update
from ..ops.rms_norm import rms_norm

# Tokens of a sequence that the decoding ops take in a call.
STEP = 8
# Step sizes that a new layer begins with.
SMALLEST_STEP, LARGEST_STEP = 1e-3, 0.1


@dataclass
class RecurrentCache:
    """What a recurrent layer keeps between calls, for a number of slots, each of one sequence. The
    tensors stay where they are, and may have any strides, as parts of a larger pool have.

    Attributes:
        conv: (slots, C, W - 1), the last inputs of the convolution, the latest last, in the dtype
            of the activations.
        state: (slots, heads, ...), the state of the recurrence.
    """

    conv: Tensor
    state: Tensor

    def reset(self, slots: Tensor | Iterable[int] | None = None) -> None:
        """Slots begin anew, without tokens; None: all of them.

        Args:
            slots: numbers, or an integer tensor, of which nothing is read on the host.
        """
        if slots is None:
            self.conv.zero_()
            self.state.zero_()
            return
        if not isinstance(slots, Tensor):
            slots = torch.tensor(list(slots), dtype=torch.int64)
        at = slots.to(self.state.device, torch.int64)
        self.conv.index_fill_(0, at, 0)
        self.state.index_fill_(0, at, 0)


def new_cache(
    weight: Tensor,
    slots: int,
    channels: int,
    width: int,
    state: tuple[int, ...],
    dtype: torch.dtype | None,
) -> RecurrentCache:
    """A cache of slots without tokens, for activations of the weight's dtype or autocast's."""
    (like,) = autocast_operands(weight.new_empty(0))
    wide = torch.promote_types(like.dtype, torch.float32) if dtype is None else dtype
    conv = torch.zeros(slots, channels, width - 1, dtype=like.dtype, device=weight.device)
    cache = RecurrentCache(conv, conv.new_zeros((slots, *state), dtype=wide))
    for memory in (cache.conv, cache.state):
        # A compiled step, too, changes it where it is.
        torch._dynamo.mark_static_address(memory)
    return cache


class Call:
    """A call of a layer: whether its tokens are behind those of a cache, and of which slots of it,
    and whether sequences are packed.

    `step` says whether the decoding ops take it, which change states where they are. Otherwise
    states are taken out of the cache, and put back. Nothing is read on the host for it.

    Args:
        name: the layer's, for errors.
        x, cache, slots, cu_seqlens: what the layer is given.

    Raises:
        TypeError, ValueError: what the layers document.
    """

    def __init__(
        self,
        name: str,
        x: Tensor,
        cache: RecurrentCache | None,
        slots: Tensor | None,
        cu_seqlens: Tensor | None,
    ) -> None:
        _require_call(f"tk.nn.{name}", x, cache, slots, cu_seqlens)
        self.cache, self.slots, self.cu_seqlens = cache, slots, cu_seqlens
        few = cu_seqlens is None and 1 <= x.shape[1] <= STEP and x.shape[0] > 0
        self.step = cache is not None and few and not torch.is_grad_enabled()
        if slots is not None and not self.step and slots.numel() > 0:
            # A sequence without a slot writes what another one writes, to the same place. Where
            # none has a slot, all write to the first what is there.
            given, wide = slots >= 0, slots.long()
            largest, other = wide.max(0)
            self._any = largest >= 0
            self._at = torch.where(given, wide, largest).clamp(min=0)
            steps = torch.arange(slots.numel(), device=slots.device)
            self._sequence = torch.where(given, steps, other)

    def taken(self, pool: Tensor) -> Tensor:
        """The states of the sequences; of one without a slot that of another."""
        if self.slots is None:
            # What a gradient needs is not what is changed in place behind it.
            return pool.clone() if torch.is_grad_enabled() else pool
        return pool.index_select(0, self._at) if self.slots.numel() > 0 else pool[:0]

    def put_back(self, pool: Tensor, before: Tensor, after: Tensor) -> None:
        """Writes the states of the sequences that have a slot; `before` is what was taken."""
        after = after.detach().to(pool.dtype)
        if self.slots is None:
            pool.copy_(after)
        elif self.slots.numel() > 0:
            states = torch.where(self._any, after, before.detach())
            pool.index_copy_(0, self._at, states.index_select(0, self._sequence))

    def convolved(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, state: Tensor | None
    ) -> Tensor:
        """silu of the causal convolution of x (B, N, C) with a weight (C, 1, W), like x; a state is
        brought up to date in place."""
        taps, inputs = weight.squeeze(1), x.transpose(1, 2)
        by_op = x.dtype != torch.float64
        if self.step:
            update: Any = causal_conv1d_update if by_op else reference.causal_conv1d_update
            moved: Tensor = update(inputs, state, taps, bias, activation="silu", slots=self.slots)
            return moved.transpose(1, 2)
        conv: Any = causal_conv1d if by_op else reference.causal_conv1d
        options: dict[str, Any] = {"activation": "silu", "cu_seqlens": self.cu_seqlens}
        if state is None:
            out: Tensor = conv(inputs, taps, bias, **options)
        else:
            before = self.taken(state)
            options |= {"initial_state": before, "return_state": True}
            out, after = conv(inputs, taps, bias, **options)
            self.put_back(state, before, after)
        return out.transpose(1, 2)


def _require_call(name: str, x: Tensor, cache: Any, slots: Any, cu_seqlens: Any) -> None:
    if x.dim() != 3:
        raise ValueError(f"{name}: x has shape {tuple(x.shape)}; it must be (B, N, width)")
    if cu_seqlens is not None and x.shape[0] != 1:
        raise ValueError(
            f"{name}: x has a batch of {x.shape[0]}; with cu_seqlens sequences are packed along N, "
            "and it must be 1"
        )
    if cache is None:
        if slots is not None:
            raise ValueError(f"{name}: slots are those of a cache, and there is none")
        return
    count = x.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    if slots is None:
        if cache.state.shape[0] != count:
            raise ValueError(
                f"{name}: the cache has {cache.state.shape[0]} slots for {count} sequences; slots= "
                "says which are theirs"
            )
        return
    if not isinstance(slots, Tensor) or slots.dtype != torch.int32:
        kind = getattr(slots, "dtype", type(slots).__name__)
        raise TypeError(f"{name}: slots must be an int32 tensor, got {kind}")
    if tuple(slots.shape) != (count,):
        raise ValueError(
            f"{name}: slots has shape {tuple(slots.shape)}; it must be ({count},), one for each "
            "sequence"
        )


class GatedNorm(nn.Module):
    """`tk.rms_norm` with a gate; `weight` (columns,) in a checkpoint.

    Args:
        columns: elements of a row.
        eps: added to the mean of the squares.
        gate_first: whether the gate is applied before the norm.
        group_size: so many neighbours are normalised together; None: a row.
    """

    def __init__(
        self,
        columns: int,
        eps: float,
        *,
        gate_first: bool = False,
        group_size: int | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.eps, self.gate_first, self.group_size = eps, gate_first, group_size
        self.weight = nn.Parameter(torch.ones(columns, device=device, dtype=dtype))

    def forward(self, x: Tensor, gate: Tensor | None) -> Tensor:
        """x (..., columns), and a gate of its shape."""
        norm: Any = rms_norm if x.dtype != torch.float64 else reference.rms_norm
        options = {"gate_first": self.gate_first and gate is not None, "eps": self.eps}
        result: Tensor = norm(x, self.weight, gate=gate, group_size=self.group_size, **options)
        return result

    def extra_repr(self) -> str:
        return f"{self.weight.shape[0]}, eps={self.eps}, group_size={self.group_size}"


def widened(x: Tensor) -> Tensor:
    """In float32 at least."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


# What a layer begins with.


def parameter_of(values: Tensor, dtype: torch.dtype | None) -> nn.Parameter:
    """Of a number per head, in float32 at least: 16 bits are too few for decays near 1."""
    kind = torch.get_default_dtype() if dtype is None else dtype
    return nn.Parameter(values.to(torch.promote_types(kind, torch.float32)))


def random_log_rates(
    heads: int, device: torch.device | str | None, dtype: torch.dtype | None
) -> nn.Parameter:
    """`A_log`: rates of decay from 1 to 16."""
    return parameter_of(torch.empty(heads, device=device).uniform_(1, 16).log(), dtype)


def random_step_bias(
    heads: int, device: torch.device | str | None, dtype: torch.dtype | None
) -> nn.Parameter:
    """`dt_bias`: the softplus of it is a step size, of any order of magnitude alike."""
    low, high = math.log(SMALLEST_STEP), math.log(LARGEST_STEP)
    steps = torch.empty(heads, device=device).uniform_(low, high).exp()
    return parameter_of(steps + (-torch.expm1(-steps)).log(), dtype)


def depthwise(
    channels: int,
    width: int,
    bias: bool,
    device: torch.device | str | None,
    dtype: torch.dtype | None,
) -> nn.Conv1d:
    """The parameters of a short convolution, as checkpoints have them: `weight` (C, 1, W)."""
    return nn.Conv1d(
        channels,
        channels,
        width,
        groups=channels,
        padding=width - 1,
        bias=bias,
        device=device,
        dtype=dtype,
    )
