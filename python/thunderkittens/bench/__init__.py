"""Benchmarks: an op beside the best peers, in one process, interleaved round by round.

    python -m thunderkittens bench attention            a table with ratios
    python -m thunderkittens bench gemm --json FILE     the figures with the machine's record
    python -m thunderkittens bench gemm --shapes drawn  sizes and layouts that a seed draws
    python -m thunderkittens bench gemm --regret        all kernels that could run, and the choice
    python -m thunderkittens bench gemm --host          host time of eager calls
    python -m thunderkittens bench gemm --model llama3-8b    shapes of a model's layer
    python -m thunderkittens bench gemm --compare FILE  a verdict on what has changed since
    python -m thunderkittens bench attention --profile  shares of the hardware's limits
    python -m thunderkittens bench all --json FOLDER    every op
    python -m thunderkittens bench training             steps of a small transformer

It is a library too: `compare(cases, implementations)` takes any callables, so that two variants of
a kernel are held against each other and the peers by the protocol of the published figures.
"""

from __future__ import annotations

from .cases import Case, Expected, Implementation, Prepared, random_normal
from .cli import add_arguments, main
from .host import Differentiable, measure_host
from .report import host_table, plot, table
from .results import document, write_json
from .runner import Measurement, compare, geometric_means
from .stream import PROTOCOLS, StreamTimer, make_timer
from .timing import CpuTimer, CudaTimer, Rounds, StepTimer, Timer, Timing

__all__ = [
    "PROTOCOLS",
    "Case",
    "CpuTimer",
    "CudaTimer",
    "Differentiable",
    "Expected",
    "Implementation",
    "Measurement",
    "Prepared",
    "Rounds",
    "StepTimer",
    "StreamTimer",
    "Timer",
    "Timing",
    "add_arguments",
    "compare",
    "document",
    "geometric_means",
    "host_table",
    "main",
    "make_timer",
    "measure_host",
    "plot",
    "random_normal",
    "table",
    "write_json",
]
