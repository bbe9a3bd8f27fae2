"""The attention layer of models converted with LoLCATS."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from .. import reference
from ..ops._lolcats import require_window
from ..ops._registration import autocast_operands
from ..ops.lolcats import lolcats
from ..ops.lolcats_decode import lolcats_decode
from ..reference.lolcats import LolcatsState, Window
from .based import KERNEL_DTYPES
from .rotary import Rotary

# sigmoid of it is 0.1
INITIAL_FACTOR = -2.1972245773362196


@dataclass
class LolcatsCache:
    """What a layer keeps between calls; the tensors stay where they are. `empty`, whether no tokens
    have gone into it, is for window="published", where the first tokens are the prompt."""

    state: LolcatsState
    empty: bool = False


class FeatureMap(nn.Module):
    """A feature map's weights, `mlp.layer` (H, D, F) in a checkpoint."""

    def __init__(
        self,
        heads: int,
        head_dim: int,
        features: int,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.mlp = nn.Module()
        layer = torch.empty(heads, head_dim, features, device=device, dtype=dtype)
        nn.init.normal_(layer, std=1 / math.sqrt(head_dim))
        self.mlp.layer = nn.Parameter(layer)

    @property
    def weight(self) -> Tensor:
        layer: Tensor = self.mlp.layer  # type: ignore[assignment]
        return layer


class LolcatsAttention(nn.Module):
    """`tk.lolcats` between the projections of a Llama-like model's attention, with the parameters
    of the published checkpoints: `q_proj.weight`, `k_proj.weight`, `v_proj.weight`,
    `o_proj.weight`, `feature_map_q.mlp.layer` and `feature_map_k.mlp.layer` (H, D, F), and
    `window_factors` (1, H, 1, 1), whose sigmoid is the weight of the window.

    With window="published" the results are those of the authors' PyTorch code, for prompts of any
    length and in the steps that follow. There, what a token gets depends on the length of the
    prompt, and the window of a step is another than that of the prompt. With window="terrace" it is
    that of `tk.lolcats` throughout, with which the models were trained: results do not depend on
    how a sequence is divided into calls, and steps write less memory. Without a cache, both are the
    same at multiples of 64 from 128 on.

    Args:
        width: elements of a token (the configuration's hidden_size).
        heads: number of query heads H.
        kv_heads: number of key and value heads, H by default.
        head_dim: elements of a head, width / heads by default; the kernels have 64 and 128.
        features: F, features of one sign; the kernels have 32 and 64.
        theta: base of the rotary frequencies.
        scaling: Llama 3.1's scaling of them, see `Rotary`.
        affine: whether the linear part's weight is 1 minus the window's, instead of 1
            (`affine_attention_factors`; the published models have 1).
        bias: whether q, k and v have biases.
        window: "published" or "terrace", as above.

    Raises:
        ValueError: sizes that do not fit, or another window.
    """

    def __init__(
        self,
        width: int,
        heads: int,
        *,
        kv_heads: int | None = None,
        head_dim: int | None = None,
        features: int = 64,
        theta: float = 10000.0,
        scaling: Mapping[str, Any] | None = None,
        affine: bool = False,
        bias: bool = False,
        window: Window = "published",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.heads, self.kv_heads = heads, kv_heads or heads
        if heads % self.kv_heads != 0 or (head_dim is None and width % heads != 0):
            raise ValueError(
                f"tk.nn.LolcatsAttention: width {width}, {heads} heads and {self.kv_heads} of keys "
                "do not divide each other"
            )
        self.head_dim, self.features = head_dim or width // heads, features
        self.affine = affine
        require_window("nn.LolcatsAttention", window)
        self.window = window
        self.rotary = Rotary(self.head_dim, theta, scaling, device)

        def linear(inputs: int, outputs: int, bias: bool) -> nn.Linear:
            return nn.Linear(inputs, outputs, bias=bias, device=device, dtype=dtype)

        self.q_proj = linear(width, heads * self.head_dim, bias)
        self.k_proj = linear(width, self.kv_heads * self.head_dim, bias)
        self.v_proj = linear(width, self.kv_heads * self.head_dim, bias)
        self.o_proj = linear(heads * self.head_dim, width, False)
        shape = (heads, self.head_dim, features)
        self.feature_map_q = FeatureMap(*shape, device=device, dtype=dtype)
        self.feature_map_k = FeatureMap(*shape, device=device, dtype=dtype)
        self.window_factors = nn.Parameter(
            torch.full((1, heads, 1, 1), INITIAL_FACTOR, device=device, dtype=dtype)
        )

    def conversion_parameters(self) -> list[nn.Parameter]:
        """What attention transfer trains: the feature maps and the factors."""
        maps = [*self.feature_map_q.parameters(), *self.feature_map_k.parameters()]
        return [*maps, self.window_factors]

    def new_cache(self, batch: int) -> LolcatsCache:
        """The cache of `batch` sequences without tokens: of the weights' dtype or, under autocast,
        of autocast's."""
        (weight,) = autocast_operands(self.q_proj.weight.new_empty(0))
        return LolcatsCache(
            reference.empty_state(
                batch,
                self.heads,
                self.kv_heads,
                self.head_dim,
                self.features,
                dtype=weight.dtype,
                device=weight.device,
            ),
            empty=True,
        )

    def forward(
        self,
        x: Tensor,
        cache: LolcatsCache | None = None,
        *,
        position_embeddings: tuple[Tensor, Tensor] | None = None,
    ) -> Tensor:
        """x (B, N, width) to (B, N, width).

        With a cache, the tokens follow those of earlier calls, and the cache is brought up to date
        in place; one token without gradients is a call of `tk.lolcats_decode`. With the published
        window, all tokens behind the prompt are such steps, and have no gradients.

        Args:
            x: (B, N, width).
            cache: of `new_cache`, for generation. Its sequences may have different lengths.
            position_embeddings: cos and sin, (B, N, D) or (N, D) with the halves equal, as
                transformers passes them; by default those of the tokens' positions.
        """
        q, k, v = self.queries_keys_values(x, cache, position_embeddings)
        out = self.mix(q, k, v, cache).transpose(1, 2)
        result: Tensor = self.o_proj(out.flatten(2))
        return result

    def queries_keys_values(
        self,
        x: Tensor,
        cache: LolcatsCache | None = None,
        position_embeddings: tuple[Tensor, Tensor] | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """q (B, H, N, D), k and v (B, Hkv, N, D), q and k rotated."""
        q, k, v = (
            layer(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for layer in (self.q_proj, self.k_proj, self.v_proj)
        )
        if position_embeddings is None:
            positions = torch.arange(x.shape[1], device=x.device)
            if cache is not None:
                positions = cache.state.lengths.long()[:, None] + positions
            cos, sin = self.rotary(positions)
        else:
            half = self.head_dim // 2
            cos, sin = (t[..., :half] for t in position_embeddings)
        return self.rotary.rotate(q, cos, sin), self.rotary.rotate(k, cos, sin), v

    def mix(self, q: Tensor, k: Tensor, v: Tensor, cache: LolcatsCache | None = None) -> Tensor:
        """What stands in place of softmax attention: (B, H, N, D)."""
        beta = self.window_factors.flatten().float().sigmoid()
        alpha = 1 - beta if self.affine else torch.ones_like(beta)
        maps = self.feature_map_q.weight.to(q.dtype), self.feature_map_k.weight.to(q.dtype)
        args = (q, k, v, *maps, alpha, beta)
        by_kernels = q.dtype in KERNEL_DTYPES
        prefill = lolcats if by_kernels else reference.lolcats
        if cache is None:
            return prefill(*args, window=self.window)
        published, empty, cache.empty = self.window == "published", cache.empty, False
        if q.shape[2] == 1 and not torch.is_grad_enabled():
            return self._step(args, cache.state)
        if published and not empty:
            return self._steps(args, cache.state)
        before = None if published else cache.state
        out, state = prefill(*args, window=self.window, initial_state=before, return_state=True)
        with torch.no_grad():
            for old, new in zip(cache.state, state, strict=True):
                old.copy_(new)
        cache.empty = empty and q.shape[2] == 0
        return out

    def _step(self, args: tuple[Tensor, ...], state: LolcatsState) -> Tensor:
        q, k, v, q_map, k_map, alpha, beta = args
        step = lolcats_decode if q.dtype in KERNEL_DTYPES else reference.lolcats_decode
        return step(q, k, v, q_map, k_map, alpha, beta, state, window=self.window)

    def _steps(self, args: tuple[Tensor, ...], state: LolcatsState) -> Tensor:
        if torch.is_grad_enabled() and any(x.requires_grad for x in args):
            raise RuntimeError(
                "tk.nn.LolcatsAttention: there is no gradient behind the prompt with "
                'window="published"; use torch.no_grad(), or window="terrace" to train'
            )
        outs = [
            self._step((*(x[:, :, i : i + 1] for x in args[:3]), *args[3:]), state)
            for i in range(args[0].shape[2])
        ]
        return torch.cat(outs, 2) if outs else torch.empty_like(args[0])

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, *args: Any, **kwargs: Any
    ) -> None:
        # Old checkpoints hold the rotary frequencies, which here follow from theta and scaling.
        for name in ("rotary_emb.inv_freq", "rotary_emb.cos_cached", "rotary_emb.sin_cached"):
            state_dict.pop(prefix + name, None)
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)
