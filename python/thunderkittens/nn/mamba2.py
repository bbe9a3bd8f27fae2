"""The layer of Mamba-2 models."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from .. import reference
from ..ops.ssd import ssd
from ..ops.ssd_decode import ssd_decode
from .based import KERNEL_DTYPES
from .recurrent import (
    Call,
    GatedNorm,
    RecurrentCache,
    depthwise,
    new_cache,
    parameter_of,
    random_log_rates,
    random_step_bias,
    widened,
)


class Mamba2Mixer(nn.Module):
    """`tk.ssd` between a short convolution and a gated norm, with the parameters of the published
    models' layers: `in_proj.weight` (2 H P + 2 G N + H, width), rows of the gate z, of what is
    convolved, x, B and C, and of dt, in this order; `conv1d.weight` (H P + 2 G N, 1, W) and
    `conv1d.bias`; `dt_bias`, `A_log` and `D` (H,); `norm.weight` (H P,); `out_proj.weight` (width,
    H P). Those are Mamba-2's own models, Codestral Mamba, Bamba, Nemotron-H, Granite 4 and Zamba 2,
    in transformers, and Mamba2 of mamba_ssm; the multipliers of Falcon-H1 are left to its model.

    In bfloat16 and float16, also by autocast, it calls `tk.causal_conv1d`, `tk.ssd` and
    `tk.rms_norm`, which are differentiable, and for steps over a cache `tk.causal_conv1d_update`
    and `tk.ssd_decode`. In float32 the recurrence is that of `tk.reference`, in float64 all is.

    Args:
        width: elements of a token (the configuration's hidden_size).
        heads: number of heads H.
        head_dim: elements of a head P: a multiple of 8 up to 256.
        state_size: elements of a key N: a multiple of 8 up to 128.
        groups: G, of heads that share B and C, and that are normalised together; it divides H.
        conv_width: taps of the convolution W, 2 to 4.
        bias: whether the projections have biases.
        conv_bias: whether the convolution has one.
        eps: of the norm.
        dt_limit: bounds of the step size, as for `tk.ssd` (`time_step_limit`; of Nemotron-H
            `(time_step_min, inf)`), in prefill and in steps alike.
        norm: whether there is a norm; without one the gate alone is behind the recurrence.
        norm_before_gate: whether the gate is applied to what is normalised, and not before.

    Raises:
        ValueError: sizes that do not fit.

    The layer is that of Dao and Gu, "Transformers are SSMs", arXiv:2405.21060.
    """

    def __init__(
        self,
        width: int,
        heads: int,
        head_dim: int,
        state_size: int,
        *,
        groups: int = 1,
        conv_width: int = 4,
        bias: bool = False,
        conv_bias: bool = True,
        eps: float = 1e-5,
        dt_limit: tuple[float, float] = (0.0, math.inf),
        norm: bool = True,
        norm_before_gate: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if groups < 1 or heads % groups != 0:
            raise ValueError(f"tk.nn.Mamba2Mixer: {heads} heads are no multiple of {groups} groups")
        self.heads, self.head_dim, self.state_size = heads, head_dim, state_size
        self.groups, self.conv_width = groups, conv_width
        self.dt_limit = float(dt_limit[0]), float(dt_limit[1])
        inner, keys = heads * head_dim, groups * state_size
        self.inner, self.keys, self.channels = inner, keys, inner + 2 * keys
        place: dict[str, Any] = {"device": device, "dtype": dtype}
        self.in_proj = nn.Linear(width, inner + self.channels + heads, bias=bias, **place)
        self.conv1d = depthwise(self.channels, conv_width, conv_bias, device, dtype)
        self.dt_bias = random_step_bias(heads, device, dtype)
        self.A_log = random_log_rates(heads, device, dtype)
        self.D = parameter_of(torch.ones(heads, device=device), dtype)
        self.norm = None
        if norm:
            options: dict[str, Any] = {"gate_first": not norm_before_gate, **place}
            size = None if groups == 1 else inner // groups
            self.norm = GatedNorm(inner, eps, group_size=size, **options)
        self.out_proj = nn.Linear(inner, width, bias=bias, **place)

    def new_cache(self, slots: int, state_dtype: torch.dtype | None = None) -> RecurrentCache:
        """The cache of so many slots without tokens: of the weights' dtype or, under autocast, of
        autocast's; states (slots, H, P, N) in float32 unless another dtype is given."""
        state = self.heads, self.head_dim, self.state_size
        weight = self.in_proj.weight
        return new_cache(weight, slots, self.channels, self.conv_width, state, state_dtype)

    def forward(
        self,
        x: Tensor,
        cache: RecurrentCache | None = None,
        *,
        slots: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
    ) -> Tensor:
        """x (B, N, width) to (B, N, width).

        With a cache, the tokens follow those of earlier calls, and the cache is brought up to date
        in place. Without gradients, up to 8 tokens are a step, which reads and writes each state
        once. No gradient flows from one call into an earlier one.

        Args:
            x: (B, N, width).
            cache: of `new_cache`, for generation.
            slots: (B,), int32: which slot of the cache each sequence has. They differ; one of -1 is
                of no sequence: nothing is written for it, and its results mean nothing. They are
                read on the GPU. None: slot i for sequence i.
            cu_seqlens: (sequences + 1,), int32: B is 1, and sequences are packed along N, as for
                `tk.ssd`; slots are then those of the sequences.

        Raises:
            ValueError: a shape, slots or a cache that does not fit the above.
        """
        call = Call("Mamba2Mixer", x, cache, slots, cu_seqlens)
        split = self.inner, self.channels, self.heads
        gate, inputs, dt = self.in_proj(x).split(split, -1)
        conv = None if cache is None else cache.conv
        inputs = call.convolved(inputs, self.conv1d.weight, self.conv1d.bias, conv)
        values, B, C = inputs.split((self.inner, self.keys, self.keys), -1)
        operands = (
            self._heads(values, self.heads),
            dt.transpose(1, 2),
            -widened(self.A_log).exp(),
            self._heads(B, self.groups),
            self._heads(C, self.groups),
        )
        z = self._heads(gate, self.heads) if self.norm is None else None
        out = self._mix(call, operands, z).transpose(1, 2).flatten(2)
        if self.norm is not None:
            out = self.norm(out, gate)
        result: Tensor = self.out_proj(out)
        return result

    @staticmethod
    def _heads(x: Tensor, count: int) -> Tensor:
        moved: Tensor = x.unflatten(-1, (count, -1)).transpose(1, 2)
        return moved

    def _mix(self, call: Call, operands: tuple[Tensor, ...], z: Tensor | None) -> Tensor:
        """The recurrence: (B, H, N, P)."""
        options: dict[str, Any] = {"D": self.D, "dt_bias": self.dt_bias, "dt_softplus": True}
        options |= {"dt_limit": self.dt_limit, "z": z}
        by_kernels = operands[0].dtype in KERNEL_DTYPES
        if call.cache is not None and call.step:
            decode: Any = ssd_decode if by_kernels else reference.ssd_decode
            moved: Tensor = decode(*operands, call.cache.state, state_indices=call.slots, **options)
            return moved
        prefill: Any = ssd if by_kernels else reference.ssd
        options["cu_seqlens"] = call.cu_seqlens
        if call.cache is None:
            out: Tensor = prefill(*operands, **options)
            return out
        state = call.cache.state
        before = call.taken(state)
        options |= {"initial_state": widened(before), "return_state": True}
        out, after = prefill(*operands, **options)
        call.put_back(state, before, after)
        return out
