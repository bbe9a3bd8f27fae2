"""Ops on DTensors: results and gradients are those of the whole tensors, and nothing is sent that
is not asked for.

Two ranks run all cases once, in processes of their own: this file as a program, which imports torch
once and forks. The tests look at what became of each case.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import thunderkittens as tk
from helpers import ranks

CASES: dict[str, Callable[[Any], None]] = {}


def case(function: Callable[[Any], None]) -> Callable[[Any], None]:
    CASES[function.__name__] = function
    return function


def compare(mesh, op, operands, placements, result, gradients) -> None:
    """An op of tensors, and of DTensors of them: outputs, their placements, gradients, theirs."""
    from torch.distributed.tensor import DTensor, distribute_tensor
    from torch.distributed.tensor.debug import CommDebugMode

    whole = [x.clone().requires_grad_() for x in operands]
    sharded = [
        distribute_tensor(x, mesh, [p]).requires_grad_()
        for x, p in zip(operands, placements, strict=True)
    ]
    expected = op(*whole)
    with CommDebugMode() as sent:
        out = op(*sharded)
    assert sent.get_total_counts() == 0
    assert isinstance(out, DTensor)
    assert out.placements == (result,)
    torch.testing.assert_close(out.full_tensor(), expected)

    grad = torch.randint(-2, 3, expected.shape).to(expected.dtype)
    expected.backward(grad)
    place = result if result.is_shard() else distribute_tensor(grad, mesh).placements[0]
    out.backward(distribute_tensor(grad, mesh, [place]))
    for x, y, placement in zip(sharded, whole, gradients, strict=True):
        assert x.grad.placements == (placement,)
        # Each rank rounds its part of a sum.
        atol = float(y.grad.abs().max()) * 2**-8 if placement.is_partial() else 1e-5
        torch.testing.assert_close(x.grad.full_tensor(), y.grad, rtol=2**-7, atol=atol)


def integers(*shape: int) -> torch.Tensor:
    return torch.randint(-2, 3, shape).bfloat16()


# ---- attention ----


def attention_operands() -> tuple[torch.Tensor, ...]:
    return tuple(torch.randn(2, heads, 9, 16).bfloat16() for heads in (4, 2, 2))


@case
def attention(mesh) -> None:
    from torch.distributed.tensor import Replicate, Shard

    for p in (Replicate(), Shard(0), Shard(1)):
        compare(
            mesh,
            lambda *x: tk.attention(*x, causal=True),
            attention_operands(),
            [p] * 3,
            p,
            [p] * 3,
        )


@case
def attention_with_lse_of_a_replicated_key(mesh) -> None:
    """A replicated operand beside a sharded one takes its part; so does its gradient."""
    from torch.distributed.tensor import Replicate, Shard

    def lse(*x: torch.Tensor) -> torch.Tensor:
        return tk.attention(*x, window_size=(4, 1), return_lse=True)[1]

    placements = [Shard(0), Replicate(), Shard(0)]
    q, k, _ = attention_operands()
    compare(mesh, lambda q, k: lse(q, k, k), (q, k), placements[:2], Shard(0), [Shard(0)] * 2)


@case
def attention_with_a_sink(mesh) -> None:
    """Of which each rank has a part of the gradient, or the gradient of a part."""
    from torch.distributed.tensor import Partial, Replicate, Shard

    def attend(q, k, v, sink):
        return tk.attention(q, k, v, sink=sink)

    operands = (*attention_operands(), torch.randn(4))
    compare(
        mesh,
        attend,
        operands,
        [*[Shard(0)] * 3, Replicate()],
        Shard(0),
        [*[Shard(0)] * 3, Partial()],
    )
    heads = [*[Shard(1)] * 3, Shard(0)]
    compare(mesh, attend, operands, heads, Shard(1), heads)


@case
def attention_with_slopes(mesh) -> None:
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    for shape in ((4,), (2, 4)):
        slopes = torch.rand(shape)
        for p in (Replicate(), Shard(0), Shard(1)):
            of_slopes = Shard(len(shape) - 1) if p == Shard(1) else Replicate()
            with torch.no_grad():
                q, k, v = (distribute_tensor(x, mesh, [p]) for x in attention_operands())
                placed = distribute_tensor(slopes, mesh, [of_slopes])
                out = tk.attention(q, k, v, alibi_slopes=placed)
                whole = [x.full_tensor() for x in (q, k, v)]
                expected = tk.attention(*whole, alibi_slopes=slopes)
            assert out.placements == (p,)
            torch.testing.assert_close(out.full_tensor(), expected)


@case
def attention_is_refused(mesh) -> None:
    from torch.distributed.tensor import Shard, distribute_tensor

    q, k, v = attention_operands()
    sharded = [distribute_tensor(x, mesh, [Shard(2)]) for x in (q, k, v)]
    with pytest.raises(RuntimeError, match=r"tk\.attention: .* q is Shard\(2\), k is Shard\(2\)"):
        tk.attention(*sharded)
    mixed = [distribute_tensor(x, mesh, [Shard(i)]) for i, x in enumerate((q, k, v))]
    with pytest.raises(RuntimeError, match="supported are operands that are replicated, sharded"):
        tk.attention(*mixed)
    heads = [distribute_tensor(x, mesh, [Shard(1)]) for x in (q, k[:, :1], v[:, :1])]
    with pytest.raises(RuntimeError, match="where the ranks divide those of q and those of k"):
        tk.attention(*heads)


# ---- gemm ----


@case
def gemm(mesh) -> None:
    from torch.distributed.tensor import Partial, Replicate, Shard

    r, rows, columns, part = Replicate(), Shard(0), Shard(1), Partial()
    operands = integers(6, 16), integers(16, 8)
    for a, b, result, of_a, of_b in (
        (r, r, r, r, r),
        (rows, r, rows, rows, part),
        (r, columns, columns, part, columns),
        (columns, rows, part, columns, rows),
    ):
        compare(mesh, tk.gemm, operands, [a, b], result, [of_a, of_b])


@case
def gemm_of_a_linear_layer(mesh) -> None:
    """x (B, S, K), w (N, K) and a bias: by columns, then along K, as tensor-parallel layers do."""
    from torch.distributed.tensor import Partial, Replicate, Shard

    def linear(x, w, bias):
        return tk.gemm(x, w.t(), bias=bias)

    r, last, n = Replicate(), Shard(2), Shard(0)
    operands = integers(2, 3, 16), integers(8, 16), integers(8)
    compare(mesh, linear, operands, [r, n, n], last, [Partial(), n, n])
    compare(
        mesh,
        lambda x, w: linear(x, w, None),
        operands[:2],
        [last, Shard(1)],
        Partial(),
        [last, Shard(1)],
    )


@case
def gemm_of_batches(mesh) -> None:
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    operands = integers(2, 6, 16), integers(2, 16, 8)
    for a, b, result in (
        (Shard(0), Shard(0), Shard(0)),
        (Shard(1), Replicate(), Shard(1)),
        (Replicate(), Shard(2), Shard(2)),
    ):
        with torch.no_grad():
            out = tk.gemm(
                *(distribute_tensor(x, mesh, [p]) for x, p in zip(operands, (a, b), strict=True))
            )
        assert out.placements == (result,)
        assert torch.equal(out.full_tensor(), tk.gemm(*operands))


@case
def gemm_with_an_epilogue(mesh) -> None:
    from torch.distributed.tensor import Partial, Replicate, Shard

    r, rows, columns = Replicate(), Shard(0), Shard(1)
    operands = integers(6, 16), integers(16, 8) / 4, integers(8), integers(6, 8)

    def silu(a, b, bias, residual):
        return tk.gemm(a, b, bias=bias, activation="silu", residual=residual)

    compare(mesh, silu, operands, [rows, r, r, rows], rows, [rows, Partial(), Partial(), rows])
    compare(
        mesh,
        silu,
        operands,
        [r, columns, rows, columns],
        columns,
        [Partial(), columns, rows, columns],
    )

    def swiglu(a, b):
        return tk.gemm(a, b, activation="swiglu")

    compare(mesh, swiglu, operands[:2], [rows, r], rows, [rows, Partial()])


@case
def gemm_is_refused(mesh) -> None:
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    a = distribute_tensor(integers(6, 16), mesh, [Shard(1)])
    b = distribute_tensor(integers(16, 8), mesh, [Shard(0)])
    bias = distribute_tensor(integers(8), mesh, [Replicate()])
    with pytest.raises(RuntimeError, match=r"tk\.gemm: .* a is Shard\(1\), b is Shard\(0\), bias"):
        tk.gemm(a, b, bias=bias)
    with pytest.raises(RuntimeError, match="partial sums have no epilogue"):
        tk.gemm(a, b, activation="relu")
    columns = distribute_tensor(integers(16, 8), mesh, [Shard(1)])
    with pytest.raises(RuntimeError, match=r"a is Shard\(1\), b is Shard\(1\)"):
        tk.gemm(a, columns)
    whole = distribute_tensor(integers(6, 16), mesh)
    with pytest.raises(RuntimeError, match="without a gate, b by columns"):
        tk.gemm(whole, columns, activation="swiglu")


@case
def other_ops_take_replicated_operands(mesh) -> None:
    from torch.distributed.tensor import Shard, distribute_tensor

    x = torch.randn(256, 128).bfloat16()
    scale = tk.fp8_quantize(distribute_tensor(x, mesh))[1]
    assert torch.equal(scale.full_tensor(), tk.fp8_quantize(x)[1])
    with pytest.raises(RuntimeError, match=r"tk\.fp8_quantize: .* x is Shard\(0\); supported"):
        tk.fp8_quantize(distribute_tensor(x, mesh, [Shard(0)]))


# ---- the two ranks ----


@pytest.fixture(scope="module")
def faults(tmp_path_factory):
    return ranks.faults_of(__file__, tmp_path_factory.mktemp("ranks"))


@pytest.mark.timeout(360)
@pytest.mark.parametrize("name", CASES)
def test_case(faults, name):
    for of_rank in faults:
        assert name not in of_rank, of_rank[name]


if __name__ == "__main__":
    import thunderkittens.integrations.dtensor as integration

    integration.register()
    ranks.main(CASES)
