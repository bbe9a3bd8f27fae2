"""What could run instead of the choice, and what the choice loses."""

from __future__ import annotations

import json
import math

import pytest
import torch

import thunderkittens as tk
from thunderkittens import _load, bench, info
from thunderkittens.bench import forced, regret
from thunderkittens.bench.suites import gemm

CPU = torch.device("cpu")
PROBLEM = {"m": 1024, "n": 1024, "k": 4096, "b_n_major": False}


def module():
    found = _load.compiled_module()
    if "gemm" not in found.ops():
        pytest.skip("this build leaves gemm out")
    return found


def listed(op: str, **problem) -> list[dict]:
    compiled = module()
    device = compiled.DeviceProperties(**info.EXAMPLE_GPU)
    return compiled.candidates(op, problem, device)


def test_candidates_begin_with_the_choice():
    compiled = module()
    device = compiled.DeviceProperties(**info.EXAMPLE_GPU)
    known = {kernel["name"] for kernel in compiled.kernels() if kernel["op"] == "gemm"}
    for problem in (
        PROBLEM,
        {"m": 16, "n": 8192, "k": 8192},
        {"m": 200, "n": 64, "k": 8192},
        {"m": 3000, "n": 1000, "k": 100, "a_m_major": True},
        {"m": 512, "n": 512, "k": 512, "batch": 8, "dtype": "fp16", "out_dtype": "fp16"},
        {"m": 512, "n": 512, "k": 512, "fused": True},
    ):
        found = listed("gemm", **problem)
        assert found[0] == compiled.choose("gemm", problem, device)
        assert {fields["kernel"] for fields in found} <= known
        names = forced.labels(found)
        assert len(set(names)) == len(names) == len(found)
        for fields in found:
            assert fields["dtype"] == problem.get("dtype", "bf16")
            # Some kernels have every epilogue.
            general = fields["strategy"] in ("cluster_tile", "short_k")
            assert fields["fused"] == (problem.get("fused", False) and not general)
            assert fields["a_m_major"] == problem.get("a_m_major", False)
            assert fields["b_n_major"] == problem.get("b_n_major", True)
            assert fields["blocks"] % fields["splits"] == 0


def test_candidates_divide_k_in_every_way():
    names = forced.labels(listed("gemm", **PROBLEM))
    assert sum("split_k" in name for name in names) > 4
    assert any("192x192_cluster" in name for name in names)
    assert any("128x256" in name for name in names)
    skinny = forced.labels(listed("gemm", m=16, n=512, k=8192))
    assert sum("swap_ab_16x64" in name for name in skinny) == 5
    assert not any("swap_ab_" in name for name in forced.labels(listed("gemm", m=300, n=64, k=64)))
    grouped = listed("grouped_gemm", m=4096, n=4096, k=512, groups=8)
    assert {fields["block_n"] for fields in grouped} == {128, 256}
    assert listed("mxfp8_quantize", rows=64, columns=64) == []


def test_candidates_of_attention():
    sizes = {"batch": 1, "q_heads": 8, "kv_heads": 2, "k_length": 1000}
    dims = {"head_dim": 128, "value_dim": 128}
    found = listed("attention", q_length=1, **sizes, **dims)
    assert {fields["splits"] for fields in found} >= {0, 1, 2, 3, 4, 6, 8}
    found = listed("attention", q_length=1000, **sizes, **dims)
    assert {fields["splits"] for fields in found} >= {0, 1, 2, 3}
    sizes["batch"] = 64  # too many blocks for splitting keys
    found = listed("attention", q_length=1000, **sizes, **dims)
    assert {fields["block_n"] for fields in found} == {64, 128}
    assert not any(fields["splits"] or fields["score_mod"] for fields in found)
    (softcap,) = listed("attention", q_length=1000, softcap=True, **sizes, **dims)
    assert softcap["softcap_only"]


def test_text_of_forced_fields():
    fields = {"kernel": "x", "dtype": "bf16", "fused": False, "swap_ab": True, "block_m": 64}
    assert forced.text_of(fields) == "fused=0 swap_ab=1 block_m=64"
    assert forced.text_of({"strategy": "split_k", "splits": 3}) == "strategy=split_k splits=3"
    calls = []

    def force(op, text):
        calls.append((op, text))
        return text != b"bad"

    variant = forced.forcing(lambda a: a + 1, "gemm", fields, force)
    assert variant.prepare(a=1)() == 2
    assert calls == [(b"gemm", b"fused=0 swap_ab=1 block_m=64"), (b"", b"")]
    with pytest.raises(ValueError, match="cannot be forced"), forced.forced(force, "gemm", "bad"):
        pass


def result(times: dict[str, float], chosen: str, first: dict | None = None) -> regret.Regret:
    case = gemm.make_case(16, 24, 32, "NN", torch.bfloat16)
    every = {**(first or {}), **times, chosen: 0.0}
    kernels = {label: label.split(" ")[0] for label in every}
    return regret.Regret(case, chosen, kernels, first or dict(times), times, "stream")


def test_regret_and_worth():
    regrets = [
        result({"a (splits 2)": 10.0, "a (splits 3)": 8.0, "b": 16.0}, "a (splits 2)"),
        result({"b": 5.0, "a (splits 2)": 10.0}, "b", {"b": 10.0, "a (splits 2)": 20.0, "c": 40.0}),
        result({}, "b"),
    ]
    assert regrets[0].value == pytest.approx(0.8)
    assert regrets[1].value == 1.0
    assert math.isnan(regrets[2].value)
    # What was timed at the first look alone is scaled to the second.
    assert regrets[1].by_kernel() == pytest.approx({"b": 5.0, "a": 10.0, "c": 20.0})
    b, a, c = regret.worths(regrets)
    assert (a.kernel, a.won, a.chosen, a.gain) == ("a", 1, 1, pytest.approx(2.0))
    assert (b.kernel, b.won, b.chosen, b.timed, b.gain) == ("b", 1, 2, 2, pytest.approx(2.0))
    assert (c.won, c.timed) == (0, 1)
    built = regret.resources(
        "gemm",
        [
            {"op": "gemm", "name": "a", "registers": 168, "code_bytes": 10, "seconds": 3.5},
            {"op": "gemm", "name": "a", "registers": 128, "code_bytes": 5, "seconds": 3.5},
            {"op": "other", "name": "b", "registers": 1},
            {"registers": 7},
        ],
    )
    assert built == {"a": {"registers": 168, "code_bytes": 15, "seconds": 3.5}}
    text = regret.report(regrets, built)
    for words in ("0.800", "a (splits 3)", "168", "3.5", "50%"):
        assert words in text
    content = regret.record(regrets, built)
    assert content == json.loads(json.dumps(content, allow_nan=False))
    assert content["regret"]["geometric_mean"] == pytest.approx(math.sqrt(0.8), rel=1e-5)
    assert [row.get("code_bytes") for row in content["kernels"]] == [None, 15, None]
    assert content["shapes"][2]["best"] is None


class Fixed(bench.CpuTimer):
    """Times that are given, by name."""

    def __init__(self, times: dict[str, float]) -> None:
        super().__init__()
        self.times, self.asked = times, []

    def measure(self, calls, *, repetitions, seconds):
        self.asked.append(sorted(calls))
        return bench.Rounds({name: bench.Timing.of([self.times[name]]) for name in calls})


def test_those_near_the_best_are_timed_again():
    case = gemm.make_case(16, 24, 32, "NN", torch.bfloat16)
    times = {"chosen": 20.0, "best": 10.0, "near": 12.0, "far": 13.0, "wrong": 1.0}
    found = [{"kernel": name, "block_m": 1} for name in (*times, "refused")]

    def make(fields):
        def product(a, b):
            if fields["kernel"] == "refused":
                raise RuntimeError("no kernel")
            return a @ b * (2 if fields["kernel"] == "wrong" else 1)

        return product

    first, last = Fixed(times), Fixed(times)
    regretted = regret.measure_case(
        case, found, make, first_timer=first, timer=last, repetitions=3, seconds=1, seed=0
    )
    assert last.asked == [["best", "chosen", "near"]]
    assert regretted.value == pytest.approx(0.5)
    assert regretted.best == "best"
    assert set(regretted.notes) == {"wrong", "refused"}


@pytest.mark.skipif(not tk.emulation._module, reason="this build has no emulator")
@pytest.mark.parametrize(
    ("m", "n", "k", "layout", "activation"),
    [
        (128, 256, 576, "NT", None),
        (130, 72, 512, "NN", None),
        (20, 64, 1024, "NT", None),
        (70, 136, 200, "NT", "relu"),
    ],
)
def test_every_candidate_computes_the_product(m, n, k, layout, activation):
    """On the emulator, of a device with few SMs, so that all ways of dividing k are among them; and
    with an epilogue, which some compute in kernels of their own."""
    compiled = module()
    properties = {**info.EXAMPLE_GPU, "sm_count": 8}
    fused = activation is not None
    problem = {"m": m, "n": n, "k": k, "b_n_major": layout == "NN", "fused": fused}
    found = compiled.candidates("gemm", problem, compiled.DeviceProperties(**properties))
    case = gemm.make_case(m, n, k, layout, torch.bfloat16)
    inputs = case.make_inputs(CPU, torch.Generator().manual_seed(0))
    exact = inputs["a"].float() @ inputs["b"].float()
    if activation:
        inputs["activation"], exact = activation, exact.relu()
    for fields in found:
        forced_fields = {key: x for key, x in fields.items() if key not in forced.GIVEN}
        with tk.emulate(sm_count=8, config=forced_fields, check_order=False):
            out = tk.gemm(**inputs)
        error = (out.float() - exact).abs().max() / exact.abs().max()
        assert error < 2**-7, fields
