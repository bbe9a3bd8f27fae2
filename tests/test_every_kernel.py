"""Kernels of the registry, each by its name on the emulator: those that the tests of their op leave
out at a low intensity. At its end a run of the whole suite lists those that have not run."""

from __future__ import annotations

import itertools
import re
from types import SimpleNamespace

import pytest
import torch

import conftest
import test_mxfp8_quantize
import test_nvfp4_quantize
import thunderkittens as tk
from helpers import launched, norm_quantize
from helpers.norms import assert_gradients, assert_norm
from test_attention_kernels import BACKWARD, DTYPES, fields, kernels
from test_gemm_kernels import by_name, named
from test_mxfp8_gemm import operand
from thunderkittens import _C, emulation

if emulation.problem is not None:
    pytest.skip(emulation.problem, allow_module_level=True)

KINDS = {**DTYPES, "fp32": torch.float32, "e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}


def integers(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randint(-2, 3, shape).to(dtype)


def numbers_of(op: str, name: str) -> list[int]:
    kernel = next(k for k in _C.kernels() if (k["op"], k["name"]) == (op, name))
    return [int(n) for n in re.findall(r"\d+", kernel["config"])]


@pytest.mark.parametrize(
    "name", named("grouped_gemm", r"(fp16)_([nt])([nt])_(\d+)x(\d+)"), ids=by_name
)
def test_every_grouped_kernel_of_fp16(name):
    a, b = integers(80, 136, dtype=torch.float16), integers(3, 136, 264, dtype=torch.float16)
    offs = torch.tensor([5, 5, 73], dtype=torch.int32)
    expected = tk.reference.grouped_gemm(a, b, offs)
    left = a.t().contiguous().t() if name[2] == "t" else a
    right = b if name[3] == "n" else b.mT.contiguous().mT
    block_m, block_n, _, stages, *_, consumers = numbers_of("grouped_gemm", name[0])
    config = {"block_m": block_m, "block_n": block_n, "stages": stages, "consumers": consumers}
    with tk.emulate("late_mma", seed=1, config=config | {"blocks": 2, "raster_group": 1}) as run:
        out = tk.grouped_gemm(left, right, offs)
    assert torch.equal(out, expected)
    assert run.kernels[0]["kernel"] == name[0]


@pytest.mark.parametrize(
    "name", named("gemm", r"(bf16|fp16)_n([nt])_swap_ab_64x128_fused"), ids=by_name
)
def test_every_fused_swap_ab_kernel(name):
    dtype = DTYPES[name[1]]
    a, b = integers(61, 520, dtype=dtype), integers(520, 200, dtype=dtype)
    bias, residual = integers(200, dtype=dtype), integers(61, 200, dtype=dtype)
    config = {"block_m": 64, "block_n": 128, "stages": 4, "consumers": 1, "block_k": 128}
    config |= {"fused": True, "swap_ab": True, "splits": 2, "blocks": 4}
    right = b if name[2] == "n" else b.t().contiguous().t()
    with tk.emulate("late_mma", seed=1, config=config) as run:
        out = tk.gemm(a, right, bias=bias, residual=residual, activation="relu", beta=2.0)
    z = (a.float() @ b.float() + bias.float()).relu()
    assert torch.equal(out.float(), (z + 2 * residual.float()).to(dtype).float())
    assert run.kernels[0]["kernel"] == name[0]


@pytest.mark.parametrize(
    "name", named("gemm_backward", "(bf16|fp16|fp32)_(blocked|interleaved)"), ids=by_name
)
def test_every_gradient_of_a_gate(name):
    """Where silu is the identity or zero, it is exact."""
    grad, values = (integers(5, 24, dtype=KINDS[name[1]]) for _ in range(2))
    gates = torch.where(torch.arange(24) % 3 == 0, -300.0, 300.0).to(grad.dtype).expand(5, 24)
    parts = [gates, values]
    z = torch.cat(parts, 1) if name[2] == "blocked" else torch.stack(parts, 2).flatten(1)
    layout = {"blocked": 1, "interleaved": 2}[name[2]]
    with tk.emulate("late_mma") as run:
        out = torch.ops.thunderkittens.gemm_backward(grad, z, 4, layout)
    first, second = out.chunk(2, 1) if name[2] == "blocked" else (out[:, ::2], out[:, 1::2])
    there = gates > 0
    assert torch.equal(first, grad * values * there)
    assert torch.equal(second, (grad.double() * gates.double() * there).to(grad.dtype))
    assert run.kernels[0]["kernel"] == name[0]


@pytest.mark.parametrize(
    "name",
    named("mxfp8_quantize", r"(bf16|fp16|fp32)_(e4m3|e5m2)(_down)?(_portable)?"),
    ids=by_name,
)
def test_every_kernel_that_quantises_to_mxfp8(name):
    x = (torch.randn(70, 150) * torch.randn(70, 150).exp()).to(KINDS[name[1]])
    options = {"dtype": KINDS[name[2]], "transpose": name[3] is not None}
    with tk.emulate("random", seed=1, portable=name[4] is not None) as run:
        found = tk.mxfp8_quantize(x, **options)
    test_mxfp8_quantize.assert_same(found, tk.reference.mxfp8_quantize(x, **options))
    assert run.kernels[0]["kernel"] == name[0]


@pytest.mark.parametrize(
    "name",
    named("nvfp4_quantize", r"(bf16|fp16|fp32)_(1x16|16x16)(_stochastic)?(_portable)?"),
    ids=by_name,
)
def test_every_kernel_that_quantises_to_nvfp4(name):
    """With the pass before it that finds the largest magnitude."""
    x = torch.randn(70, 144).to(KINDS[name[1]])
    options = {"block": name[2], "seed": torch.tensor(7) if name[3] else None}
    with tk.emulate("random", seed=1, portable=name[4] is not None) as run:
        found = tk.nvfp4_quantize(x, **options)
    test_nvfp4_quantize.assert_same(found, tk.reference.nvfp4_quantize(x, **options))
    assert run.kernels[0]["kernel"] == name[0]


NORM = (
    r"(bf16|fp16|fp32)(_sum_fp32)?(_layer)?(_gated)?_(registers|wide|memory|cluster)(_\dunits)?"
    r"(_portable)?"
)


def norm_call(name):
    """Operands and options of a call that a kernel of the norms runs."""
    dtype, kind, layer, gated, path, units, portable = (name[i] for i in range(1, 8))
    width = {"_2units": 4104, "_4units": 8200}.get(units, 128)
    width = {"wide": 16416, "cluster": 16416, "memory": 129}.get(path, width)
    x = torch.randn(3, width).to(KINDS[dtype])
    tensors = {"x": x, "weight": torch.randn(width)}
    if layer:
        tensors["bias"] = torch.randn(width)
    if gated:
        tensors["gate"] = torch.randn_like(x)
    else:
        tensors["residual"] = torch.randn(3, width).to(torch.float32 if kind else x.dtype)
    return tensors, portable is not None


@pytest.mark.parametrize("name", named("rms_norm", NORM), ids=by_name)
def test_every_norm(name):
    tensors, portable = norm_call(name)
    with tk.emulate("random", seed=1, portable=portable) as run:
        assert_norm("rms_norm", tensors.pop("x"), tensors.pop("weight"), **tensors)
    assert run.kernels[0]["kernel"] == name[0]


@pytest.mark.parametrize("name", named("rms_norm_backward", NORM), ids=by_name)
def test_every_gradient_of_a_norm(name):
    tensors, portable = norm_call(name)
    op = "layer_norm" if name[3] else "rms_norm"
    with tk.emulate("random", seed=1, portable=portable) as run:
        assert_gradients(op, tuple(tensors), list(tensors.values()))
    assert run.kernels[1]["kernel"] == name[0]


@pytest.mark.parametrize(
    "name", named("rms_norm_quantize", r"(registers|memory|cluster)(_portable)?"), ids=by_name
)
@pytest.mark.parametrize("norm", ["rms_norm", "layer_norm"])
def test_every_quantizing_norm(name, norm):
    width = {"registers": 1032, "memory": 1034, "cluster": 16416}[name[1]]
    x = torch.randn(3 if name[1] == "cluster" else 9, width).to(torch.float16)
    factors = torch.randn(1 + (norm == "layer_norm"), x.shape[1])
    with tk.emulate("random", seed=1, portable=name[2] is not None) as run:
        for output in norm_quantize.OUTPUTS:
            options = norm_quantize.scale_for(output, "cpu") | {"output": output, "residual": x}
            actual = getattr(tk, f"{norm}_quantize")(x, *factors, **options)
            assert run.kernels[-1]["kernel"] == name[0]
            norm_quantize.assert_same(
                actual, norm_quantize.in_two_steps(norm, x, *factors, **options)
            )


@pytest.mark.parametrize("name", named("mxfp8_gemm", r"(e4m3|e5m2)_swap_ab_(\d+)"), ids=by_name)
def test_every_swap_ab_kernel_of_mxfp8(name):
    m, n, k = int(name[2]) - 1, 136, 288
    a, scale_a = operand(m, k, KINDS["e4m3"], True, "cpu")
    b, scale_b = operand(n, k, KINDS[name[1]], True, "cpu")
    scales, options = (scale_a, scale_b), {"out_dtype": torch.float32, "path": "exact"}
    with tk.emulate("late_mma", seed=1, sm_count=2) as run:
        out = tk.mxfp8_gemm(a, b.t(), *scales, **options)
    expected = tk.reference.mxfp8_gemm(a, b.t(), *scales, **options)
    assert torch.equal(out, expected)
    assert run.kernels[0]["kernel"] == name[0]


@pytest.mark.parametrize(("m", "splits"), [*itertools.product([16, 31], [1, 2, 3]), (61, 1)])
def test_native_swap_ab_with_split_k(m, splits):
    """By the blocks of a cluster, one for each tile of 64 columns: integers add up exactly."""
    a, scale_a = operand(m, 1056, KINDS["e4m3"], True, "cpu")
    b, scale_b = operand(200, 1056, KINDS["e4m3"], True, "cpu")
    config = {"splits": splits, "swap_ab_blocks": 4 * splits}
    # Of few multiprocessors the widest kernel has the tiles.
    few = {"sm_count": 4} if m > 32 else {}
    with tk.emulate("late_mma", seed=m, config=config, **few) as run:
        out = tk.mxfp8_gemm(a, b.t(), scale_a, scale_b, out_dtype=torch.float32, path="rebased")
    assert torch.equal(
        out, tk.reference.mxfp8_gemm(a, b.t(), scale_a, scale_b, out_dtype=torch.float32)
    )
    assert run.kernels[0]["kernel"] == f"native_swap_ab_{16 if m == 16 else 32 if m == 31 else 64}"
    assert run.kernels[0]["splits"] == splits


@pytest.mark.parametrize("m", [16, 31, 61])
def test_native_swap_ab_stores_beside_its_loads(m):
    """One block has all tiles: a finished one leaves by TMA from the stage that its last codes were
    in, while the others are loaded."""
    a, scale_a = operand(m, 1056, KINDS["e4m3"], True, "cpu")
    b, scale_b = operand(392, 1056, KINDS["e4m3"], True, "cpu")
    config = {"strategy": "swap_ab_native", "splits": 1, "swap_ab_blocks": 1}
    expected = tk.reference.mxfp8_gemm(a, b.t(), scale_a, scale_b)
    for policy in ("eager", "random"):
        with tk.emulate(policy, seed=m, config=config, sm_count=4) as run:
            out = tk.mxfp8_gemm(a, b.t(), scale_a, scale_b, path="rebased")
        assert torch.equal(out, expected)
        assert run.kernels[0]["kernel"].startswith("native_swap_ab_")


@pytest.mark.parametrize("out_dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("n", [392, 197])
@pytest.mark.parametrize("m", [16, 61])
def test_native_swap_ab_adds_the_bias(m, n, out_dtype):
    """To tiles that TMA stores, and to rows of odd length, which threads do."""
    a, scale_a = operand(m, 544, KINDS["e4m3"], True, "cpu")
    b, scale_b = operand(n, 544, KINDS["e4m3"], True, "cpu")
    options = {"bias": torch.randint(-4, 5, (n,)).bfloat16(), "out_dtype": out_dtype}
    config = {"strategy": "swap_ab_native", "splits": 1, "swap_ab_blocks": 2}
    with tk.emulate("late_mma", seed=m, config=config, sm_count=4) as run:
        out = tk.mxfp8_gemm(a, b.t(), scale_a, scale_b, path="rebased", **options)
    assert torch.equal(out, tk.reference.mxfp8_gemm(a, b.t(), scale_a, scale_b, **options))
    assert run.kernels[0]["kernel"].startswith("native_swap_ab_")


# ---- the record of what has run ----


def test_the_record_names_kernels_of_the_registry():
    """Also what runs beside the kernel that is chosen."""
    record = launched.Record()
    record.install()
    q, k, v = (torch.randn(1, 1, 70, n).half().requires_grad_() for n in (16, 16, 72))
    with tk.emulate("late_mma", config={"segments": 2}):
        tk.based(q, k, v, normalize=True).float().sum().backward()
    with tk.emulate("late_mma"):
        tk.nvfp4_quantize(torch.randn(3, 32).bfloat16())
    record.remove()
    assert launched.unknown(record.launched) == []
    beside = {
        "scan_denominator",
        "segment_states_fp16_weighted",
        "reduce_partials_fp16",
        "maxima_bf16",
    }
    assert beside <= {name for _, name in record.launched}
    left = launched.missing(record.launched)
    assert "attention_backward backward_sink" in left
    assert "based scan" not in left


def test_every_kernel_of_a_gradient_can_be_recorded():
    """By the calls that there are: with and without dQ, in any order and in a fixed one."""
    found = set()
    for name, match, stages in kernels("attention_backward", *BACKWARD):
        value_dim = int(match[4] or match[3])
        values = {n: torch.empty(1, 1, 1, n) for n in (value_dim, min(value_dim, 64))}
        for needs_q, deterministic in ((False, False), (True, False), (True, True)):
            call = {"needs_q": needs_q, "needs_k": True, "deterministic": deterministic}
            call |= {"sink": torch.empty(1), "needs_sink": True}
            for splits, v in itertools.product((1, 2), values.values()):
                choice = fields(match, stages, head_splits=splits, kernel=name, dtype=match[2])
                found |= set(launched.launches("attention_backward", choice, {**call, "v": v}))
    assert launched.unknown(found) == []
    assert not any(x.startswith("attention_backward ") for x in launched.missing(found))


def test_a_run_of_the_whole_suite_fails_where_a_kernel_has_not_run(monkeypatch):
    record, listed = launched.Record(), []
    monkeypatch.setattr(conftest, "_record", record)
    monkeypatch.setattr(conftest, "_not_launched", listed)
    monkeypatch.setattr(launched, "is_whole_suite", lambda config: True)
    session = SimpleNamespace(config=SimpleNamespace(), shouldstop=False, shouldfail=False)
    session.exitstatus = pytest.ExitCode.OK
    record.launched = {(k["op"], k["name"]) for k in _C.kernels()}
    conftest.pytest_sessionfinish(session)
    assert (session.exitstatus, listed) == (pytest.ExitCode.OK, [])
    record.launched.remove(("lolcats_backward", "scan"))
    conftest.pytest_sessionfinish(session)
    assert session.exitstatus == pytest.ExitCode.TESTS_FAILED
    assert listed == ["lolcats_backward scan"]
