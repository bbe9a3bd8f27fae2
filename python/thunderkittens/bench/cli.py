"""The command line of the benchmarks: `python -m thunderkittens bench <op>`, or `training`, or
`compare` for two result files, or `all` for every op."""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import pkgutil
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from . import (
    comparison,
    drawn,
    forced,
    machine,
    models,
    profile,
    progress,
    regret,
    report,
    results,
    suites,
)
from .cases import Case
from .host import measure_host
from .runner import Measurement, compare
from .stream import PROTOCOLS, make_timer
from .timing import COLD, DIRTY, STREAM, Timer

WHOLE = ("training",)  # modules beside the suites, with a suite's interface, of more than an op
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
RESULTS = Path("benchmarks") / "results"
DRAWN = "drawn"  # the set of shapes that a seed makes
COMPARE, EVERY = "compare", "all"
REGRESSION = 3  # exit status
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


def add_options(parser: argparse.ArgumentParser, suite: Any) -> None:
    """What only this suite has, if anything."""
    for option in getattr(suite, "CHOICES", ()):
        option.add(parser)


def options_of(suite: Any, args: argparse.Namespace) -> dict[str, Any]:
    """The suite's own keywords of `cases`."""
    return {option.name: option.given(args) for option in getattr(suite, "CHOICES", ())}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_profile(parser, default=False)
    ops = parser.add_subparsers(dest="op", metavar="op", required=True)
    two_files = "hold two result files against each other, without a run"
    comparison.add_arguments(ops.add_parser(COMPARE, help=two_files, description=two_files))
    every = "all ops, one after the other; files of --json, --plot and --compare are folders"
    add_common(ops.add_parser(EVERY, help=every, description=every), "default", SECONDS)
    for name in (*suite_names(), *WHOLE):
        suite = load_suite(name)
        summary = (suite.__doc__ or "").strip().splitlines()[0]
        op = ops.add_parser(name, help=summary, description=summary)
        op.set_defaults(dtype=None, host=False, protocol=None, regret=False, model=None)
        op.set_defaults(protocols={})  # of cases, by the file of --compare
        add_options(op, suite)
        more = "" if name in WHOLE else f", {DRAWN}"
        shapes = f"{', '.join(suite.SHAPES)}{more} (on a CPU: tiny)"
        add_common(op, shapes, getattr(suite, "SECONDS", SECONDS), of_op=name not in WHOLE)
        if name not in WHOLE:
            add_drawing(op, suite)


def add_common(
    parser: argparse.ArgumentParser, shapes: str, seconds: float, of_op: bool = True
) -> None:
    """The options that all suites have; some are of ops alone."""
    add = parser.add_argument
    add("--shapes", help=shapes)
    if of_op:
        add("--dtype", choices=DTYPES, help="input type (default: bf16; drawn: both)")
        add("--host", action="store_true", help="host time of eager calls, not GPU times")
        add_model(parser)
        add_profile(parser, default=argparse.SUPPRESS)
        add_protocol(parser)
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
    old = f"hold the run against an older file of the same: exit status {REGRESSION} if slower"
    add("--compare", type=Path, metavar="FILE", help=old)
    comparison.add_confidence(parser)


def add_profile(parser: argparse.ArgumentParser, default: Any) -> None:
    parser.add_argument(
        "--profile",
        action="store_true",
        default=default,
        help="the share of tensor cores, exponentials, memory and host in the op's time",
    )


def add_model(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--model", metavar="NAME", help=f"shapes of a model's layer: {', '.join(models.MODELS)}")
    tokens = f"tokens of the layer of --model (default: {models.TOKENS})"
    add("--tokens", type=int, default=models.TOKENS, help=tokens)
    count = f"in so many sequences of one length (default: {models.SEQUENCES})"
    add("--sequences", type=int, default=models.SEQUENCES, help=count)


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
    if args.model is not None:
        work = models.find(args.model, args.tokens, args.sequences)
        dtype = DTYPES[args.dtype or "bf16"]
        return models.cases(suite, work, dtype=dtype, options=options_of(suite, args))
    cases: list[Case] = suite.cases(
        shapes, dtype=DTYPES[args.dtype or "bf16"], **options_of(suite, args)
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
    add_options(parser, suite)
    whole, chosen = (options_of(suite, x) for x in (parser.parse_args([]), args))
    return any(
        isinstance(names, tuple) and set(names) - set(chosen[k]) for k, names in whole.items()
    )


def save_path(args: argparse.Namespace, gpu: str) -> Path:
    """Where `--save` writes; refused for a partial run, which would replace a full one."""
    if not RESULTS.parent.is_dir():
        raise ValueError(f"--save writes to {RESULTS}; run it in the root of a source tree")
    shapes, suite = args.shapes or "default", load_suite(args.op)
    whole = shapes in getattr(suite, "SAVED", ("default",)) and not takes_part(suite, args)
    if args.model:
        whole &= (args.tokens, args.sequences) == (models.TOKENS, models.SEQUENCES)
    if is_drawn(args):
        whole = not (args.classes or args.draw)
    if args.quick or not whole or args.dtype not in (None, "bf16") or args.peers:
        raise ValueError(
            "--save needs a full run: no --quick, part of --shapes, --kinds (--forms, --layouts), "
            "--dtype, --peers, --tokens or --sequences"
        )
    part = "_host" if args.host else "" if shapes == "default" else f"_{shapes}"
    part = "_regret" if args.regret else f"_{args.model}" if args.model else part
    part += f"_{args.protocol}" if args.protocol else ""
    return RESULTS / machine.slug(gpu) / f"{args.op}{part}.json"


def followed(cases: list[Case]) -> Iterable[Case]:
    """The cases, one by one; a terminal shows how far the run is."""
    return progress.follow(cases, len(cases), lambda case: case.name)


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
    profiled = profile.Profile(timer) if args.profile else None
    if profiled is not None:
        subject, *_ = implementations
        implementations[subject] = profiled.watch(implementations[subject])

    def finish(measurement: Measurement) -> None:
        measurement.kernel = forced.kernel_of(args.op, measurement.case, gpu)
        if profiled is not None:
            profiled.add(measurement)

    measurements = compare(
        followed(cases),
        implementations,
        timer=timer,
        progress=finish,
        protocols=args.protocols,
        **settings,
    )
    peak = record["peak_tflops"]
    if is_drawn(args):
        print(drawn.report(measurements, [name for name in implementations if name in peers]))
    else:
        print(report.table(measurements, peak=peak))
    if profiled is not None:
        print(profiled.report())
    if args.plot:
        title = f"{args.op}, {args.dtype or 'bf16'}, {record['device']}"
        report.plot(measurements, args.plot, title=title, peak=peak)
        print(f"wrote {args.plot}")
    settings.update(shapes=shapes, dtype=args.dtype or "bf16", **timer.protocol())
    if args.model:
        settings.update(shapes=None, model=args.model, tokens=args.tokens)
        settings.update(sequences=args.sequences)
    content = results.document(args.op, measurements, machine=record, settings=settings)
    if is_drawn(args):
        content["settings"].update(count=args.count, dtype=args.dtype)
        content["drawn"] = drawn.record(measurements, list(implementations)[1:])
    if profiled is not None:
        content["profile"] = profiled.record()
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
    timer, shown = timer_of(args, device), len(cases)
    found = regret.measure(
        args.op,
        followed(cases),
        next(iter(suite.implementations(device).values())),
        forced.library_function(),
        forced.gpu_record(),
        first_timer=make_timer(device, COLD),
        timer=timer,
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


def check_options(args: argparse.Namespace) -> None:
    """ValueError for options that exclude each other."""
    alone = [
        name
        for name, given in (
            ("--host", args.host),
            ("--model", args.model),
            ("--regret", args.regret),
            ("--shapes", args.shapes),
        )
        if given
    ]
    if args.model and len(alone) > 1:
        raise ValueError(f"{' and '.join(alone)} exclude each other")
    if args.profile and (args.host or args.regret or args.op in WHOLE):
        raise ValueError("--profile is of GPU times of an op: without --host and --regret")
    if args.compare and args.regret:
        raise ValueError("--compare is of times: without --regret")


def same_again(args: argparse.Namespace, old: dict[str, Any]) -> None:
    """Sets what the options leave open to what the file was measured with: calls whose length is
    near where the protocol changes have that of the file."""
    settings = old.get("settings", {})
    if args.protocol is None:
        of_cases = {c["name"]: results.protocol_of(old, c) for c in old.get("cases", ())}
        if set(of_cases.values()) == {DIRTY}:
            args.protocol = DIRTY
        args.protocols = {name: p for name, p in of_cases.items() if p in (STREAM, COLD)}
    if args.host or args.shapes or args.model or args.op in WHOLE:
        return
    if settings.get("model"):
        args.model = settings["model"]
        args.tokens, args.sequences = settings["tokens"], settings["sequences"]
    elif settings.get("shapes"):
        args.shapes, args.count = settings["shapes"], settings.get("count", args.count)
    args.seed = settings.get("seed", args.seed)
    if args.dtype is None and args.shapes != DRAWN:
        args.dtype = settings.get("dtype")


def run_comparison(args: argparse.Namespace) -> int:
    """Two files, without a run."""
    old, new = comparison.read(args.old), comparison.read(args.new)
    verdicts = comparison.compare_files(old, new, args.confidence)
    print(comparison.report(verdicts))
    return REGRESSION if verdicts.regression else 0


def run(args: argparse.Namespace) -> int:
    """A whole run; ValueError for what cannot be."""
    if args.op == COMPARE:
        return run_comparison(args)
    check_options(args)
    old = comparison.read(args.compare) if args.compare else None
    if old is not None:
        same_again(args, old)
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
    failed = any(case["failed"] for case in content.get("cases", ()))
    if old is None:
        return 1 if failed else 0
    verdicts = comparison.compare_files(old, content, args.confidence)
    print(comparison.report(verdicts))
    return 1 if failed else REGRESSION if verdicts.regression else 0


def run_every(args: argparse.Namespace) -> int:
    """The suites one after the other, each with its own defaults; the highest of their statuses. Of
    a folder to compare with, what it has no file of is left out, and so are ops that a model does
    not have."""
    parser, worst = argparse.ArgumentParser(), 0
    add_arguments(parser)
    given = {name: value for name, value in vars(args).items() if name != "op"}
    for op in suite_names():
        one = parser.parse_args([op])
        vars(one).update(given)
        for option, suffix in (("json", "json"), ("compare", "json"), ("plot", "png")):
            if given[option] is not None:
                setattr(one, option, given[option] / f"{op}.{suffix}")
        if one.compare and not one.compare.exists():
            continue
        print(f"== {op}", flush=True)
        try:
            worst = max(worst, run(one))
        except models.NotInModelError as error:
            print(error)
    return worst


def main(args: argparse.Namespace) -> int:
    """Run a benchmark; 0 when all went well, 1 when the op failed somewhere, 2 when it cannot, 3
    when it has become slower than in the file of --compare."""
    try:
        return run_every(args) if args.op == EVERY else run(args)
    except (ValueError, ImportError, OSError) as error:
        print(f"thunderkittens bench: {error}", file=sys.stderr)
        return 2
