"""The layer of Gated DeltaNet models."""

from __future__ import annotations

from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from .. import reference
from ..ops.gated_delta_rule import gated_delta_rule
from ..ops.gated_delta_rule_decode import gated_delta_rule_decode
from .based import KERNEL_DTYPES
from .recurrent import (
    Call,
    GatedNorm,
    RecurrentCache,
    depthwise,
    new_cache,
    random_log_rates,
    random_step_bias,
    widened,
)

Published = Literal["qwen3_5", "qwen3_next", "fla", "olmo_hybrid"]
# The eps of their norms.
_EPS = {"qwen3_5": 1e-6, "qwen3_next": 1e-6, "fla": 1e-5, "olmo_hybrid": 1e-5}


class GatedDeltaNet(nn.Module):
    """`tk.gated_delta_rule` between short convolutions and a gated norm of each head, with the
    parameters of a family of published models' layers. Of all of them are `A_log` and `dt_bias`
    (HV,). With Ck = H K and Cv = HV V the others are

    - "qwen3_5": `in_proj_qkv.weight` (2 Ck + Cv, width), `in_proj_z.weight` (Cv, width),
      `in_proj_b.weight` and `in_proj_a.weight` (HV, width), `conv1d.weight` (2 Ck + Cv, 1, W),
      `norm.weight` (V,), `out_proj.weight` (width, Cv);
    - "qwen3_next": `in_proj_qkvz.weight` (2 Ck + 2 Cv, width) and `in_proj_ba.weight` (2 HV,
      width), whose rows are sorted by key head, instead of the four before. For this order q, k and
      v are copied once more: a layer of "qwen3_5" loads these tensors too, sorts their rows and
      needs no copy;
    - "fla", of flash-linear-attention's `GatedDeltaNet`: `q_proj.weight`, `k_proj.weight` (Ck,
      width), `v_proj.weight`, `g_proj.weight` (Cv, width), `a_proj.weight`, `b_proj.weight` (HV,
      width), `q_conv1d.weight`, `k_conv1d.weight` (Ck, 1, W), `v_conv1d.weight` (Cv, 1, W),
      `o_norm.weight` (V,), `o_proj.weight` (width, Cv);
    - "olmo_hybrid": those of "fla", but for `conv1d.weight` (2 Ck + Cv, 1, W) for the three.

    In bfloat16 and float16, also by autocast, it calls `tk.causal_conv1d`, `tk.gated_delta_rule`
    and `tk.rms_norm`, which are differentiable, and for steps over a cache
    `tk.causal_conv1d_update` and `tk.gated_delta_rule_decode`. In float32 the recurrence is that of
    `tk.reference`, in float64 all is.

    Args:
        width: elements of a token (the configuration's hidden_size).
        heads: number of heads of queries and keys H.
        value_heads: number of heads of values HV, a multiple of H; H by default.
        key_dim: elements of a query and of a key K: a multiple of 8 up to 128.
        value_dim: elements of a value V: a multiple of 8 up to 256; K by default.
        published: one of the above.
        conv_width: taps of the convolutions W, 2 to 4.
        conv_bias: whether they have biases.
        gate: whether the norm has a gate; without one there is no `g_proj` ("fla" alone).
        allow_neg_eigval: whether beta is from 0 to 2, instead of to 1.
        eps: of the norm; None: 1e-6 of Qwen's models, 1e-5 of the others.

    Raises:
        ValueError: sizes that do not fit, or another family.

    The layer is that of Yang et al., "Gated Delta Networks: Improving Mamba2 with delta rule",
    arXiv:2412.06464.
    """

    def __init__(
        self,
        width: int,
        heads: int,
        *,
        value_heads: int | None = None,
        key_dim: int = 128,
        value_dim: int | None = None,
        published: Published = "qwen3_5",
        conv_width: int = 4,
        conv_bias: bool = False,
        gate: bool = True,
        allow_neg_eigval: bool = False,
        eps: float | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if published not in get_args(Published):
            raise ValueError(
                f"tk.nn.GatedDeltaNet: published is {published!r}; it must be one of "
                f"{get_args(Published)}"
            )
        self.heads, self.value_heads = heads, value_heads or heads
        if heads < 1 or self.value_heads % heads != 0:
            raise ValueError(
                f"tk.nn.GatedDeltaNet: {self.value_heads} heads of values are no multiple of "
                f"{heads} heads"
            )
        if not gate and published != "fla":
            raise ValueError(
                f'tk.nn.GatedDeltaNet: published is {published!r}, whose norm has a gate; "fla" '
                "alone may have none"
            )
        self.key_dim, self.value_dim = key_dim, value_dim or key_dim
        self.published, self.conv_width = published, conv_width
        self.allow_neg_eigval = allow_neg_eigval
        keys, values = heads * key_dim, self.value_heads * self.value_dim
        self.parts = keys, keys, values

        def linear(inputs: int, outputs: int) -> nn.Linear:
            return nn.Linear(inputs, outputs, bias=False, device=device, dtype=dtype)

        def conv(channels: int) -> nn.Conv1d:
            return depthwise(channels, conv_width, conv_bias, device, dtype)

        norm = GatedNorm(
            self.value_dim, _EPS[published] if eps is None else eps, device=device, dtype=dtype
        )
        if published == "qwen3_5":
            self.in_proj_qkv = linear(width, 2 * keys + values)
            self.in_proj_z = linear(width, values)
            self.in_proj_b = linear(width, self.value_heads)
            self.in_proj_a = linear(width, self.value_heads)
        elif published == "qwen3_next":
            self.in_proj_qkvz = linear(width, 2 * keys + 2 * values)
            self.in_proj_ba = linear(width, 2 * self.value_heads)
        else:
            self.q_proj, self.k_proj = linear(width, keys), linear(width, keys)
            self.v_proj = linear(width, values)
            self.a_proj, self.b_proj = (linear(width, self.value_heads) for _ in "ab")
            self.g_proj = linear(width, values) if gate else None
        if published == "fla":
            self.q_conv1d, self.k_conv1d, self.v_conv1d = map(conv, self.parts)
        else:
            self.conv1d = conv(sum(self.parts))
        self.dt_bias = random_step_bias(self.value_heads, device, dtype)
        self.A_log = random_log_rates(self.value_heads, device, dtype)
        if published in ("qwen3_5", "qwen3_next"):
            self.norm, self.out_proj = norm, linear(values, width)
        else:
            self.o_norm, self.o_proj = norm, linear(values, width)

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, *args: Any, **kwargs: Any
    ) -> None:
        if self.published == "qwen3_5":
            ratio = self.value_heads // self.heads
            columns = ratio * self.value_dim
            sizes = self.key_dim, self.key_dim, columns, columns
            parts = self._by_key_head(state_dict, prefix + "in_proj_qkvz.weight", sizes)
            if parts:
                state_dict[prefix + "in_proj_qkv.weight"] = torch.cat(parts[:3])
                state_dict[prefix + "in_proj_z.weight"] = parts[3]
            parts = self._by_key_head(state_dict, prefix + "in_proj_ba.weight", (ratio, ratio))
            for name, part in zip("ba", parts, strict=False):
                state_dict[f"{prefix}in_proj_{name}.weight"] = part
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)

    def _by_key_head(
        self, state: dict[str, Any], name: str, sizes: tuple[int, ...]
    ) -> list[Tensor]:
        """Takes out a weight whose rows are sorted by key head, with so many of each part: the
        parts, each of all heads. Nothing where there is no such weight."""
        if name not in state or state[name].shape[0] != self.heads * sum(sizes):
            return []
        rows = state.pop(name).unflatten(0, (self.heads, -1))
        return [part.flatten(0, 1) for part in rows.split(sizes, 1)]

    def new_cache(self, slots: int, state_dtype: torch.dtype | None = None) -> RecurrentCache:
        """The cache of so many slots without tokens: of the weights' dtype or, under autocast, of
        autocast's; states (slots, HV, K, V) in float32 unless another dtype is given."""
        qwen = self.published in ("qwen3_5", "qwen3_next")
        weight = (self.out_proj if qwen else self.o_proj).weight
        state = self.value_heads, self.key_dim, self.value_dim
        return new_cache(weight, slots, sum(self.parts), self.conv_width, state, state_dtype)

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
                `tk.gated_delta_rule`; slots are then those of the sequences.

        Raises:
            ValueError: a shape, slots or a cache that does not fit the above.
        """
        call = Call("GatedDeltaNet", x, cache, slots, cu_seqlens)
        qkv, gate, beta, a = self._projected(x)
        q, k, v = self._convolved(call, qkv)
        operands = (
            q.unflatten(-1, (-1, self.key_dim)).transpose(1, 2),
            k.unflatten(-1, (-1, self.key_dim)).transpose(1, 2),
            v.unflatten(-1, (-1, self.value_dim)).transpose(1, 2),
            a.transpose(1, 2),
            beta.transpose(1, 2),
        )
        out = self._mix(call, operands).transpose(1, 2)
        if self.published in ("qwen3_5", "qwen3_next"):
            norm, last = self.norm, self.out_proj
        else:
            norm, last = self.o_norm, self.o_proj
        if gate is not None:
            out = out.view(gate.shape)
        result: Tensor = last(norm(out, gate).flatten(2))
        return result

    def _projected(self, x: Tensor) -> tuple[tuple[Tensor, ...], Tensor | None, Tensor, Tensor]:
        """q, k and v, (B, N, channels) each or joined; the gate (B, N, HV, V), or (B, N, H, HV / H,
        V); and what beta and the decay are made of, (B, N, HV)."""
        heads = self.value_heads, self.value_dim
        if self.published == "qwen3_5":
            qkv, gate = self.in_proj_qkv(x), self.in_proj_z(x).unflatten(-1, heads)
            return (qkv,), gate, self.in_proj_b(x), self.in_proj_a(x)
        if self.published == "qwen3_next":
            ratio = self.value_heads // self.heads
            columns = ratio * self.value_dim
            grouped = self.in_proj_qkvz(x).unflatten(-1, (self.heads, -1))
            *qkv, gate = grouped.split((self.key_dim, self.key_dim, columns, columns), -1)
            beta, a = self.in_proj_ba(x).unflatten(-1, (self.heads, -1)).split(ratio, -1)
            parts = tuple(y.flatten(2) for y in qkv)
            gate = gate.unflatten(-1, (ratio, self.value_dim))
            return parts, gate, beta.flatten(2), a.flatten(2)
        parts = self.q_proj(x), self.k_proj(x), self.v_proj(x)
        gate = None if self.g_proj is None else self.g_proj(x).unflatten(-1, heads)
        return parts, gate, self.b_proj(x), self.a_proj(x)

    def _convolved(self, call: Call, qkv: tuple[Tensor, ...]) -> list[Tensor]:
        """q, k and v (B, N, channels) behind the convolutions: one where they are joined, else one
        of each, over its part of the weight and of the cache."""
        sizes = [y.shape[-1] for y in qkv]
        if self.published == "fla":
            layers = self.q_conv1d, self.k_conv1d, self.v_conv1d
            weights = [layer.weight for layer in layers]
            biases = [layer.bias for layer in layers]
        else:
            weights = list(self.conv1d.weight.split(sizes))
            joined = self.conv1d.bias
            biases = [None] * len(sizes) if joined is None else list(joined.split(sizes))
        states: list[Any] = [None] * len(sizes)
        if call.cache is not None:
            states = list(call.cache.conv.split(sizes, 1))
        outs = list(map(call.convolved, qkv, weights, biases, states))
        return outs if len(outs) == 3 else list(outs[0].split(self.parts, -1))

    def _mix(self, call: Call, operands: tuple[Tensor, ...]) -> Tensor:
        """The recurrence: (B, HV, N, V)."""
        options: dict[str, Any] = {"qk_l2norm": True, "beta_sigmoid": True}
        options["allow_neg_eigval"] = self.allow_neg_eigval
        options |= {"A_log": widened(self.A_log), "dt_bias": widened(self.dt_bias)}
        by_kernels = operands[0].dtype in KERNEL_DTYPES
        if call.cache is not None and call.step:
            by_formula = reference.gated_delta_rule_decode
            decode: Any = gated_delta_rule_decode if by_kernels else by_formula
            moved: Tensor = decode(*operands, call.cache.state, state_indices=call.slots, **options)
            return moved
        options["cu_seqlens"] = call.cu_seqlens
        before = None if call.cache is None else call.taken(call.cache.state)
        if by_kernels and before is None:
            ruled: Tensor = gated_delta_rule(*operands, **options)
            return ruled
        options["initial_state"] = before
        if by_kernels:
            out, after = gated_delta_rule(*operands, return_state=True, **options)
        else:
            out, after = reference.gated_delta_rule_chunked(*operands, **options)
        if call.cache is not None and before is not None:
            call.put_back(call.cache.state, before, after)
        return out
