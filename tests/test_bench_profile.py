"""`bench --profile`: limits from a device's properties, and an op's counts as shares of them."""

from __future__ import annotations

import argparse
import json
import math
from types import SimpleNamespace

import pytest
import torch

from thunderkittens import bench
from thunderkittens.bench import profile
from thunderkittens.bench.suites import attention, fp8_gemm, gemm

H200 = SimpleNamespace(
    name="NVIDIA H200", major=9, minor=0, multi_processor_count=132, clock_rate=1_980_000
)


def run(*options: str) -> int:
    parser = argparse.ArgumentParser()
    bench.add_arguments(parser)
    return bench.main(parser.parse_args(options))


def test_limits():
    limits = profile.limits_of(H200, 4e6, {"sm_mhz": 1830.0})
    assert limits.tensor["bf16"] * 1e-6 == pytest.approx(989.4, rel=1e-4)  # the data sheet's
    assert limits.tensor["fp8"] == 2 * limits.tensor["bf16"]
    assert limits.exponentials == 132 * 1830 * 16
    assert limits.bytes == 4e6
    assert limits.clock_from == "measured under the load"
    unknown = profile.limits_of(H200, 4e6, {})
    assert (unknown.clock_mhz, unknown.clock_from) == (1980, "the highest")
    assert profile.limits_of(None, 4e6).tensor == {}


def test_a_product_with_fewer_units():
    """An H20 has the SMs' clock and an eighth of the products."""
    h20 = SimpleNamespace(**{**vars(H200), "name": "NVIDIA H20", "multi_processor_count": 78})
    limits = profile.limits_of(h20, 4e6)
    assert limits.tensor["bf16"] == pytest.approx(148e6)
    assert limits.tensor["fp8"] == pytest.approx(296e6)
    assert limits.exponentials == 78 * 1980 * 16


def test_shares():
    limits = profile.limits_of(H200, 4e6, {"sm_mhz": 1830.0})
    case = attention.make_case(1, 16, 4096, 64, True, torch.bfloat16)
    pairs = 16 * 4096**2 / 2
    time = 4 * 64 * pairs / limits.tensor["bf16"] / 0.5  # at half the tensor cores' limit
    found = profile.shares(case, time, limits, host_us=time / 10)
    assert found["tensor"] == pytest.approx(0.5)
    assert found["exponentials"] == pytest.approx(pairs / 16 / 132 / 1830 / time)
    assert found["memory"] == pytest.approx(4 * 16 * 4096 * 64 * 2 / 4e6 / time)
    assert found["host"] == pytest.approx(0.1)
    # D = 64: 256 FLOP beside an exponential, 4096 beside 16: as much of one as of the other.
    assert found["exponentials"] == pytest.approx(found["tensor"])
    product = fp8_gemm.make_case(4096, 4096, 4096, "fast", torch.bfloat16)
    of_fp8 = profile.shares(product, 100.0, limits, math.nan)
    assert of_fp8["tensor"] == pytest.approx(2 * 4096**3 / (2 * 989.4e6) / 100, rel=1e-4)
    assert math.isnan(of_fp8["exponentials"])
    assert profile.nearest(of_fp8) == "tensor"
    assert profile.nearest({"tensor": math.nan}) == ""


@pytest.mark.parametrize("first", [True, False])
def test_command(first, device, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(profile, "COPIED_BYTES", 1 << 20)
    monkeypatch.setattr(profile, "HOST_CALLS", 4)
    file = tmp_path / "r.json"
    command = ["--profile", "gemm"] if first else ["gemm", "--profile"]
    options = ["--device", device, "--shapes", "tiny", "--repetitions", "2", "--json", str(file)]
    assert run(*command, *options) == 0
    printed = capsys.readouterr().out
    assert "nearest" in printed
    assert "Memory: a copy's" in printed
    content = json.loads(file.read_text())
    assert content["profile"].keys() == {case["name"] for case in content["cases"]}
    for row in content["profile"].values():
        assert row["shares"]["memory"] > 0
        assert row["shares"]["host"] == pytest.approx(row["host_us"] / row["time_us"], rel=1e-4)


def test_a_call_that_fails_has_no_shares(monkeypatch):
    monkeypatch.setattr(profile, "COPIED_BYTES", 1 << 20)
    found = profile.Profile(bench.CpuTimer())
    implementations = {"ours": found.watch(lambda a, b: a @ b * 2)}
    case = gemm.make_case(8, 8, 8, "NN", torch.bfloat16)
    bench.compare([case], implementations, device="cpu", repetitions=2, progress=found.add)
    assert found.rows == {}
    assert found.call is None


def test_it_is_of_gpu_times(capsys):
    assert run("gemm", "--device", "cpu", "--profile", "--host") == 2
    assert run("--profile", "training", "--device", "cpu") == 2
    assert "--profile is of GPU times of an op" in capsys.readouterr().err
