"""The linear-attention layer of Based models."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from .. import reference
from ..ops.based import ELEMENTS, based
from ..ops.based_decode import based_decode
from ..reference.based import FEATURES, BasedState

KERNEL_DTYPES = (torch.bfloat16, torch.float16)


@dataclass
class BasedCache:
    """What a layer keeps between calls; the tensors stay where they are."""

    state: BasedState


class BasedAttention(nn.Module):
    """`tk.based` between projections, with the parameters of the published models' layers:
    `proj_q.weight`, `proj_k.weight` (H * 16, width), `proj_v.weight` (H * Dv, width),
    `out_proj.weight` (width, H * Dv), and, where the layer has one, `g_norm.weight` (Dv,).

    Args:
        width: elements of a token.
        heads: number of heads H.
        head_dim: columns of a head's values Dv; width / heads by default. A multiple of 8.
        normalize: divide by the sum of the weights, as the paper's models do; those trained with
            ThunderKittens' kernel do not, and have a norm.
        norm: whether a root-mean-square norm of each head's output follows, with eps 1e-5.
        eps: added to the sum of the weights.

    Raises:
        ValueError: sizes that do not fit.
    """

    def __init__(
        self,
        width: int,
        heads: int,
        *,
        head_dim: int | None = None,
        normalize: bool = True,
        norm: bool = False,
        eps: float = 1e-12,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if head_dim is None and width % heads != 0:
            raise ValueError(f"tk.nn.BasedAttention: width {width} is no multiple of {heads} heads")
        self.heads, self.head_dim = heads, head_dim or width // heads
        self.normalize, self.eps = normalize, eps

        def linear(inputs: int, outputs: int) -> nn.Linear:
            return nn.Linear(inputs, outputs, bias=False, device=device, dtype=dtype)

        self.proj_q = linear(width, heads * ELEMENTS)
        self.proj_k = linear(width, heads * ELEMENTS)
        self.proj_v = linear(width, heads * self.head_dim)
        self.out_proj = linear(heads * self.head_dim, width)
        self.g_norm = (
            nn.RMSNorm(self.head_dim, eps=1e-5, device=device, dtype=dtype) if norm else None
        )

    def new_cache(self, batch: int) -> BasedCache:
        """The cache of `batch` sequences without tokens."""
        sums = (batch, self.heads, FEATURES)
        device = self.out_proj.weight.device
        return BasedCache(
            BasedState(
                torch.zeros(*sums, self.head_dim, device=device), torch.zeros(sums, device=device)
            )
        )

    def forward(self, x: Tensor, cache: BasedCache | None = None) -> Tensor:
        """x (B, N, width) to (B, N, width).

        With a cache, the tokens follow those of earlier calls, and the cache is brought up to date
        in place; one token without gradients is a call of `tk.based_decode`.
        """
        q, k, v = (
            layer(x).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for layer in (self.proj_q, self.proj_k, self.proj_v)
        )
        out = self._mix(q, k, v, cache).transpose(1, 2)
        if self.g_norm is not None:
            out = self.g_norm(out.to(self.g_norm.weight.dtype))
        result: Tensor = self.out_proj(out.flatten(2).to(q.dtype))
        return result

    def _mix(self, q: Tensor, k: Tensor, v: Tensor, cache: BasedCache | None) -> Tensor:
        by_kernels = q.dtype in KERNEL_DTYPES
        prefill = based if by_kernels else reference.based
        if cache is None:
            return prefill(q, k, v, normalize=self.normalize, eps=self.eps)
        if q.shape[2] == 1 and not torch.is_grad_enabled():
            step = based_decode if by_kernels else reference.based_decode
            return step(q, k, v, cache.state, normalize=self.normalize, eps=self.eps)
        out, state = prefill(
            q,
            k,
            v,
            normalize=self.normalize,
            eps=self.eps,
            initial_state=cache.state,
            return_state=True,
        )
        with torch.no_grad():
            for old, new in zip(cache.state, state, strict=True):
                old.copy_(new)
        return out
