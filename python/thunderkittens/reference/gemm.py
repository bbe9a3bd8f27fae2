"""`tk.gemm` in plain PyTorch: a product that is accumulated in a wide format, and its epilogue."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

GATED = {"swiglu": "silu", "geglu": "gelu"}


def gemm(
    a: Tensor,
    b: Tensor,
    *,
    bias: Tensor | None = None,
    activation: str | None = None,
    residual: Tensor | None = None,
    alpha: float = 1.0,
    beta: float = 1.0,
    gate_layout: str = "blocked",
    out_dtype: torch.dtype | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """`activation(alpha * a @ b + bias) + beta * residual`, in float32 (in float64 when a is
    float64), rounded once to out_dtype.

    Args:
        a: (..., M, K), any floating-point dtype.
        b: (K, N) or (..., K, N); batch dimensions broadcast as in `torch.matmul`.
        bias: (N,), added to every row.
        activation: None, "relu", "gelu", "gelu_tanh", "silu"; or "swiglu", "geglu", which are
            silu and gelu of one half of the columns, the gates, times the other half.
        residual: of the shape of the result.
        alpha: factor of the product.
        beta: factor of the residual.
        gate_layout: "blocked", the gates are the first N / 2 columns, or "interleaved", the even
            ones.
        out_dtype: dtype of the result; None is that of `out` where it is given, else of `a`.
        out: the tensor to write to, whose dtype is that of the result.

    Returns:
        (..., M, N), or (..., M, N / 2) with a gated activation.
    """
    wide = torch.float64 if a.dtype == torch.float64 else torch.float32
    z = torch.matmul(a.to(wide), b.to(wide))
    if alpha != 1:
        z = alpha * z
    if bias is not None:
        z = z + bias.to(wide)
    result = activate(z, activation, gate_layout)
    if residual is not None:
        result = result + beta * residual.to(wide)
    if out is not None:
        return out.copy_(result)
    return result.to(out_dtype or a.dtype)


def activate(z: Tensor, activation: str | None, gate_layout: str = "blocked") -> Tensor:
    """The activation of what the product and the bias give."""
    if activation is None:
        return z
    if activation in GATED:
        if gate_layout == "blocked":
            gate, value = z.chunk(2, dim=-1)
        else:
            gate, value = z[..., ::2], z[..., 1::2]
        return activate(gate, GATED[activation]) * value
    if activation == "gelu_tanh":
        return F.gelu(z, approximate="tanh")
    functions: dict[str, Callable[[Tensor], Tensor]] = {
        "relu": F.relu,
        "gelu": F.gelu,
        "silu": F.silu,
    }
    return functions[activation](z)
