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

from . import drawn, forced, machine, regret, report, results, suites
from .cases import Case
from .host import measure_host
from .runner import Measurement, compare
from .stream import PROTOCOLS, make_timer
from .timing import COLD, Timer

WHOLE = ("training",)  # modules beside the suites, with a suite's interface, of more than an op
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
RESULTS = Path("benchmarks") / "results"
DRAWN = "drawn"  # the set of shapes that a seed makes
COUNT = 100
REPETITIONS, SECONDS = 100, 0.5
DRAWN_REPETITIONS, DRAWN_SECONDS = 30, 0.1


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
        op.set_defaults(dtype=None, host=False, protocol=None, regret=False)
        seconds = getattr(suite, "SECONDS", SECONDS)
        add = op.add_argument
        more = "" if name in WHOLE else f", {DRAWN}"
        add("--shapes", help=f"{', '.join(suite.SHAPES)}{more} (on a CPU: tiny)")
        suite.add_arguments(op)
        if name not in WHOLE:
            add("--dtype", choices=DTYPES, help="input type (default: bf16; drawn: both)")
            add("--host", action="store_true", help="host time of eager calls, not GPU times")
            add_protocol(op)
            add_drawing(op, suite)
        add("--peers", help="names of the peers to run, with commas (default: all there are)")
        add("--quick", action="store_true", help="few repetitions: a look, not a measurement")
        count = f"per call and case (default: {REPETITIONS}; drawn: {DRAWN_REPETITIONS})"
        add("--repetitions", type=int, help=count)
        limit = f"limit per call and case (default: {seconds}; drawn: {DRAWN_SECONDS})"
        add("--seconds", type=float, help=limit)
        add("--seed", type=int, default=0, help="seed of the inputs and of draws (default: 0)")
        add("--device", default="cuda", help="cuda, cuda:<index>, or cpu to try the tool")
        add("--json", type=Path, metavar="FILE", help="write figures and machine as JSON")
        add("--plot", type=Path, metavar="FILE", help="draw the figures: PNG, PDF or SVG")
        add("--save", action="store_true", help=f"write JSON to {RESULTS}/<gpu>/ of a source tree")


def add_protocol(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--protocol",
        choices=PROTOCOLS,
        help="stream: CUDA graphs of calls on rotating inputs larger than the L2 cache; cold: "
        "behind a flush by reading; dirty: by writing (default: stream to 200 us, else cold)",
    )


def add_drawing(parser: argparse.ArgumentParser, suite: Any) -> None:
    forms = getattr(suite, "DRAWN_FORMS", ())
    usual = ",".join(getattr(suite, "DRAWN_DEFAULT", forms)) or "the only ones"
    add = parser.add_argument
    add("--count", type=int, default=COUNT, help=f"drawn shapes of each class (default: {COUNT})")
    add("--class", dest="classes", help="classes of drawn shapes, with commas (default: all)")
    add("--draw", help=f"forms of drawn shapes, a part of {','.join(forms)} (default: {usual})")
    add(
        "--regret",
        action="store_true",
        help="of drawn shapes, times every kernel that could run beside the one that is chosen",
    )


def is_drawn(args: argparse.Namespace) -> bool:
    answer: bool = args.regret or args.shapes == DRAWN
    return answer


def settings_of(args: argparse.Namespace) -> dict[str, Any]:
    """Repetitions, their limit of time, and the seed."""
    usual = getattr(load_suite(args.op), "SECONDS", SECONDS)
    repetitions, seconds = REPETITIONS, usual
    if is_drawn(args):
        repetitions, seconds = DRAWN_REPETITIONS, DRAWN_SECONDS
    if args.repetitions is not None:
        repetitions = args.repetitions
    if args.seconds is not None:
        seconds = args.seconds
    if repetitions < 1 or seconds <= 0:
        raise ValueError("--repetitions and --seconds must be positive")
    if args.quick:
        repetitions, seconds = 10, seconds / 10
    return {"repetitions": repetitions, "seconds": seconds, "seed": args.seed}


def cases_of(args: argparse.Namespace, shapes: str) -> list[Case]:
    """The cases that the options ask for. ValueError for names there are not."""
    suite = load_suite(args.op)
    if is_drawn(args):
        if args.op in WHOLE:
            raise ValueError(f"{args.op} has no drawn shapes")
        return drawn.draw_cases(
            args.op,
            suite,
            seed=args.seed,
            count=args.count,
            classes=drawn.classes_of(suite, args.classes),
            forms=drawn.forms_of(suite, args.draw),
            dtype=None if args.dtype is None else DTYPES[args.dtype],
        )
    cases: list[Case] = suite.cases(
        shapes, dtype=DTYPES[args.dtype or "bf16"], **suite.options(args)
    )
    return cases


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
    if is_drawn(args):
        whole = not (args.classes or args.draw)
    if args.quick or not whole or args.dtype not in (None, "bf16") or args.peers:
        raise ValueError(
            "--save needs a full run: no --quick, part of --shapes, --kinds (--forms, --layouts), "
            "--dtype or --peers"
        )
    part = "_host" if args.host else "" if shapes == "default" else f"_{shapes}"
    part = "_regret" if args.regret else part
    part += f"_{args.protocol}" if args.protocol else ""
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


def timer_of(args: argparse.Namespace, device: torch.device) -> Timer:
    """The suite's own timer, else that of the protocol."""
    own = getattr(load_suite(args.op), "make_timer", None)
    timer: Timer = own(device) if own else make_timer(device, args.protocol)
    return timer


def run_device(args: argparse.Namespace, device: torch.device, record: dict[str, Any]) -> Any:
    """Measure, print and draw GPU times; the content of the result file."""
    suite, gpu = load_suite(args.op), forced.gpu_record()
    shapes = args.shapes or ("default" if device.type == "cuda" else "tiny")
    cases = cases_of(args, shapes)
    implementations = choose_peers(suite.implementations(device), args.peers)
    if is_drawn(args):
        peers = suite.DRAWN_PEERS
        kept = {name: x for name, x in implementations.items() if name in peers}
        subject = next(iter(implementations))
        implementations = {subject: implementations[subject], **kept}
    timer, settings = timer_of(args, device), settings_of(args)
    show = status_line(len(cases))

    def progress(measurement: Measurement) -> None:
        measurement.kernel = forced.kernel_of(args.op, measurement.case, gpu)
        if show is not None:
            show(measurement)

    measurements = compare(cases, implementations, timer=timer, progress=progress, **settings)
    peak = record["peak_tflops"]
    if is_drawn(args):
        print(drawn.report(measurements, [name for name in implementations if name in peers]))
    else:
        print(report.table(measurements, peak=peak))
    if args.plot:
        title = f"{args.op}, {args.dtype or 'bf16'}, {record['device']}"
        report.plot(measurements, args.plot, title=title, peak=peak)
        print(f"wrote {args.plot}")
    settings.update(shapes=shapes, dtype=args.dtype or "bf16", **timer.protocol())
    content = results.document(args.op, measurements, machine=record, settings=settings)
    if is_drawn(args):
        content["settings"].update(count=args.count, dtype=args.dtype)
        content["drawn"] = drawn.record(measurements, list(implementations)[1:])
    return content


def run_regret(args: argparse.Namespace, device: torch.device, record: dict[str, Any]) -> Any:
    """Time what could run on drawn shapes, and print it; the content of the result file."""
    from .. import info

    suite, settings = load_suite(args.op), settings_of(args)
    cases = [case for case in cases_of(args, DRAWN) if "problem" in case.parameters]
    if not cases:
        raise ValueError(f"--regret: {args.op} does not say which kernels could run")
    if device.type != "cuda":
        raise ValueError("--regret times CUDA kernels; it needs a GPU")
    timer = timer_of(args, device)
    show, shown = status_line(len(cases)), len(cases)

    def progress(result: regret.Regret) -> None:
        if show is not None:
            show(Measurement(result.case, result.chosen))

    found = regret.measure(
        args.op,
        cases,
        next(iter(suite.implementations(device).values())),
        forced.library_function(),
        forced.gpu_record(),
        first_timer=make_timer(device, COLD),
        timer=timer,
        progress=progress,
        **settings,
    )
    built = regret.resources(args.op, info.kernels())
    print(regret.report(found, built))
    if len(found) < shown:
        print(f"{shown - len(found)} of {shown} problems: the op does not say what could run.")
    settings.update(shapes=DRAWN, count=args.count, **timer.protocol())
    return {
        "schema": results.SCHEMA,
        "op": args.op,
        "machine": record,
        "settings": settings,
        **regret.record(found, built),
    }


def run(args: argparse.Namespace) -> int:
    """A whole run; ValueError for what cannot be."""
    settings_of(args)  # wrong values and names fail before any work
    cases_of(args, args.shapes or "tiny")
    if args.plot and importlib.util.find_spec("matplotlib") is None:
        raise ValueError("--plot needs matplotlib: pip install matplotlib")
    device = choose_device(args.device)
    record = machine.record(device)
    paths = [args.json] if args.json else []
    if args.save:
        paths.append(save_path(args, record["device"]))
    versions = (f"{name} {record[name]}" for name in ("torch", "cuda", "cudnn", "driver"))
    print(", ".join([record["device"], *versions]), flush=True)
    kind = run_host if args.host else run_regret if args.regret else run_device
    content = kind(args, device, record)
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
