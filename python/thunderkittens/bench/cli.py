"""The command line of the benchmarks: `python -m thunderkittens bench <op>`, or `training`."""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import pkgutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from . import machine, report, results, suites
from .host import measure_host
from .runner import Measurement, compare
from .timing import make_timer

WHOLE = ("training",)  # modules beside the suites, with a suite's interface, of more than an op
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
RESULTS = Path("benchmarks") / "results"


def suite_names() -> list[str]:
    """The ops that have a suite."""
    return sorted(module.name for module in pkgutil.iter_modules(suites.__path__))


def load_suite(op: str) -> Any:
    """The suite of an op, or one of `WHOLE`: a module as `suites` describes it."""
    package = __package__ if op in WHOLE else suites.__name__
    return importlib.import_module(f"{package}.{op}")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    ops = parser.add_subparsers(dest="op", metavar="op", required=True)
    for name in (*suite_names(), *WHOLE):
        suite = load_suite(name)
        summary = (suite.__doc__ or "").strip().splitlines()[0]
        op = ops.add_parser(name, help=summary, description=summary)
        op.set_defaults(dtype="bf16", host=False)
        seconds = getattr(suite, "SECONDS", 0.5)
        add = op.add_argument
        add("--shapes", help=f"{', '.join(suite.SHAPES)} (on a CPU: tiny)")
        suite.add_arguments(op)
        if name not in WHOLE:
            add("--dtype", choices=DTYPES, default="bf16", help="input type (default: bf16)")
            add("--host", action="store_true", help="host time of eager calls, not GPU times")
        add("--peers", help="names of the peers to run, with commas (default: all there are)")
        add("--quick", action="store_true", help="few repetitions: a look, not a measurement")
        add("--repetitions", type=int, default=100, help="per call and case (default: 100)")
        limit = f"limit per call and case (default: {seconds})"
        add("--seconds", type=float, default=seconds, help=limit)
        add("--seed", type=int, default=0, help="seed of the inputs (default: 0)")
        add("--device", default="cuda", help="cuda, cuda:<index>, or cpu to try the tool")
        add("--json", type=Path, metavar="FILE", help="write figures and machine as JSON")
        add("--plot", type=Path, metavar="FILE", help="draw the figures: PNG, PDF or SVG")
        add("--save", action="store_true", help=f"write JSON to {RESULTS}/<gpu>/ of a source tree")


def choose_device(name: str) -> torch.device:
    """The device, made current. ValueError with the reason when it cannot be had."""
    try:
        device = torch.device(name)
    except RuntimeError:
        device = torch.device("meta")
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"--device is {name!r}; expected cuda, cuda:<index> or cpu")
    if device.type == "cpu":
        return device
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if count == 0:
        raise ValueError(
            f"PyTorch {torch.__version__} sees no CUDA GPU, and the benchmarks time GPU kernels"
        )
    if (device.index or 0) >= count:
        raise ValueError(f"--device is {name!r}; PyTorch sees {count} GPU(s)")
    if device.index is not None:
        torch.cuda.set_device(device)
    return torch.device("cuda", torch.cuda.current_device())


def choose_peers(available: dict[str, Any], wanted: str | None) -> dict[str, Any]:
    """The subject and the wanted peers. ValueError for a peer that is not there."""
    if wanted is None:
        return available
    subject, *peers = available
    names = [name.strip() for name in wanted.split(",") if name.strip()]
    for name in names:
        if name not in peers:
            raise ValueError(f"--peers has {name!r}; expected one of {', '.join(peers)}")
    return {name: available[name] for name in (subject, *names)}


def takes_part(suite: Any, args: argparse.Namespace) -> bool:
    """Whether an option of the suite that lists names, as --kinds, lacks some of its default."""
    parser = argparse.ArgumentParser()
    suite.add_arguments(parser)
    whole, chosen = suite.options(parser.parse_args([])), suite.options(args)
    return any(
        isinstance(names, tuple) and set(names) - set(chosen[k]) for k, names in whole.items()
    )


def save_path(args: argparse.Namespace, gpu: str) -> Path:
    """Where `--save` writes; refused for a partial run, which would replace a full one."""
    if not RESULTS.parent.is_dir():
        raise ValueError(f"--save writes to {RESULTS}; run it in the root of a source tree")
    shapes, suite = args.shapes or "default", load_suite(args.op)
    whole = shapes in getattr(suite, "SAVED", ("default",)) and not takes_part(suite, args)
    if args.quick or not whole or args.dtype != "bf16" or args.peers:
        raise ValueError(
            "--save needs a full run: no --quick, part of --shapes, --kinds (--forms, --layouts), "
            "--dtype or --peers"
        )
    part = "_host" if args.host else "" if shapes == "default" else f"_{shapes}"
    return RESULTS / machine.slug(gpu) / f"{args.op}{part}.json"


def status_line(total: int) -> Callable[[Measurement], None] | None:
    """A function that shows on a terminal how far the run is; None where there is no terminal."""
    if not sys.stderr.isatty():
        return None
    done = 0

    def show(measurement: Measurement) -> None:
        nonlocal done
        done += 1
        text = f"{done}/{total} {measurement.case.name}" if done < total else ""
        print(f"\r\033[K{text}", end="", file=sys.stderr, flush=True)

    return show


def run_host(args: argparse.Namespace, device: torch.device, record: dict[str, Any]) -> Any:
    """Measure and print host times; the content of the result file."""
    calls = load_suite(args.op).host_calls(device)
    repetitions = 100 if args.quick else 2000
    times = measure_host(calls, make_timer(device).synchronize, repetitions=repetitions)
    print(report.host_table(times))
    settings = {"repetitions": repetitions}
    return results.host_document(args.op, times, machine=record, settings=settings)


def run_device(args: argparse.Namespace, device: torch.device, record: dict[str, Any]) -> Any:
    """Measure, print and draw GPU times; the content of the result file."""
    suite = load_suite(args.op)
    shapes = args.shapes or ("default" if device.type == "cuda" else "tiny")
    cases = suite.cases(shapes, dtype=DTYPES[args.dtype], **suite.options(args))
    implementations = choose_peers(suite.implementations(device), args.peers)
    timer = getattr(suite, "make_timer", make_timer)(device)
    settings = {
        "repetitions": 10 if args.quick else args.repetitions,
        "seconds": args.seconds / 10 if args.quick else args.seconds,
        "seed": args.seed,
    }
    progress = status_line(len(cases))
    measurements = compare(cases, implementations, timer=timer, progress=progress, **settings)
    gpu, peak = record["device"], record["peak_tflops"]
    print(report.table(measurements, peak=peak))
    if args.plot:
        title = f"{args.op}, {args.dtype}, {gpu}"
        report.plot(measurements, args.plot, title=title, peak=peak)
        print(f"wrote {args.plot}")
    settings.update(shapes=shapes, dtype=args.dtype, **timer.protocol())
    return results.document(args.op, measurements, machine=record, settings=settings)


def run(args: argparse.Namespace) -> int:
    """A whole run; ValueError for what cannot be."""
    suite = load_suite(args.op)
    if args.repetitions < 1 or args.seconds <= 0:
        raise ValueError("--repetitions and --seconds must be positive")
    suite.cases(args.shapes or "tiny", **suite.options(args))  # wrong names fail before any work
    if args.plot and importlib.util.find_spec("matplotlib") is None:
        raise ValueError("--plot needs matplotlib: pip install matplotlib")
    device = choose_device(args.device)
    record = machine.record(device)
    paths = [args.json] if args.json else []
    if args.save:
        paths.append(save_path(args, record["device"]))
    versions = (f"{name} {record[name]}" for name in ("torch", "cuda", "cudnn", "driver"))
    print(", ".join([record["device"], *versions]), flush=True)
    content = (run_host if args.host else run_device)(args, device, record)
    for path in paths:
        results.write_json(path, content)
        print(f"wrote {path}")
    return 1 if any(case["failed"] for case in content.get("cases", ())) else 0


def main(args: argparse.Namespace) -> int:
    """Run a benchmark; 0 when all went well, 1 when the op failed somewhere, 2 when it cannot."""
    try:
        return run(args)
    except (ValueError, ImportError, OSError) as error:
        print(f"thunderkittens bench: {error}", file=sys.stderr)
        return 2
