"""`bench --compare`: what two result files say about a change, and how sure it is."""

from __future__ import annotations

import argparse
import json
import math
import random

import pytest

from thunderkittens import bench
from thunderkittens.bench import cli, comparison
from thunderkittens.bench.comparison import FASTER, NO_CHANGE, SLOWER, Estimate, upper_tail

MACHINE = {"device": "NVIDIA H200", "torch": "2.11", "cuda": "13.0", "cudnn": 9, "driver": "580"}


@pytest.mark.parametrize(
    ("freedom", "t", "probability"),
    # The usual table of Student's t, one-sided.
    [(1, 6.314, 0.05), (2, 4.303, 0.025), (5, 2.015, 0.05), (10, 2.764, 0.01), (30, 3.385, 0.001)],
)
def test_student(freedom, t, probability):
    assert upper_tail(t, freedom) == pytest.approx(probability, rel=2e-3)
    assert upper_tail(-t, freedom) == pytest.approx(1 - probability, rel=1e-3)


def test_student_of_many_is_normal():
    assert upper_tail(1.96, math.inf) == pytest.approx(0.025, rel=1e-3)
    assert upper_tail(1.96, 199) == pytest.approx(0.025, rel=0.03)


def test_sums_of_estimates():
    a, b = Estimate.of([1.0, 2.0, 3.0]), Estimate.of([1.0, 1.0, 4.0, 6.0])
    both = comparison.sum_of([a, b], (1.0, -1.0))
    assert (a.mean, a.variance, a.freedom) == pytest.approx((2, 1 / 3, 2))
    assert (both.mean, both.variance) == pytest.approx((-1, 1 / 3 + 1.5))
    # Welch's formula.
    assert both.freedom == pytest.approx((1 / 3 + 1.5) ** 2 / ((1 / 3) ** 2 / 2 + 1.5**2 / 3))
    assert comparison.sum_of([a], (0.0,)).freedom == math.inf


def result_file(
    factors: list[float],
    seed: int = 0,
    *,
    noise: float = 0.01,
    drift: float = 0.0,
    blocks: bool = True,
    peers: bool = True,
    **machine: str,
) -> dict:
    """A result file of cases whose subject takes `factors` as long as the peer."""
    source, cases = random.Random(seed), []
    for place, factor in enumerate(factors):
        samples: dict[str, list[float]] = {"ours": [], "peer": []}
        for turn in range(100):
            common = 100 * (1 + drift * turn / 100)
            samples["ours"].append(common * factor * math.exp(source.gauss(0, noise)))
            samples["peer"].append(common * math.exp(source.gauss(0, noise)))
        times = {name: bench.Timing.of(x) for name, x in samples.items() if peers or name == "ours"}
        case = bench.Case(f"case {place}", lambda device, generator: {}, 1.0)
        cases.append(bench.Measurement(case, "ours", times, protocol="cold"))
    content = bench.document("gemm", cases, machine=MACHINE | machine, settings={})
    if not blocks:
        for case in content["cases"]:
            for result in case["results"].values():
                del result["time_us"]["blocks"]
    return json.loads(json.dumps(content))


def verdicts(old: dict, new: dict) -> tuple[list[str], str]:
    found = comparison.compare_files(old, new)
    return [change.verdict for change in found.changes], found.total.verdict


@pytest.mark.parametrize("blocks", [True, False])
def test_verdicts(blocks):
    old = result_file([1.0] * 8, blocks=blocks)
    same = result_file([1.0] * 8, 1, blocks=blocks)
    assert verdicts(old, same) == ([NO_CHANGE] * 8, NO_CHANGE)
    one = result_file([1.1, *[1.0] * 7], 1, blocks=blocks)
    assert verdicts(old, one)[0] == [SLOWER, *[NO_CHANGE] * 7]
    assert comparison.compare_files(old, one).regression
    assert verdicts(one, old)[0] == [FASTER, *[NO_CHANGE] * 7]
    assert not comparison.compare_files(one, old).regression
    # A change of everything that no case shows for itself.
    assert verdicts(old, result_file([1.025] * 8, 1, blocks=blocks)) == ([NO_CHANGE] * 8, SLOWER)


def test_false_alarms_are_rare():
    """Runs that differ by what runs of the same software differ by, and by nothing else."""
    source, alarms = random.Random(0), 0
    of_run, of_case = (x / math.sqrt(2) for x in comparison.BETWEEN_RUNS[comparison.RELATIVE])

    def factors() -> list[float]:
        common = source.gauss(0, of_run)
        return [math.exp(common + source.gauss(0, of_case)) for _ in range(12)]

    for seed in range(40):
        old, new = result_file(factors(), 2 * seed), result_file(factors(), 2 * seed + 1)
        alarms += comparison.compare_files(old, new).regression
    # 2.5 % for the cases and 2.5 % for the mean: 2 of 40, with a standard deviation of 1.4.
    assert alarms <= 6


def test_what_all_calls_have_in_common_is_no_noise():
    """Clocks that fall by a fifth during a run spread the times, and not the blocks' ratios."""
    still, drifting = result_file([1.0]), result_file([1.0], drift=0.2)
    of_case = next(iter(comparison.cases_of(drifting).values()))
    assert of_case["subject"]["quartile_3"] / of_case["subject"]["quartile_1"] > 1.08
    errors = [
        math.sqrt(comparison.compare_files(x, x).changes[0].estimate.variance)
        for x in (still, drifting)
    ]
    assert errors[1] == pytest.approx(errors[0], rel=0.02)
    alone = result_file([1.0], drift=0.2, peers=False)
    assert comparison.compare_files(alone, alone).changes[0].estimate.variance > 4 * errors[0] ** 2


def test_other_versions_of_peers_are_no_yardstick():
    old, new = result_file([1.0] * 3), result_file([1.0] * 3, 1, torch="2.15")
    found = comparison.compare_files(old, new)
    assert {change.kind for change in found.changes} == {comparison.ABSOLUTE}
    assert "torch was 2.11 and is 2.15" in found.notes[0]
    text = comparison.report(found)
    assert "mean of 3 cases" in text
    assert "0 slower, 0 faster, 3 without a change" in text


def test_cases_that_one_file_has_alone():
    found = comparison.compare_files(result_file([1.0] * 3), result_file([1.0] * 2, 1))
    assert len(found.changes) == 2
    assert found.notes == ["Of cases, 1 are gone, or failed: case 2 (cold)"]


def test_host_times():
    def file(factor: float) -> dict:
        times = {
            f"{name}{kind}": bench.Timing.of([scale * x for x in (10.0, 10.1, 9.9, 10.0)])
            for name, scale in (("thunderkittens.gemm, bias", factor), ("torch.matmul", 1.0))
            for kind in ("", ", recording a gradient", ", forward and backward")
        }
        return bench.results.host_document("gemm", times, machine=MACHINE, settings={})

    found = comparison.compare_files(file(1.0), file(1.3))
    assert len(found.changes) == 3
    assert {change.verdict for change in found.changes} == {SLOWER}
    assert {change.kind for change in found.changes} == {comparison.RELATIVE}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"op": "attention"}, "of gemm and of attention"),
        ({"cases": []}, "no case in common"),
        ({"machine": {"device": "NVIDIA H100"}}, "of NVIDIA H200 and of NVIDIA H100"),
    ],
)
def test_files_that_cannot_be_compared(change, words):
    old = result_file([1.0])
    with pytest.raises(ValueError, match=words):
        comparison.compare_files(old, old | change)
    with pytest.raises(ValueError, match="--confidence is 95"):
        comparison.compare_files(old, old, 95)


# Command line


def run(*options: str) -> int:
    parser = argparse.ArgumentParser()
    bench.add_arguments(parser)
    return bench.main(parser.parse_args(options))


def test_command_on_two_files(tmp_path, capsys):
    old, new, bad = (tmp_path / f"{name}.json" for name in ("old", "new", "bad"))
    old.write_text(json.dumps(result_file([1.0] * 3)))
    new.write_text(json.dumps(result_file([1.0, 1.2, 1.0], 1)))
    bad.write_text("no JSON")
    assert run("compare", str(old), str(new)) == 3
    assert "1 slower, 0 faster, 2 without a change" in capsys.readouterr().out
    assert run("compare", str(new), str(old)) == 0
    assert run("compare", str(old), str(bad)) == 2
    assert "bad.json is no result file" in capsys.readouterr().err


def test_command_on_a_run(tmp_path, capsys):
    """It takes shapes and seed from the file, and ends by status 3 where the op is slower."""
    file = tmp_path / "r.json"
    options = ["gemm", "--device", "cpu", "--repetitions", "10"]
    assert run(*options, "--shapes", "tiny", "--seed", "5", "--json", str(file)) == 0
    old = json.loads(file.read_text())
    for case in old["cases"]:
        result = case["results"]["thunderkittens"]["time_us"]
        for name in ("median", "quartile_1", "quartile_3", "minimum"):
            result[name] /= 100
        result["blocks"] = [block / 100 for block in result["blocks"]]
    file.write_text(json.dumps(old))
    again = tmp_path / "again.json"
    assert run(*options, "--compare", str(file), "--json", str(again)) == 3
    assert "in all: slower" in capsys.readouterr().out
    settings = json.loads(again.read_text())["settings"]
    assert (settings["shapes"], settings["seed"]) == ("tiny", 5)


@pytest.mark.parametrize(
    ("of_file", "protocol", "of_cases"),
    [
        (["stream", "cold"], None, {"0": "stream", "1": "cold"}),
        (["dirty", "dirty"], "dirty", {}),
        (["wall clock"], None, {}),
    ],
)
def test_protocols_are_those_of_the_file(of_file, protocol, of_cases):
    cases = [{"name": str(i), "protocol": p} for i, p in enumerate(of_file)]
    args = argparse.Namespace(op="gemm", protocol=None, host=False, shapes="tiny", model=None)
    cli.same_again(args, {"cases": cases})
    assert (args.protocol, args.protocols) == (protocol, of_cases)


def test_regret_is_not_compared(tmp_path):
    file = tmp_path / "r.json"
    file.write_text(json.dumps(result_file([1.0])))
    options = ["gemm", "--device", "cpu"]
    assert run(*options, "--regret", "--compare", str(file)) == 2
