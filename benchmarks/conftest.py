"""pytest-benchmark around the code of `python -m thunderkittens bench`.

    pytest benchmarks --benchmark-json=FILE
    pytest benchmarks/bench_gemm.py --shapes rated

The figures to trust are in `extra_info`: event times of the op and its peers, interleaved, by the
protocol that is named there (docs/benchmarks.md), and the ratios. pytest-benchmark's own columns
are wall-clock times of the op alone, `CALLS` calls and one synchronisation in each round.
"""

from __future__ import annotations

import pytest
import torch

from shapes import params
from thunderkittens import bench
from thunderkittens.bench import results
from thunderkittens.bench.cases import bind
from thunderkittens.bench.cli import load_suite

CALLS = 10
ROUNDS = 10


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("thunderkittens")
    group.addoption("--shapes", default="default", help="set of shapes of the benchmarks")
    group.addoption("--bench-device", default="cuda", help="cuda, or cpu to try the benchmarks")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "case" in metafunc.fixturenames:
        metafunc.parametrize("case", params(metafunc.module.OP, metafunc.config.option.shapes))


@pytest.fixture(scope="session")
def timer(request: pytest.FixtureRequest) -> bench.Timer:
    name = request.config.option.bench_device
    if name.startswith("cuda") and not torch.cuda.is_available():
        pytest.skip(f"PyTorch {torch.__version__} sees no CUDA GPU")
    return bench.make_timer(torch.device(name))


@pytest.fixture
def comparison(request, benchmark, timer):
    """A function that checks and measures a case and puts the figures into `extra_info`."""

    def run(case: bench.Case) -> None:
        op = request.module.OP
        implementations = load_suite(op).implementations(timer.device)
        (measurement,) = bench.compare([case], implementations, timer=timer)
        assert not measurement.failed, measurement.notes
        benchmark.group = f"{op} {case.groups[0]}"
        benchmark.extra_info.update(results.entry(measurement))
        generator = torch.Generator(device=timer.device).manual_seed(0)
        inputs = case.make_inputs(timer.device, generator)
        call = bind(implementations[measurement.subject], inputs)

        def calls() -> None:
            for _ in range(CALLS):
                call()
            timer.synchronize()

        benchmark.pedantic(calls, rounds=ROUNDS, warmup_rounds=1)

    return run
