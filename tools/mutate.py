"""Mutates the kernels, and tells which mutations the tests on the emulator do not notice.

    mutate.py build                          one emulator with all mutations of the set
    mutate.py reach [TEST_FILE...]           which test executes which mutation, and how long
    mutate.py run                            the set; again: those that have no result yet
    mutate.py run --only 'attention.*phase'  some of those that are built
    mutate.py list                           the set, with what has become of it

A mutation is a small mistake that a programmer makes, in `csrc/**/*.cuh`:

    wait       a wait left out
    phase      a phase inverted, a stage off by one, a ring that does not advance or is too short
    early      a stage handed back, or a barrier arrived at, before what it must come after
    fence      a fence left out
    barrier    a barrier left out
    bytes      what a semaphore expects: 16 bytes too many or few, or none; an arrival too few
    boundary   the right side of a comparison, or of a minimum or maximum, off by one
    index      a coordinate, a block of the cluster, a bit of a mask, or the divisor in a division
               or remainder, off by one
    flag       a flag in global memory written or read without its order, or written too early

The mutations are written into a copy of the sources as run-time choices, `tk_mutant(number) ? ... :
...`, so that one build has them all; THUNDERKITTENS_MUTANT selects one. Where a constant expression
is needed a mutation does nothing; `reach` lists it as not executed.

Each mutation runs the tests that execute it, the quickest first, at intensity 1, until one fails or
a minute's worth has passed. Tests that take ten times as long as they should have failed, too.
`tools/mutants_unseen.txt` says of those that survive for a reason what the reason is.
"""

from __future__ import annotations

import argparse
import collections
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

from mutations import CLASSES, HEADER, ROOT, Mutation, all_mutations, chosen, mutated

WORK = ROOT / ".build" / "mutants"

# ---- build ----


def write(path: Path, text: str) -> None:
    """Files that stay the same keep their time, so that the build does not compile them again."""
    if not path.is_file() or path.read_text() != text:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def build(args: argparse.Namespace) -> int:
    sources, mutations = all_mutations()
    keep = {m.number for m in chosen(mutations, args.per_file, args.seed, args.only)}
    folder, changed = WORK / "source", {source.path: source for source in sources}
    for source in sources:
        source.found = [m for m in source.found if m.number in keep]
    for path in subprocess.check_output(["git", "ls-files"], cwd=ROOT, text=True).split("\n"):
        if path in changed:
            write(folder / path, mutated(changed[path]))
        elif path and not path.startswith(("tests/", "docs/", "benchmarks/")):
            write(folder / path, (ROOT / path).read_text())
    write(folder / "csrc/mutants.h", HEADER.replace("COUNT", str(len(mutations))))
    numbers = {m.key: m.number for m in mutations if m.number in keep}
    write(WORK / "built.json", json.dumps(numbers, indent=1))
    print(f"{len(keep)} of {len(mutations)} mutations")
    configure = ["cmake", "-S", folder, "-B", WORK / "build", "-G", "Ninja"]
    configure += [f"-DPython_EXECUTABLE={sys.executable}", "-DTHUNDERKITTENS_CUDA=OFF"]
    configure += ["-DCMAKE_CXX_FLAGS=-Wno-parentheses"]  # of shifts by mutated amounts
    # Where the sources are is nothing to the compiler's cache.
    environment = os.environ | {"CCACHE_BASEDIR": str(folder), "CCACHE_NOHASHDIR": "1"}
    subprocess.run(configure, check=True, stdout=subprocess.DEVNULL)
    command = ["cmake", "--build", WORK / "build", "--target", "_emulator"]
    command += ["-j", str(args.jobs)] if args.jobs else []
    subprocess.run(command, check=True, env=environment)
    # The other libraries of the package have no mutations.
    shutil.copytree(args.package, WORK / "pkg", dirs_exist_ok=True)
    for library in (WORK / "build").glob("_emulator*.so"):
        shutil.copy2(library, WORK / "pkg/thunderkittens")
    return 0


# ---- tests ----


def emulated_files() -> list[str]:
    """The files of tests/ that run kernels on the emulator."""
    suites = re.findall(r'"(test_\w+)"', (ROOT / "tests/conftest.py").read_text())
    files = sorted((ROOT / "tests").glob("test_*.py"))
    return [str(f) for f in files if f.stem in suites or "emulat" in f.read_text()]


class Recorder:
    """A plugin of pytest: what each test executes, and its time."""

    def __init__(self, path: Path) -> None:
        self.file = path.open("r+b")
        self.tests: dict[str, dict] = {}

    def pytest_collection_modifyitems(self, items: list) -> None:
        back_ends = re.compile(r"\[(cpu|cuda)(?=[-\]])")
        items[:] = [item for item in items if not back_ends.search(item.nodeid)]

    def pytest_runtest_logreport(self, report: object) -> None:
        if report.when != "call":
            return
        self.file.seek(0)
        executed = [i for i, byte in enumerate(self.file.read()) if byte]
        self.file.seek(0)
        self.file.write(bytes(os.fstat(self.file.fileno()).st_size))
        self.file.flush()
        if executed and report.passed:
            self.tests[report.nodeid] = {"seconds": report.duration, "executed": executed}


def start(arguments: list[str], log: Path, variables: dict[str, str], plugin: object = None) -> int:
    """Runs pytest in a process of its own, which has imported already what takes long."""
    import hypothesis  # noqa: F401
    import pytest
    import torch  # noqa: F401

    sys.stdout.flush()
    child = os.fork()
    if child:
        return child
    os.setsid()
    with log.open("w") as out:
        os.dup2(out.fileno(), 1)
        os.dup2(out.fileno(), 2)
        os.environ.update(variables, PYTHONPATH=str(WORK / "pkg"))
        sys.path.insert(0, str(WORK / "pkg"))
        os.chdir(ROOT)
        options = ["--intensity", "1", "-q", "-p", "no:cacheprovider", "-p", "no:randomly"]
        code = pytest.main([*options, *arguments], plugins=[plugin] if plugin else [])
        if isinstance(plugin, Recorder):
            path = WORK / "reach.json"
            tests = json.loads(path.read_text()) if path.is_file() else {}
            path.write_text(json.dumps(tests | plugin.tests))
        sys.stdout.flush()
    os._exit(int(code))


def finish(child: int, seconds: float) -> int | None:
    """The exit status, negative for a signal; None if it took too long."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.05)
    os.killpg(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return None


def reach(args: argparse.Namespace) -> int:
    _, mutations = all_mutations()
    path = WORK / "executed"
    path.write_bytes(bytes(len(mutations)))
    variables = {"THUNDERKITTENS_MUTANTS_EXECUTED": str(path)}
    files = [str(Path(f).resolve()) for f in args.tests] or emulated_files()
    child = start(files, WORK / "reach.log", variables, Recorder(path))
    code = finish(child, 7200)
    print("".join((WORK / "reach.log").read_text().splitlines(keepends=True)[-3:]))
    return code if code is not None else 1


def how_caught(log: str) -> str:
    for name in ("DeadlockError", "EmulatorError"):
        if re.search(rf"^E .*{name}", log, re.MULTILINE):
            return name
    return "wrong values"


def quickest(names: list[str], tests: dict[str, dict], seconds: float) -> dict[str, float]:
    """As many of the tests as take that long together, and one at least; with their times."""
    times, total = {}, 0.0
    for name in names:
        total += tests[name]["seconds"]
        if times and total > seconds:
            break
        times[name] = tests[name]["seconds"]
    return times


def try_mutation(m: Mutation, tests: dict[str, float]) -> str:
    log = WORK / "logs" / f"{m.number}.log"
    log.parent.mkdir(exist_ok=True)
    variables = {"THUNDERKITTENS_MUTANT": str(m.number)}
    # Ten times what they take: a machine may be busier than it was.
    limit = 60 + 10 * sum(tests.values())
    code = finish(start(["-x", "--tb=short", *tests], log, variables), limit)
    if code == 0:
        return "survived"
    if code == 1:
        return how_caught(log.read_text(errors="replace"))
    return "hangs" if code is None else "crash" if code < 0 else f"pytest failed: see {log}"


def reasons() -> dict[str, str]:
    """Of mutations that cannot show: by their key."""
    path = ROOT / "tools/mutants_unseen.txt"
    lines = path.read_text().splitlines() if path.is_file() else []
    split = [line.rsplit(" | ", 1) for line in lines if line and not line.startswith("#")]
    return dict(split)


def run(args: argparse.Namespace) -> int:
    _, mutations = all_mutations()
    built = json.loads((WORK / "built.json").read_text())  # sources may have changed since
    tests = json.loads((WORK / "reach.json").read_text())
    path = WORK / "results.json"
    results = json.loads(path.read_text()) if path.is_file() else {}
    selected = chosen(mutations, args.per_file, args.seed, args.only)
    selected = [m for m in selected if m.key in built]
    selected.sort(key=lambda m: m.rank(args.seed))
    end = time.monotonic() + 60 * args.minutes
    for m in selected[: args.first]:
        if time.monotonic() > end:
            break
        if m.key in results and not args.again and results[m.key] not in args.retry:
            continue
        m.number = built[m.key]
        mine = [t for t in tests if m.number in tests[t]["executed"]]
        mine.sort(key=lambda t: tests[t]["seconds"])
        result = try_mutation(m, quickest(mine, tests, args.seconds)) if mine else "not executed"
        print(f"{result:14} {m.path}:{m.line} {m.kind}, {m.what}: {m.text}", flush=True)
        results = json.loads(path.read_text()) if path.is_file() else {}
        results[m.key] = result
        path.write_text(json.dumps(results, indent=1))
    return show(selected, results)


def show(selected: list[Mutation], results: dict[str, str]) -> int:
    known = reasons()
    left = 0
    table: dict[str, collections.Counter[str]] = {kind: collections.Counter() for kind in CLASSES}
    for m in selected:
        result = results.get(m.key, "not run")
        if result in ("survived", "not executed"):
            if m.key in known:
                result = "cannot show"
            else:
                left += 1
                print(f"{result}: {m.path}:{m.line} {m.kind}, {m.what}: {m.text}\n    {m.key}")
        table[m.kind][result] += 1
    outcomes = sorted({outcome for row in table.values() for outcome in row})
    rows = [["class", *outcomes], *([k, *(str(table[k][o]) for o in outcomes)] for k in CLASSES)]
    rows.append(["all", *(str(sum(table[k][o] for k in CLASSES)) for o in outcomes)])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)))
    return int(left > 0)


def show_list(args: argparse.Namespace) -> int:
    _, mutations = all_mutations()
    path = WORK / "results.json"
    results = json.loads(path.read_text()) if path.is_file() else {}
    selected = chosen(mutations, args.per_file, args.seed, args.only)
    for m in selected:
        print(f"{results.get(m.key, '-'):14} {m.path}:{m.line} {m.kind}, {m.what}: {m.text}")
    return show(selected, results)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    commands = parser.add_subparsers(required=True)
    for name, function in (("build", build), ("reach", reach), ("run", run), ("list", show_list)):
        command = commands.add_parser(name)
        command.set_defaults(function=function)
        if name == "reach":
            command.add_argument("tests", nargs="*", help="files; those on the emulator if none")
            continue
        command.add_argument("--per-file", type=int, default=2, help="mutations of each file")
        command.add_argument("--seed", type=int, default=0, help="of the choice in a file")
        command.add_argument(
            "--only", default="", help="a regular expression for path, class, line"
        )
        if name == "build":
            command.add_argument("--jobs", type=int, help="of the compiler")
            text = "an installed build of the same sources"
            command.add_argument("--package", type=Path, default=ROOT / ".dev/pkg", help=text)
        if name == "run":
            command.add_argument("--again", action="store_true", help="also those with a result")
            command.add_argument("--retry", nargs="*", default=[], help="those with these results")
            command.add_argument("--first", type=int, help="only so many of the set")
            command.add_argument("--seconds", type=float, default=60, help="of tests for each")
            command.add_argument("--minutes", type=float, default=1e9, help="for all")
    args = parser.parse_args()
    WORK.mkdir(parents=True, exist_ok=True)
    return args.function(args)


if __name__ == "__main__":
    sys.exit(main())
