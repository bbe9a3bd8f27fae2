"""Drawn shapes: the same for a seed, log-uniform, of their classes, and what is said of them."""

from __future__ import annotations

import argparse
import json
import math
import statistics

import pytest
import torch

from thunderkittens import bench
from thunderkittens.bench import cli, drawn, stream
from thunderkittens.bench.suites import attention, gemm

CPU = torch.device("cpu")
every_suite = pytest.mark.parametrize("op", cli.suite_names())


def run(*options: str) -> int:
    parser = argparse.ArgumentParser()
    bench.add_arguments(parser)
    return bench.main(parser.parse_args(options))


def draws(op: str, count: int, kind: str = drawn.ANY, seed: int = 0, **options) -> list:
    suite = cli.load_suite(op)
    forms = options.pop("forms", getattr(suite, "DRAWN_FORMS", ("",)))
    return drawn.draw_cases(
        op, suite, seed=seed, count=count, classes=(kind,), forms=forms, **options
    )


@every_suite
def test_draws_of_every_op(op):
    """They depend on seed, class and number alone, and stay within memory and time."""
    suite = cli.load_suite(op)
    for kind in drawn.classes_of(suite, None):
        cases = draws(op, 30, kind)
        assert [case.name for case in draws(op, 8, kind)] == [case.name for case in cases[:8]]
        assert [case.name for case in draws(op, 8, kind, seed=1)] != [c.name for c in cases[:8]]
        assert len({case.name for case in cases}) == len(cases)
        assert all(case.groups[0] == kind == case.parameters["class"] for case in cases)
        assert max(case.bytes for case in cases) < 6e9
        assert max(case.flops for case in cases) < 5e12
        json.dumps([dict(case.parameters) for case in cases])


def test_log_uniform():
    draw = drawn.Draw("gemm", 0, drawn.ANY, 0)
    sizes = [draw.size(32, 10000) for _ in range(4000)]
    assert min(sizes) >= 32
    assert max(sizes) <= 10000
    logarithms = [math.log(size / 32) / math.log(10000 / 32) for size in sizes]
    assert statistics.mean(logarithms) == pytest.approx(0.5, abs=0.02)
    for part in (0.25, 0.5, 0.75):
        assert sum(x < part for x in logarithms) / 4000 == pytest.approx(part, abs=0.03)
    assert {draw.size(1, 100, 8) % 8 for _ in range(100)} == {0}
    assert {draw.size(3, 7, 8) for _ in range(20)} == {8}


def test_groups_add_up():
    draw = drawn.Draw("grouped_gemm", 0, drawn.ANY, 0)
    for total, parts in ((100, 7), (0, 3), (5, 1), (3, 9)):
        sizes = draw.split(total, parts)
        assert len(sizes) == parts
        assert sum(sizes) == total
        assert min(sizes) >= 0


def test_classes_of_gemm():
    layouts, padded, odd = set(), 0, 0
    for kind in drawn.CLASSES:
        for case in draws("gemm", 100, kind, forms=("plain",)):
            p = case.parameters
            layout, pitches = p["layout"], p["pitches"]
            layouts.add(layout)
            contiguous = [p["k"] if layout[0] == "N" else p["m"]]
            contiguous.append(p["n"] if layout[1] == "N" else p["k"])
            assert all(32 <= p[x] <= 10000 for x in "mnk")
            padded += pitches != contiguous
            if kind == drawn.ALIGNED:
                assert not any(size % 8 for size in (*contiguous, *pitches, p["n"]))
            else:
                odd += any(pitch % 8 for pitch in pitches)
    assert layouts == set(gemm.LAYOUTS)
    assert 60 < padded < 120
    assert odd > 80


def test_inputs_have_the_pitches_of_the_draw():
    for case in draws("gemm", 400, forms=("plain",)):
        p = case.parameters
        if max(p["m"], p["n"], p["k"]) > 300:
            continue
        inputs = case.make_inputs(CPU, torch.Generator().manual_seed(0))
        for x, layout, pitch in zip("ab", p["layout"], p["pitches"], strict=True):
            stored = inputs[x].mT if layout == "T" else inputs[x]
            assert stored.stride() == (pitch, 1)
        # The op copies what TMA cannot read in its order.
        assert p["problem"]["a_m_major"] is (p["layout"][0] == "T")
        assert p["problem"]["b_n_major"] is (p["layout"][1] == "N")


def test_alignment_of_rows_of_drawn_products():
    """As they lie, or as the op copies them: to lines of 128 bytes, unless that made them longer by
    more than a quarter."""
    cases = {(64, 0): 128, (128, 64): 128, (72, 0): 16, (80, 8): 32, (96, 0): 64}
    copies = {(63, 0): 128, (65, 1): 128, (66, 0): 16, (250, 0): 128, (135, 0): 16}
    for (pitch, padding), expected in (cases | copies).items():
        assert gemm.alignment(pitch, padding) == expected, (pitch, padding)


def test_forms_and_classes_are_checked():
    assert drawn.forms_of(gemm, None) == ("plain",)
    assert drawn.forms_of(gemm, "batched, fused") == ("batched", "fused")
    assert {case.parameters["form"] for case in draws("attention", 20, forms=("decode",))} == {
        "decode"
    }
    with pytest.raises(ValueError, match="--draw has 'x'; expected a part of plain,batched,fused"):
        drawn.forms_of(gemm, "x")
    with pytest.raises(ValueError, match="--class has 'odd'; expected a part of aligned,any"):
        drawn.classes_of(gemm, "odd")
    with pytest.raises(ValueError, match="--count is 0"):
        draws("gemm", 0)


def test_attention_in_memory():
    p = attention.Point(2, 3, 5, 8, False, tokens_first=True, padding=4)
    q = p.inputs(torch.bfloat16, torch.Generator())["q"]
    assert q.shape == (2, 3, 5, 8)
    assert q.stride() == (5 * 3 * 12, 12, 3 * 12, 1)


# What is said of them.


def measured(place: int, ours: float, **peers: float) -> bench.Measurement:
    case = drawn.Draw("gemm", 0, drawn.ANY, place).case(
        gemm.make_case(16, 24, 32, "NN", torch.bfloat16), "small", "NN"
    )
    times = {"ours": ours, **peers}
    timings = {name: bench.Timing.of([time]) for name, time in times.items()}
    return bench.Measurement(case, "ours", timings, protocol="stream", kernel=f"kernel_{place}")


def test_scores_and_the_worst():
    measurements = [measured(i, 10.0, a=5.0 + i, b=9.0 + i / 2) for i in range(20)]
    measurements += [measured(20, 10.0), measured(21, 10.0, c=1.0)]
    found = drawn.scores(measurements, ("a", "b"))
    assert len(found) == 20
    assert found[0].value == pytest.approx(0.5)
    assert found[0].peer == "a"
    assert found[19].value == pytest.approx(1.85)
    assert found[19].peer == "b"
    figures = drawn.summary(found)["any"]
    values = [min(5.0 + i, 9.0 + i / 2) / 10 for i in range(20)]
    assert figures["geometric_mean"] == pytest.approx(statistics.geometric_mean(values))
    assert figures["share_below_0.95"] == sum(x < 0.95 for x in values) / 20
    assert figures["least"] == pytest.approx(0.5)
    assert [score.measurement.kernel for score in drawn.worst(found)] == [
        f"kernel_{i}" for i in range(10)
    ]
    text = drawn.report(measurements, ("a", "b"))
    assert "kernel_9" in text
    assert "kernel_10" not in text
    assert "2 cases have no score" in text
    assert "Protocols: stream 22 cases" in text
    record = drawn.record(measurements, ("a", "b"))
    assert record == json.loads(json.dumps(record, allow_nan=False))
    assert len(record["worst"]) == 10
    assert len(record["scores"]) == 20


def test_a_copy_of_other_bytes_is_a_measure_of_the_bandwidth():
    one = measured(0, 10.0, copy=10.0)
    one.case.parameters["peer_bytes"] = 2 * one.case.bytes
    (score,) = drawn.scores([one], ("copy",))
    assert score.value == pytest.approx(0.5)


def test_without_a_peer_the_best_of_the_run_counts(monkeypatch):
    monkeypatch.setattr(drawn, "LARGE_BYTES", 0)
    found = drawn.scores([measured(0, 10.0), measured(1, 40.0)], ())
    assert [score.value for score in found] == pytest.approx([1.0, 0.25])
    monkeypatch.setattr(drawn, "LARGE_BYTES", 64e6)
    assert drawn.scores([measured(0, 10.0)], ()) == []


def test_command(tmp_path, capsys, monkeypatch):
    """A run on the CPU, of sizes that it can do."""
    size = drawn.Draw.size
    monkeypatch.setattr(drawn.Draw, "size", lambda self, low, high, n=1: size(self, 8, 64, n))
    file = tmp_path / "drawn.json"
    options = ["--shapes", "drawn", "--device", "cpu", "--count", "3", "--repetitions", "2"]
    assert run("gemm", *options, "--json", str(file)) == 0
    printed = capsys.readouterr().out
    assert "worst 10" in printed
    content = json.loads(file.read_text())
    assert len(content["cases"]) == 6
    assert content["settings"]["shapes"] == "drawn"
    assert content["settings"]["count"] == 3
    assert set(content["drawn"]["groups"]) >= {"aligned", "any"}
    assert all(case["protocol"] == "wall clock" for case in content["cases"])
    assert run("gemm", *options, "--class", "odd") == 2
    assert run("training", "--shapes", "drawn", "--device", "cpu") == 2
    assert "training has no drawn shapes" in capsys.readouterr().err
    assert run("gemm", "--regret", "--device", "cpu") == 2
    assert "needs a GPU" in capsys.readouterr().err
    assert run("based", "--regret", "--device", "cpu", "--protocol", "cold") == 2
    assert stream.PROTOCOLS == ("stream", "cold", "dirty")
