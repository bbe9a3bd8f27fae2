"""Host times of eager calls: what is measured of each op, under which names, and in which order.

Nothing is asserted about speed.
"""

from __future__ import annotations

import argparse
import json
from contextlib import contextmanager

import pytest
import torch

from helpers.cover import alternate
from helpers.numerics import assert_accurate
from helpers.samples import every_differentiable_sample
from thunderkittens import bench
from thunderkittens.bench import cli
from thunderkittens.bench.host import KINDS, every_kind

CPU = torch.device("cpu")
RECORDING, BACKWARD = ", recording a gradient", ", forward and backward"
# Ops with a gradient: those with formulas of their own, and calls of several ops.
OWN_FORMULAS = {sample.op for sample in every_differentiable_sample.args[1]}
COMPOSED = {"nvfp4_gemm"}
every_suite = pytest.mark.parametrize("op", cli.suite_names())


def host_calls(op: str) -> dict:
    return cli.load_suite(op).host_calls(CPU)


@every_suite
def test_the_gradient_of_every_op_that_has_one_is_measured(op):
    call = host_calls(op)[f"thunderkittens.{op}"]
    assert isinstance(call, bench.Differentiable) is (op in OWN_FORMULAS | COMPOSED)


def test_names_are_those_that_the_documents_use():
    assert KINDS == ("", RECORDING, BACKWARD)
    names = set(every_kind(host_calls("attention"))[0])
    for peer in ("", ", FlashAttention"):
        for kind in KINDS:
            assert f"scaled_dot_product_attention{peer}{kind}" in names
            assert f"thunderkittens.attention{kind}" in names
    names = set(every_kind(host_calls("gemm"))[0])
    assert {
        f"{op}{kind}" for op in ("thunderkittens.gemm", "torch.matmul") for kind in KINDS
    } < names
    assert f"thunderkittens.fp8_linear{BACKWARD}" in every_kind(host_calls("fp8_gemm"))[0]


@every_suite
def test_kinds_of_a_call(op):
    """They do what their names say, all implementations of an op on the same operands."""
    for name, call in host_calls(op).items():
        if isinstance(call, bench.Differentiable):
            plain, recording, backward = (of_kind() for of_kind in call.kinds().values())
            assert not plain.requires_grad, name
            assert recording.requires_grad, name
            torch.testing.assert_close(recording, plain)
            assert [x.shape for x in backward] == [x.shape for x in call.leaves], name
            assert all(bool(x.isfinite().all()) for x in backward), name


@pytest.mark.parametrize(
    ("op", "peer"), [("attention", "scaled_dot_product_attention"), ("gemm", "torch.matmul")]
)
def test_what_stands_beside_each_other_is_the_same_problem(op, peer):
    calls = host_calls(op)
    leaves = calls[peer].leaves
    plain = calls[peer].function(*leaves)
    exact = calls[peer].function(*(x.double() for x in leaves))
    names = [f"thunderkittens.{op}", *(name for name in calls if name.startswith(peer))]
    for name in names:
        call = calls[name]
        assert all(x is y for x, y in zip(call.leaves, leaves, strict=True)), name
        with call.context():
            assert_accurate(call.function(*leaves), exact, plain)


def test_times_and_blocks():
    ticks = iter(range(0, 10**9, 1500))
    synchronized = []
    times = bench.measure_host(
        {"a": lambda: None, "b": lambda: None},
        lambda: synchronized.append(1),
        repetitions=100,
        block=10,
        clock=lambda: next(ticks),
    )
    assert times["a"].median == times["b"].median == 1.5
    assert times["a"].repetitions == 100
    assert len(synchronized) == 2 * 10 + 1
    assert "1.50" in bench.host_table(times)


def test_a_context_is_entered_around_blocks():
    """Of its own calls alone, and outside what is timed."""
    inside, seen, read_inside = [], {"own": set(), "other": set()}, []

    @contextmanager
    def context():
        inside.append(1)
        ticks["now"] += 10**9
        yield
        inside.pop()

    def function(name):
        def call(x):
            seen[name].add(len(inside))
            return x * 1

        return call

    def clock():
        read_inside.append(len(inside))
        ticks["now"] += 1000
        return ticks["now"]

    ticks, x = {"now": 0}, torch.ones(3)
    calls = {
        "own": bench.Differentiable(function("own"), (x,), context),
        "other": bench.Differentiable(function("other"), (x,)),
    }
    times = bench.measure_host(calls, lambda: None, repetitions=20, block=5, clock=clock)
    assert list(times) == [name + kind for kind in KINDS for name in ("own", "other")]
    assert seen == {"own": {1}, "other": {0}}
    assert set(read_inside) == {0, 1}
    assert all(timing.median == timing.minimum == 1.0 for timing in times.values())
    assert not inside


def test_table_has_sections():
    calls = {"a": bench.Differentiable(lambda x: x * 1, (torch.ones(3),)), "b": lambda: None}
    times = bench.measure_host(calls, lambda: None, repetitions=2, block=1)
    rows = [line.split("  ")[0].strip() for line in bench.host_table(times).splitlines()]
    first, *others = (rows.index(name) for name in ("b", f"a{RECORDING}", f"a{BACKWARD}"))
    assert rows.index("a") == first - 1
    assert all(not rows[place - 1].strip(" \u2500-") for place in others)


@alternate(("op",), cli.suite_names())
def test_command(op, device, tmp_path, capsys):
    json_file = tmp_path / "r.json"
    parser = argparse.ArgumentParser()
    bench.add_arguments(parser)
    options = [op, "--device", device, "--host", "--quick", "--json", str(json_file)]
    assert bench.main(parser.parse_args(options)) == 0
    printed = capsys.readouterr().out
    content = json.loads(json_file.read_text())
    times = content["host_time_us"]
    assert content["settings"]["repetitions"] == 100
    for kind in KINDS if op in OWN_FORMULAS | COMPOSED else KINDS[:1]:
        name = f"thunderkittens.{op}{kind}"
        assert name in printed
        assert times[name]["median"] > 0
