"""gemm's kernel for a short k, which reads operands of any alignment where they lie: both tiles,
every layout, address and pitch; what lies around operands and results; and when it is chosen."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

import thunderkittens as tk
from helpers.cover import cover, over
from helpers.layouts import NAN
from helpers.policies import every_dtype_and_policy
from test_gemm_kernels import DTYPES, H200, POLICIES
from thunderkittens import _C, emulation
from thunderkittens.bench import forced

if emulation.problem is not None:
    pytest.skip(emulation.problem, allow_module_level=True)

TILES = {64: 10, 128: 8}  # columns, and the stages of other kernels of the configuration
LAYOUTS = tuple(itertools.product((False, True), repeat=2))  # a_m_major, b_n_major


def config(block_n: int) -> dict[str, object]:
    """What forces the kernel, whatever has been chosen."""
    plain = {"consumers": 1, "block_k": 64, "swap_ab": False, "cluster_tile": False}
    tile = {"block_m": 64, "block_n": block_n, "stages": TILES[block_n]}
    return {"strategy": "short_k", **tile, **plain}


def integers(*shape: int, dtype: torch.dtype, device: str = "cpu") -> Tensor:
    return torch.randint(-4, 5, shape, device=device).to(dtype)


def placed(x: Tensor, along_rows: bool, offset: int, padding: int) -> Tensor:
    """The same values in rows (or columns, if these are to be adjacent) with `padding` elements of
    NaN between them, `offset` elements behind an address that is a multiple of 16 bytes. They begin
    and end where their memory does, but for the NaN that make the offset."""
    if not along_rows:
        return placed(x.mT, True, offset, padding).mT
    *batch, rows, columns = x.shape
    pitch = columns + padding
    strides = [rows * pitch, pitch, 1][-x.dim() :]
    used = sum((n - 1) * s for n, s in zip(x.shape, strides, strict=True)) + 1
    memory = torch.full((offset + used,), NAN, dtype=x.dtype, device=x.device)
    view = memory[offset:].as_strided([*batch, rows, columns], strides)
    view.copy_(x)
    return view


# Below, at and above the edges of tiles, of steps of k, of vectors and of what is loaded at a time.
SIZES = (
    (1, 1, 1),
    (63, 65, 3),
    (64, 64, 64),
    (65, 129, 130),
    (3, 200, 40),
    (129, 7, 33),
    (66, 128, 127),
    (40, 33, 300),
    (72, 136, 128),
    (130, 61, 17),
    (5, 70, 96),
    (64, 66, 5),
)


@every_dtype_and_policy
@pytest.mark.parametrize("block_n", TILES)
def test_every_layout_address_and_pitch(block_n, dtype, policy):
    """Bits of the reference, though NaN lie around the operands; the memory of the operands ends
    with their last element, and the emulator refuses reads behind it and before its begin."""
    first = (DTYPES.index(dtype) + 2 * POLICIES.index(policy)) % 3
    for number, (m, n, k) in enumerate(SIZES):
        a_m_major, b_n_major = LAYOUTS[(number + first) % 4]
        a, b = integers(m, k, dtype=dtype), integers(k, n, dtype=dtype)
        left = placed(a, not a_m_major, (number + first) % 8, number % 3)
        right = placed(b, b_n_major, (5 * number + first) % 8, (number + first) % 9)
        with tk.emulate(policy, seed=number, config=config(block_n)) as run:
            out = tk.gemm(left, right)
        assert torch.equal(out, (a.float() @ b.float()).to(dtype)), (m, n, k, number)
        name = run.kernels[0]["kernel"].partition("_")[2]
        layout = "nt"[run.kernels[0]["a_m_major"]] + "tn"[run.kernels[0]["b_n_major"]]
        assert name == f"{layout}_64x{block_n}_short_k"
        if min(m, n, k) > 1:
            assert layout == "nt"[a_m_major] + "tn"[b_n_major]


@pytest.mark.parametrize("block_n", TILES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_k(layout, block_n):
    """All lengths of a last step, whose rest must not be multiplied, at all addresses."""
    a_m_major, b_n_major = layout
    for k in (*range(1, 36), 47, 48, 49, *range(63, 67), *range(126, 131)):
        a, b = integers(9, k, dtype=torch.bfloat16), integers(k, 11, dtype=torch.bfloat16)
        left = placed(a, not a_m_major, k % 8, k // 8 % 3)
        right = placed(b, b_n_major, (k + 3) % 8, k // 4 % 3)
        with tk.emulate("on_wait", config=config(block_n)):
            assert torch.equal(tk.gemm(left, right), (a.float() @ b.float()).bfloat16()), k


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("block_n", TILES)
@pytest.mark.parametrize("out_dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_epilogue_and_rows_of_any_address(out_dtype, block_n, policy):
    """Scale, bias, batches, one b for all of them; results in rows of any address and pitch, around
    which nothing is written."""
    for number, (m, n, k) in enumerate(((65, 67, 24), (3, 200, 65), (70, 64, 9), (1, 5, 30))):
        for offset, padding in ((number, 1), (3 + number, 0), (0, 8), (7, 3)):
            batch = 1 + number % 3
            dtype = DTYPES[number % 2]
            a_m_major, b_n_major = LAYOUTS[(number + offset) % 4]
            a = integers(batch, m, k, dtype=dtype)
            b = integers(*([batch] if offset % 2 else []), k, n, dtype=dtype)
            bias = integers(n, dtype=dtype) if number != 2 else None
            left = placed(a, not a_m_major, offset, number)
            right = placed(b, b_n_major, 1, padding)
            pitch = n + padding
            memory = torch.full((offset + batch * m * pitch,), 77.0, dtype=out_dtype)
            out = memory[offset:].as_strided((batch, m, n), (m * pitch, pitch, 1))
            expected = 0.5 * (a.float() @ b.float()) + (0 if bias is None else bias.float())
            untouched = memory.clone()
            untouched[offset:].as_strided((batch, m, n), (m * pitch, pitch, 1)).copy_(expected)
            with tk.emulate(policy, seed=offset, config=config(block_n)) as run:
                tk.gemm(left, right, bias=bias, alpha=0.5, out=out)
            assert torch.equal(memory, untouched), (m, n, k, offset, padding)
            assert run.kernels[0]["kernel"].endswith("_short_k")


@pytest.mark.parametrize("block_n", TILES)
@pytest.mark.parametrize("out_dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_fused_epilogue(out_dtype, block_n):
    """What is kept for the gradient, activations, a residual of any address and pitch, which may be
    the output."""
    for number, (m, n, k) in enumerate(((65, 67, 24), (3, 200, 65), (70, 64, 9), (1, 5, 30))):
        batch, dtype = 1 + number % 2, DTYPES[number % 2]
        a_m_major, b_n_major = LAYOUTS[number]
        a, b = integers(batch, m, k, dtype=dtype), integers(batch, k, n, dtype=dtype)
        bias, residual = integers(n, dtype=dtype), integers(batch, m, n, dtype=out_dtype)
        left = placed(a, not a_m_major, number, 1)
        right = placed(b, b_n_major, 3, number)
        z = (a.float() @ b.float() + bias.float()).to(torch.float32)
        for activation, function in (("relu", torch.relu), (None, lambda x: x)):
            into = placed(residual, True, 2 * number + 1, number)
            expected = (function(z) - 2 * residual.float()).to(out_dtype)
            arguments = {"bias": bias, "activation": activation, "residual": into, "beta": -2.0}
            with tk.emulate("late_mma", seed=number, config=config(block_n)) as run:
                out = tk.gemm(left, right, **arguments, out_dtype=out_dtype)
                tk.gemm(left, right, **arguments, out=into)
            assert torch.equal(out, expected), (m, n, k, activation)
            assert torch.equal(into, expected), (m, n, k, activation)
            assert all(x["kernel"].endswith("_short_k") for x in run.kernels)
        kept = [x.clone().requires_grad_() for x in (a, b)]
        with tk.emulate("on_wait", config=config(block_n)):
            out = tk.gemm(*kept, activation="silu")
        with tk.emulate("on_wait"):
            out.float().square().sum().backward()
        x = [x.detach().float().requires_grad_() for x in kept]
        torch.nn.functional.silu(x[0] @ x[1]).square().sum().backward()
        for ours, theirs in zip(kept, x, strict=True):
            scale = theirs.grad.abs().max().item()
            torch.testing.assert_close(ours.grad.float(), theirs.grad, rtol=0.05, atol=0.02 * scale)


@pytest.mark.parametrize("block_n", TILES)
def test_rows_that_are_one(block_n):
    """Expanded operands, whose rows lie on each other, no k, and operands that TMA could read."""
    row, b = integers(1, 21, dtype=torch.bfloat16), integers(21, 19, dtype=torch.bfloat16)
    rows = placed(row, True, 3, 0).expand(70, 21)
    with tk.emulate("late_mma", config=config(block_n)):
        out = tk.gemm(rows, b)
    assert torch.equal(out, (rows.float() @ b.float()).bfloat16())
    nothing = torch.empty(5, 0, dtype=torch.bfloat16), torch.empty(0, 3, dtype=torch.bfloat16)
    bias = integers(3, dtype=torch.bfloat16)
    with tk.emulate("late_mma", config=config(block_n)):
        assert torch.equal(tk.gemm(*nothing, bias=bias), bias.expand(5, 3))
    a, b = integers(72, 64, dtype=torch.bfloat16), integers(64, 136, dtype=torch.bfloat16)
    with tk.emulate("on_wait", config=config(block_n)):
        assert torch.equal(tk.gemm(a, b), (a.float() @ b.float()).bfloat16())


def choose(m: int, n: int, k: int, **fields: object) -> dict[str, object]:
    return _C.choose("gemm", {"m": m, "n": n, "k": k, "batch": 1, **fields}, H200)


def test_choice():
    """It is chosen for a short k, where an operand would have to be copied and elsewhere."""
    for fields in ({"a_needs_copy": True}, {"b_needs_copy": True}):
        assert choose(500, 700, 40, **fields)["kernel"].endswith("_short_k")
        assert not choose(500, 700, 4000, **fields)["kernel"].endswith("_short_k")
        assert choose(500, 700, 40, **fields, fused=True)["kernel"].endswith("_short_k")
        gated = {"fused": True, "gate": 1}
        assert not choose(500, 700, 40, **fields, **gated)["kernel"].endswith("_short_k")
    assert not choose(500, 700, 40)["kernel"].endswith("_short_k")
    # Its grid ends there.
    assert not choose(65535 * 64 + 1, 64, 40, a_needs_copy=True)["kernel"].endswith("_short_k")
    many = choose(64, 64, 40, a_needs_copy=True) | {"batch": 1}
    assert many["blocks"] == 1
    fields = {"a_needs_copy": True, "batch": 70000}
    assert not choose(500, 700, 40, **fields)["kernel"].endswith("_short_k")


def cases(device, intensity):
    return cover(
        {
            "shape": [(130, 67, 40), (1, 300, 100), (64, 128, 250), (257, 129, 31), (37, 1, 64)]
            + [(3001, 1999, 77), (40, 9001, 33), (5001, 63, 127)] * (device == "cuda"),
            "layout": LAYOUTS,
            "place": [(1, 0), (2, 1), (4, 2), (0, 3), (7, 8)],
            "dtype": list(DTYPES),
            "out": [None, torch.float32],
            "bias": [True, False],
        },
        intensity,
    )


@over(cases)
def test_values(device, case):
    """As it is chosen, on every back end."""
    (m, n, k), (a_m_major, b_n_major) = case["shape"], case["layout"]
    offset, padding = case["place"]
    dtype = case["dtype"]
    a, b = (integers(*s, dtype=dtype, device=device) for s in ((m, k), (k, n)))
    bias = integers(n, dtype=dtype, device=device) if case["bias"] else None
    left = placed(a, not a_m_major, offset, padding)
    right = placed(b, b_n_major, (offset + 3) % 8, padding + 1)
    out = tk.gemm(left, right, bias=bias, out_dtype=case["out"])
    expected = a.float() @ b.float() + (0 if bias is None else bias.float())
    assert torch.equal(out, expected.to(case["out"] or dtype))


@pytest.mark.gpu
@pytest.mark.parametrize("block_n", TILES)
def test_every_layout_address_and_pitch_on_the_gpu(block_n, device):
    """Both tiles, which a choice alone would not run for all of these."""
    force, text = forced.library_function(), forced.text_of(config(block_n))
    for number, (m, n, k) in enumerate((*SIZES, (700, 1001, 90), (2049, 300, 64))):
        for turn, (a_m_major, b_n_major) in enumerate(LAYOUTS):
            dtype = DTYPES[(number + turn) % 2]
            a, b = (integers(*s, dtype=dtype, device=device) for s in ((m, k), (k, n)))
            offset, padding = (3 * number + turn) % 8, (number + turn) % 9
            left = placed(a, not a_m_major, offset, number % 3)
            right = placed(b, b_n_major, (5 * offset + 1) % 8, padding)
            memory = torch.full((offset + m * (n + padding),), 77.0, dtype=dtype, device=device)
            untouched = memory.clone()
            outs = [x[offset:].as_strided((m, n), (n + padding, 1)) for x in (memory, untouched)]
            outs[1].copy_(a.float() @ b.float())
            with forced.forced(force, "gemm", text):
                tk.gemm(left, right, out=outs[0])
            assert torch.equal(memory, untouched), (m, n, k, a_m_major, b_n_major)


@pytest.mark.parametrize("pitch", [136, 2**25])
def test_rows_too_far_apart(pitch):
    """The kernel counts bytes in 31 bits: operands that reach further are another kernel's."""
    values = integers(64, 128, dtype=torch.bfloat16)
    a = torch.empty(63 * pitch + 128, dtype=torch.bfloat16).as_strided((64, 128), (pitch, 1))
    a.copy_(values)
    b = integers(128, 40, dtype=torch.bfloat16)
    with tk.emulate() as run:
        out = tk.gemm(a, b, activation="relu")
    assert (run.kernels[0]["strategy"] == "short_k") == (pitch == 136)
    assert torch.equal(out, (values.float() @ b.float()).relu().to(out.dtype))
