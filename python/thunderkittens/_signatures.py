"""The types of results that depend on a flag, once for an op and for its reference.

Both compute the same, and return a state beside the output where `return_state` says so. A
decorator of a protocol declares a function to be it; the function itself stays as it is.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal, Protocol, overload

from torch import Tensor

if TYPE_CHECKING:
    from .reference.based import BasedState
    from .reference.lolcats import LolcatsState, Window


def _same(function: Any) -> Any:
    return function


class Based(Protocol):
    @overload
    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        normalize: bool = ...,
        eps: float = ...,
        initial_state: BasedState | tuple[Tensor, Tensor] | None = ...,
        return_state: Literal[False] = ...,
    ) -> Tensor: ...

    @overload
    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        normalize: bool = ...,
        eps: float = ...,
        initial_state: BasedState | tuple[Tensor, Tensor] | None = ...,
        return_state: Literal[True],
    ) -> tuple[Tensor, BasedState]: ...


as_based: Callable[[Callable[..., Any]], Based] = _same


class CausalConv1d(Protocol):
    @overload
    def __call__(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None = ...,
        *,
        activation: str | None = ...,
        initial_state: Tensor | None = ...,
        return_state: Literal[False] = ...,
        cu_seqlens: Tensor | None = ...,
    ) -> Tensor: ...

    @overload
    def __call__(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None = ...,
        *,
        activation: str | None = ...,
        initial_state: Tensor | None = ...,
        return_state: Literal[True],
        cu_seqlens: Tensor | None = ...,
    ) -> tuple[Tensor, Tensor]: ...


as_causal_conv1d: Callable[[Callable[..., Any]], CausalConv1d] = _same


class GatedDeltaRule(Protocol):
    @overload
    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        g: Tensor,
        beta: Tensor,
        *,
        scale: float | None = ...,
        initial_state: Tensor | None = ...,
        return_state: Literal[False] = ...,
        cu_seqlens: Tensor | None = ...,
        qk_l2norm: bool = ...,
        beta_sigmoid: bool = ...,
        allow_neg_eigval: bool = ...,
        A_log: Tensor | None = ...,
        dt_bias: Tensor | None = ...,
        state_v_first: bool = ...,
    ) -> Tensor: ...

    @overload
    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        g: Tensor,
        beta: Tensor,
        *,
        scale: float | None = ...,
        initial_state: Tensor | None = ...,
        return_state: Literal[True],
        cu_seqlens: Tensor | None = ...,
        qk_l2norm: bool = ...,
        beta_sigmoid: bool = ...,
        allow_neg_eigval: bool = ...,
        A_log: Tensor | None = ...,
        dt_bias: Tensor | None = ...,
        state_v_first: bool = ...,
    ) -> tuple[Tensor, Tensor]: ...


as_gated_delta_rule: Callable[[Callable[..., Any]], GatedDeltaRule] = _same


class LinearAttention(Protocol):
    @overload
    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        decay: Tensor | None = ...,
        g: Tensor | None = ...,
        scale: float | None = ...,
        initial_state: Tensor | None = ...,
        return_state: Literal[False] = ...,
        state_v_first: bool = ...,
        cu_seqlens: Tensor | None = ...,
    ) -> Tensor: ...

    @overload
    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        decay: Tensor | None = ...,
        g: Tensor | None = ...,
        scale: float | None = ...,
        initial_state: Tensor | None = ...,
        return_state: Literal[True],
        state_v_first: bool = ...,
        cu_seqlens: Tensor | None = ...,
    ) -> tuple[Tensor, Tensor]: ...


as_linear_attention: Callable[[Callable[..., Any]], LinearAttention] = _same


class Lolcats(Protocol):
    @overload
    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        q_map: Tensor,
        k_map: Tensor,
        alpha: Tensor,
        beta: Tensor,
        *,
        window: Window = ...,
        initial_state: LolcatsState | None = ...,
        return_state: Literal[False] = ...,
    ) -> Tensor: ...

    @overload
    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        q_map: Tensor,
        k_map: Tensor,
        alpha: Tensor,
        beta: Tensor,
        *,
        window: Window = ...,
        initial_state: LolcatsState | None = ...,
        return_state: Literal[True],
    ) -> tuple[Tensor, LolcatsState]: ...


as_lolcats: Callable[[Callable[..., Any]], Lolcats] = _same


class Ssd(Protocol):
    @overload
    def __call__(
        self,
        x: Tensor,
        dt: Tensor,
        A: Tensor,
        B: Tensor,
        C: Tensor,
        *,
        D: Tensor | None = ...,
        z: Tensor | None = ...,
        dt_bias: Tensor | None = ...,
        dt_softplus: bool = ...,
        dt_limit: tuple[float, float] = ...,
        initial_state: Tensor | None = ...,
        return_state: Literal[False] = ...,
        cu_seqlens: Tensor | None = ...,
    ) -> Tensor: ...

    @overload
    def __call__(
        self,
        x: Tensor,
        dt: Tensor,
        A: Tensor,
        B: Tensor,
        C: Tensor,
        *,
        D: Tensor | None = ...,
        z: Tensor | None = ...,
        dt_bias: Tensor | None = ...,
        dt_softplus: bool = ...,
        dt_limit: tuple[float, float] = ...,
        initial_state: Tensor | None = ...,
        return_state: Literal[True],
        cu_seqlens: Tensor | None = ...,
    ) -> tuple[Tensor, Tensor]: ...


as_ssd: Callable[[Callable[..., Any]], Ssd] = _same
