"""Ops that write to tensors of the caller: what overlaps them is found, to the element, and nothing
else is refused."""

from __future__ import annotations

import itertools
import re

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import thunderkittens as tk
from helpers.lolcats import operands as lolcats_operands
from thunderkittens.ops import _memory as memory

BF16, FP32 = torch.bfloat16, torch.float32
SIZE = 96  # elements of 2 bytes that the views lie in


def addresses(x: Tensor) -> list[tuple[int, ...]]:
    """The bytes of each element, counted from the storage's first, by the definition of strides."""
    size = x.element_size()
    places = []
    for index in itertools.product(*(range(n) for n in x.shape)):
        at = x.storage_offset() + sum(i * s for i, s in zip(index, x.stride(), strict=True))
        places.append(tuple(range(at * size, (at + 1) * size)))
    return places


def overlap_of(x: Tensor, y: Tensor) -> bool:
    first, second = ({byte for place in addresses(t) for byte in place} for t in (x, y))
    return bool(first & second)


def repeats_of(x: Tensor) -> bool:
    places = addresses(x)
    return len(set(places)) < len(places)


@st.composite
def views(draw, storage):
    """Any strided view of a storage of `SIZE` elements, or of half as many wider ones."""
    base = draw(st.sampled_from([storage, storage.view(FP32)]))
    shape = draw(st.lists(st.integers(0, 5), max_size=4))
    room = base.numel() - 1
    strides = []
    for n in shape:
        stride = draw(st.integers(0, min(room // max(n - 1, 1), 20)))
        room -= stride * max(n - 1, 0)
        strides.append(stride)
    return base.as_strided(shape, strides, draw(st.integers(0, room)))


STORAGE = torch.zeros(SIZE, dtype=BF16)


@given(x=views(STORAGE), y=views(STORAGE))
def test_overlap_is_exact(x, y):
    assert memory.overlap(x, y) == memory.overlap(y, x) == overlap_of(x, y)
    assert memory.repeats(x) == repeats_of(x)


@given(
    rows=st.integers(1, 5),
    columns=st.tuples(st.integers(1, 7), st.integers(1, 7)),
    begins=st.tuples(st.integers(0, 40), st.integers(0, 40)),
    strides=st.tuples(st.integers(1, 12), st.integers(1, 12)),
)
def test_overlap_of_matrices(rows, columns, begins, strides):
    """Rows of adjacent elements, most of which lie in each other's gaps."""
    x, y = (
        STORAGE.as_strided((min(rows, (SIZE - begin - n) // stride + 1), n), (stride, 1), begin)
        for n, begin, stride in zip(columns, begins, strides, strict=True)
    )
    assert memory.overlap(x, y) == overlap_of(x, y)
    assert memory.repeats(x) == repeats_of(x)


@given(
    tensors=st.lists(views(STORAGE), min_size=1, max_size=5),
    written=st.integers(1, 3),
)
def test_written_tensors_are_apart(tensors, written):
    written = min(written, len(tensors))
    names = [f"x{i}" for i in range(len(tensors))]
    pairs = [(i, j) for i in range(written) for j in range(i + 1, len(tensors))]
    repeated = [i for i in range(written) if repeats_of(tensors[i])]
    shared = [(i, j) for i, j in pairs if overlap_of(tensors[i], tensors[j])]
    if not repeated and not shared:
        memory.require_apart("op", names, tensors, written)
        return
    words = [f"tk.op: x{i} has shape" for i in repeated] or [
        f"tk.op: x{i} overlaps x{j}; " for i, j in shared
    ]
    with pytest.raises(ValueError, match="|".join(map(re.escape, words))):
        memory.require_apart("op", names, tensors, written)


def test_what_takes_too_long_counts_as_shared():
    """Views that no indexing makes, whose common address would take minutes to find or exclude."""
    base = torch.empty(192163377, dtype=torch.uint8)
    x = base.as_strided((1049,) * 3, (36674, 61119, 85569))
    y = base.as_strided((1049,) * 3, (12223, 12224, 1), 64023025)
    assert memory.overlap(x, y)


def normal(*shape: int, device: str, dtype: torch.dtype = BF16) -> Tensor:
    return torch.randn(shape, device=device).to(dtype)


def test_gemm_refuses_strided_overlap(device):
    """An operand in, or across, the rows of an `out` with gaps."""
    a, b = normal(4, 16, device=device), normal(16, 8, device=device)
    wide = normal(5, 40, device=device)
    out = wide[:4, 8:16]
    before = wide.clone()
    inside = {
        "bias": {"bias": out[2]},
        "residual": {"residual": wide[1:, 8:16]},
        "residual ": {"residual": wide[:4, 9:17]},
        " residual": {"residual": wide[:4, 1:9]},
    }
    for name, option in inside.items():
        with pytest.raises(ValueError, match=f"^tk.gemm: out overlaps {name.strip()}; it may be"):
            tk.gemm(a, b, **option, out=out)
    with pytest.raises(ValueError, match=r"^tk.gemm: out overlaps a; it may be"):
        tk.gemm(wide[:4, 15:31], b, out=out)
    with pytest.raises(ValueError, match=r"^tk.gemm: out overlaps b; it may be"):
        tk.gemm(a, wide.flatten()[48:176].view(16, 8), out=out)
    assert torch.equal(wide, before)
    # A batch's matrices, one of which the operand lies in.
    batch = normal(3, 4, 24, device=device)
    with pytest.raises(ValueError, match=r"^tk.gemm: out overlaps bias; "):
        tk.gemm(normal(3, 4, 16, device=device), b, bias=batch[1, 2, 7:15], out=batch[..., :8])


def test_gemm_accepts_neighbours(device):
    """Operands between the rows of `out`, and the residual that is it."""
    wide = normal(4, 48, device=device)
    out = wide[:, 8:16]
    a, residual, bias = wide[:, 16:32], wide[:, 32:40], wide[2, 40:48]
    b = normal(16, 8, device=device)
    plain = tk.gemm(a.clone(), b, bias=bias.clone(), residual=residual.clone())
    before = wide.clone()
    tk.gemm(a, b, bias=bias, residual=residual, out=out)
    assert torch.equal(out, plain)
    wide[:, 8:16] = before[:, 8:16]
    assert torch.equal(wide, before)
    plain = tk.gemm(a.clone(), b, residual=out.clone())
    tk.gemm(a, b, residual=wide[:, 8:16], out=out)
    assert torch.equal(out, plain)
    # Rows that interleave: those of out are the odd ones.
    rows = normal(8, 16, device=device)
    plain = tk.gemm(rows[::2].clone(), b[:, :8].clone(), alpha=0.5)
    tk.gemm(rows[::2], b[:, :8], alpha=0.5, out=rows[1::2, :8])
    assert torch.equal(rows[1::2, :8], plain)


def based_call(device: str) -> list[Tensor]:
    q, k, v = (normal(2, 2, 1, n, device=device) for n in (16, 16, 24))
    numerator, denominator = torch.zeros(2, 2, 153, 24), torch.zeros(2, 2, 153)
    return [q, k, v, numerator.to(device), denominator.to(device)]


def test_based_decode_refuses_overlap(device):
    q, k, v, numerator, denominator = based_call(device)
    one = numerator[:1].expand(2, -1, -1, -1)
    with pytest.raises(ValueError, match=r"^tk.based_decode: the state's numerator has shape"):
        tk.based_decode(q, k, v, (one, denominator))
    shared = denominator[:, :1].expand(-1, 2, -1)
    with pytest.raises(ValueError, match=r"^tk.based_decode: the state's denominator has shape"):
        tk.based_decode(q, k, v, (numerator, shared))
    part = numerator.flatten()[: denominator.numel()].view_as(denominator)
    words = r"^tk.based_decode: the state's numerator overlaps the state's denominator; "
    with pytest.raises(ValueError, match=words):
        tk.based_decode(q, k, v, (numerator, part))
    inside = numerator.view(BF16).flatten()[96 : 96 + v.numel()].view_as(v)
    with pytest.raises(ValueError, match=r"^tk.based_decode: the state's numerator overlaps v; "):
        tk.based_decode(q, k, inside, (numerator, denominator))
    assert bool((numerator == 0).all())
    # One tensor holds both, a head's columns being followed by its denominator.
    both = torch.zeros(2, 2, 153, 32, device=device)
    out = tk.based_decode(q, k, v, (both[..., :24], both[..., 24]))
    assert torch.equal(out, tk.based_decode(q, k, v, (numerator, denominator)))
    assert torch.equal(both[..., :24], numerator)
    assert torch.equal(both[..., 24], denominator)


def test_lolcats_decode_refuses_overlap(device):
    operands = lolcats_operands(2, 4, 2, 1, 64, 32, device=device)
    state = tk.reference.empty_state(2, 4, 2, 64, 32, device=device)
    wrong = {
        "keys overlaps the state's values": state._replace(values=state.keys),
        "numerator overlaps the state's denominator": state._replace(
            denominator=state.numerator[..., 0].flatten().as_strided((2, 4, 64), (256, 64, 1))
        ),
    }
    for words, parts in wrong.items():
        with pytest.raises(ValueError, match=f"^tk.lolcats_decode: the state's {words}; "):
            tk.lolcats_decode(*operands, parts)
    inside = [state.keys[:, :, 5:6], *operands[1:]]
    inside[0] = state.keys.flatten()[: operands[0].numel()].view_as(operands[0])
    with pytest.raises(ValueError, match=r"^tk.lolcats_decode: the state's keys overlaps q; "):
        tk.lolcats_decode(*inside, state)
    assert bool((state.lengths == 0).all())
    tk.lolcats_decode(*operands, state)
    assert bool((state.lengths == 1).all())


@pytest.mark.parametrize("op", ["based_decode", "lolcats_decode"])
def test_compiled_calls_check_nothing(op):
    """What is traced has no addresses."""
    if op == "based_decode":
        operands = based_call("cpu")
        call = lambda *x: tk.based_decode(*x[:3], x[3:])  # noqa: E731
    else:
        operands = lolcats_operands(2, 4, 2, 1, 64, 32)
        operands += list(tk.reference.empty_state(2, 4, 2, 64, 32))
        call = lambda *x: tk.lolcats_decode(*x[:7], x[7:])  # noqa: E731
    copies = [x.clone() for x in operands]
    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(*operands), call(*copies))
