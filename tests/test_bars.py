"""The bars of the attention benchmark, from made-up measurements."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from thunderkittens.bench import Measurement, Timing, bars
from thunderkittens.bench.suites import attention, attention_varlen

FOLDER = Path(__file__).resolve().parents[1] / "benchmarks"


def measured(case, **times):
    names = {"ours": "thunderkittens"}
    timings = {names.get(name, name): Timing.of([time]) for name, time in times.items()}
    return Measurement(case, "thunderkittens", timings)


def test_anchors():
    known = bars.anchors("h200", FOLDER)
    assert json.dumps(known["note"]).isascii()
    assert bars.anchors("h300", FOLDER) is None
    cases = attention.cases("default")
    for direction in ("forward", "backward"):
        points = {(p["head_dim"], p["causal"], p["length"]) for p in known["best"][direction]}
        keys = ("head_dim", "causal", "length")
        assert points == {tuple(c.parameters[k] for k in keys) for c in cases}
    means = [bars.mean([p["ratio"] for p in known["best"][d]]) for d in ("forward", "backward")]
    assert means == pytest.approx([1.069, 1.178], abs=0.002)


def test_bars_of_the_grid():
    """At 1.06 and 1.2 of cuDNN everywhere."""
    forward = [measured(c, ours=100.0, cuDNN=106.0) for c in attention.cases("default")]
    backward = [measured(c, ours=100.0, cuDNN=120.0) for c in attention.cases("backward")]
    text = bars.table([*forward, *backward], "h200", FOLDER)
    lines = {line.split("  ")[0].strip(): line for line in text.splitlines()}
    mean = lines["forward, 36 of 36 points: mean to cuDNN"]
    assert "1.060" in mean
    assert "yes" in mean
    assert "1.200" in lines["backward, 36 of 36 points: mean to cuDNN"]
    worst = lines["forward: worst point to the best (D=64 full N=16384)"]
    assert f"{1.06 / 1.17:.3f}" in worst
    assert "yes" in worst
    assert sum("mean to the best" in line for line in lines) == 6
    assert bars.table(forward, "another_gpu", FOLDER) == ""


def test_bars_of_costs():
    cases = {c.name: c for s in ("features", "deterministic") for c in attention.cases(s)}
    packed = {c.name: c for c in attention_varlen.cases()}
    name = "deterministic backward D=64 full N=2048"
    measurements = [
        measured(cases["forward window 1024, N=16384"], ours=10.0, baseline=49.0),
        measured(cases["forward softcap"], ours=11.0, baseline=10.0),
        measured(cases["forward ALiBi"], ours=12.0, baseline=10.0),
        measured(cases["forward softcap, ALiBi, sink"], ours=99.0, baseline=10.0),
        measured(cases[name], ours=10.0, baseline=9.0),
        measured(cases["backward of q alone"], ours=10.0, baseline=9.0),
        measured(packed["forward D=64 full 8 x 2048"], ours=10.0, baseline=9.9),
    ]
    lines = bars.table(measurements, "h200", FOLDER).splitlines()
    verdicts = {line.split(" (")[0].strip(): line.split()[-1] for line in lines if "(" in line}
    assert verdicts == {
        "forward, window of 1024 at N = 16384, to full causal": "NO",
        "forward, softcap, ALiBi, sink, to none": "NO",
        "backward, deterministic order, to the default one": "yes",
        "backward, some gradients, to all": "NO",
        "forward, sequences of one length, to a batch": "yes",
    }


def test_bars_of_small_batches_and_decoding():
    small = [measured(c, ours=9.0, cuDNN=10.0) for c in attention.cases("small")]
    decode = [measured(c, ours=60.0) for c in attention.cases("decode")]
    text = bars.table([*small, *decode], "h200", FOLDER)
    assert "forward B=1: mean to cuDNN" in text
    assert "1.111" in text
    one = next(line for line in text.splitlines() if "decode B=1, 1 row" in line)
    assert "1.456" in one  # 134.2 MB in 41.2 us
    assert one.split()[-1] == "NO"
    assert "16 rows" not in text


@pytest.mark.parametrize(
    ("megabytes", "time"), [(4.2, 5.6), (134.2, 41.2), (2.1, 4.9341), (1879.0, 416.4)]
)
def test_read_floor(megabytes, time):
    known = bars.anchors("h200", FOLDER)
    assert bars.read_floor(known["read_floor"], megabytes) == pytest.approx(time, rel=1e-3)


def test_packed_shapes():
    for case in attention_varlen.cases():
        assert sum(case.parameters["lengths"]) == 16384
        assert min(case.parameters["lengths"]) > 0
    inputs = attention_varlen.cases()[0].make_inputs(torch.device("cpu"), torch.Generator())
    assert inputs["edges"].tolist() == list(range(0, 16385, 2048))
