"""Which lines and branches of the kernels the tests execute, on the emulator.

    cmake -S . -B .build/coverage -DTHUNDERKITTENS_COVERAGE=ON ...   (CONTRIBUTING.md has the rest)
    cmake --build .build/coverage && cmake --install .build/coverage --prefix .dev/coverage
    PYTHONPATH=.dev/coverage pytest --intensity 1
    python tools/coverage.py .build/coverage --missing
    python tools/coverage.py .build/coverage --record tools/coverage.json

The emulator of such a build counts, in the folder `.coverage.counts` of the directory that the
tests run in, what the code of `csrc/**/*_sm*.cuh` executes. The counts are clang's, of the source
and not of the machine code: what is inlined, unrolled or turned into a select counts as written.

- A branch is one outcome of one condition of the source: true or false of an `if`, a loop, `?:` or
  either side of `&&` and `||`, or one label of a `switch`. It is taken if an instance of a template
  takes it: the instances are not branches of their own.
- A condition that is a constant in an instance, as of `if constexpr`, counts for nothing there; one
  that is a constant in all of them is no branch.
- A line is executed if a piece of code that begins on it, or goes on to it, is, in an instance.

Code of templates without any instance is not seen at all.

A record keeps what was measured: of each file the lines and branches, executed and all, and a hash
of its code. With it a test holds the level where nothing can be measured: `problems()` names what
has changed since. After some of the tests, `--only` updates the files that these are for, where the
level is not lower than it was.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
import shutil
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

Place = tuple[int, int]  # line and column
KERNELS = "*_sm[0-9]*.cuh"  # files of every architecture family
RECORD = Path("tools/coverage.json")
# What the record must hold: of all branches, in per cent, those that are taken, and those of files
# that have changed since.
BAR, MOST_CHANGED = 92, 10


def llvm(build: Path, name: str) -> str:
    """The program of that name that belongs to the build's compiler: its counts have a version."""
    cache = (build / "CMakeCache.txt").read_text()
    compiler = re.search(r"^CMAKE_CXX_COMPILER:\w+=(.*)$", cache, re.MULTILINE)
    assert compiler is not None
    command = [compiler[1], f"-print-prog-name={name}"]
    path = shutil.which(subprocess.check_output(command, text=True).strip())
    if path is None:
        raise SystemExit(f"coverage.py: {name} of {compiler[1]} is not there")
    return path


def export(build: Path, data: Path) -> dict:
    """The counts of all processes, as llvm-cov writes them: by file and by instance."""
    counts = sorted(data.glob("*.profraw"))
    libraries = sorted(build.glob("_emulator*.so"))
    if not counts or not libraries:
        raise SystemExit(f"coverage.py: {data} has no counts, or {build} no emulator")
    merged = data / "merged.profdata"
    subprocess.run([llvm(build, "llvm-profdata"), "merge", "-o", merged, *counts], check=True)
    command = [llvm(build, "llvm-cov"), "export", f"--instr-profile={merged}"]
    report = subprocess.check_output([*command, "--skip-expansions", *libraries])
    return dict(json.loads(report)["data"][0])


def lines_of(segments: list[list]) -> dict[int, bool]:
    """Whether each line that has code is executed, by llvm-cov's own rule.

    A segment is a place from which on a count holds: line, column, count, whether there is one,
    whether a piece of code begins, and whether it is only the gap between two.
    """
    lines: dict[int, bool] = {}
    by_line: dict[int, list[list]] = defaultdict(list)
    for segment in segments:
        by_line[segment[0]].append(segment)
    before = None  # the last segment of the lines before
    for number in range(segments[0][0], segments[-1][0] + 1) if segments else ():
        here = by_line.get(number, [])
        begin = [s for s in here if s[3] and s[4] and not s[5]]
        skipped = bool(here) and here[0][4] and not here[0][3]
        goes_on = before is not None and before[3]
        if not skipped and (goes_on or begin):
            counts = [s[2] for s in begin] + ([before[2]] if before and goes_on else [])
            lines[number] = max(counts) > 0
        before = here[-1] if here else before
    return lines


def branches_of(report: dict) -> dict[str, dict[Place, list[bool]]]:
    """By file and place of a condition: whether it was true, and false, in any instance."""
    branches: dict[str, dict[Place, list[bool]]] = defaultdict(dict)
    for function in report["functions"]:
        # llvm-cov leaves out the conditions that are constants.
        for line, column, _, _, true, false, file, *_ in function["branches"]:
            name = relative(function["filenames"][file])
            taken = branches[name].setdefault((line, column), [False, False])
            taken[0] |= true > 0
            taken[1] |= false > 0
    return branches


def outcomes(name: str, branches: dict[Place, list[bool]]) -> Iterator[tuple[int, str, bool]]:
    """Line, outcome and whether it is taken. That a label is not taken is no outcome, nor that none
    of a switch is, which clang has from 19 on."""
    source = Path(name).read_text().splitlines()
    for (line, column), taken in sorted(branches.items()):
        before, text = source[line - 1][: column - 1], source[line - 1][column - 1 :]
        if text.startswith(("case ", "default:")):
            yield line, text.split(":")[0], taken[0]
        elif not before.endswith("switch ("):
            yield from ((line, text, t) for text, t in zip(("true", "false"), taken, strict=True))


# ---- the record ----


def hash_of(source: str) -> str:
    """Of the code: comments, blanks and what is included make no difference."""
    pattern = r'("(?:\\.|[^"\\\n])*")|//[^\n]*|/\*.*?\*/|^[ ]*#[ ]*include[^\n]*'
    code = re.sub(pattern, lambda m: m[1] or " ", source, flags=re.MULTILINE | re.DOTALL)
    return hashlib.sha256("".join(code.split()).encode()).hexdigest()[:16]


def hashes(root: Path) -> dict[str, str]:
    """Of the kernels' files, by their names."""
    files = sorted((root / "csrc").rglob(KERNELS))
    return {str(f.relative_to(root)): hash_of(f.read_text()) for f in files}


def share_of(entry: dict) -> float:
    taken, every = entry["branches"]
    return taken / every if every else 1.0


def entries(record: dict, now: dict[str, str]) -> dict[str, dict]:
    """What the record has of files that are there. One that has moved keeps its code."""
    gone = {entry["code"]: entry for name, entry in record.items() if name not in now}
    found = {name: record.get(name) or gone.get(code) for name, code in now.items()}
    return {name: entry for name, entry in found.items() if entry is not None}


def updated(record: dict, rows: dict[str, list[int]], now: dict[str, str], only: str) -> dict:
    """The record with the files that were measured: all, or some where it is no less."""
    known = entries(record, now)
    new = {}
    for name, code in now.items():
        row = rows.get(name, [0] * 4)
        entry = {"code": code, "lines": row[:2], "branches": row[2:]}
        before = known.get(name) if only else None
        if not re.search(only, name):
            entry = before
        elif before is not None and share_of(entry) < share_of(before):
            levels = share(*row[2:]), share(*before["branches"])
            print("not recorded: {} has {}, in the record {}".format(name, *levels))
            entry = before
        if entry is not None:
            new[name] = entry
    return new


def write_record(path: Path, record: dict) -> None:
    """A file to a line, for the differences of versions."""
    lines = [f"{json.dumps(name)}: {json.dumps(entry)}" for name, entry in record.items()]
    path.write_text("{\n" + ",\n".join(lines) + "\n}\n")


def problems(record: dict, now: dict[str, str]) -> list[str]:
    """Why a record does not hold for the files of now, given by their hashes."""
    known = entries(record, now)
    found = [f"{name} is not in the record" for name in now if name not in known]
    taken, every = (sum(entry["branches"][i] for entry in known.values()) for i in (0, 1))
    if 100 * taken < BAR * every:
        found.append(f"the tests take {share(taken, every)} of the branches; the bar is {BAR}%")
    changed = {name: e["branches"][1] for name, e in known.items() if e["code"] != now[name]}
    if 100 * sum(changed.values()) >= MOST_CHANGED * every:
        found.append(
            f"files with {share(sum(changed.values()), every)} of the branches have changed since "
            f"these were counted; it must be less than {MOST_CHANGED}%: {', '.join(changed)}"
        )
    return found


def measured(report: dict, missing: bool) -> dict[str, list[int]]:
    """Of each kernel's file: lines executed and all, branches taken and all; printed, too."""
    branches = branches_of(report)
    rows: dict[str, list[int]] = {}
    print(f"{'lines':>14} {'branches':>16}")
    for file in sorted(report["files"], key=lambda f: f["filename"]):
        name = relative(file["filename"])
        if not Path(name).match(KERNELS):
            continue
        lines = lines_of(file["segments"])
        every = list(outcomes(name, branches[name]))
        row = [sum(lines.values()), len(lines), sum(t for *_, t in every), len(every)]
        rows[name] = row
        print(f"{share(*row[:2]):>14} {share(*row[2:]):>16}  {name}")
        if missing:
            print_missing("lines", [str(n) for n, hit in lines.items() if not hit])
            print_missing("branches", [f"{n} {what}" for n, what, taken in every if not taken])
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("build", type=Path, help="of CMake, with THUNDERKITTENS_COVERAGE")
    parser.add_argument("--data", type=Path, default=Path(".coverage.counts"), help="the counts")
    parser.add_argument("--missing", action="store_true", help="which lines and which branches")
    parser.add_argument("--fail-under", type=float, default=0, help="per cent of all branches")
    parser.add_argument("--record", type=Path, help=f"write the levels to it: {RECORD}")
    parser.add_argument(
        "--only", default="", help="a regular expression for the files to record; else all"
    )
    args = parser.parse_args()
    rows = measured(export(args.build, args.data), args.missing)
    sums = [sum(row[i] for row in rows.values()) for i in range(4)]
    print(f"{share(*sums[:2]):>14} {share(*sums[2:]):>16}  all")
    if args.record:
        old = json.loads(args.record.read_text()) if args.record.is_file() else {}
        write_record(args.record, updated(old, rows, hashes(Path()), args.only))
    level = 100 * sums[2] / max(sums[3], 1)
    if level < args.fail_under:
        print(f"fewer branches than {args.fail_under} %: a new kernel's, or a test is gone")
    return int(level < args.fail_under)


def relative(name: str) -> str:
    return name.removeprefix("./")


def share(part: int, all_of_it: int) -> str:
    return f"{part}/{all_of_it} {100 * part / max(all_of_it, 1):5.1f}%"


def print_missing(what: str, places: list[str]) -> None:
    if places:
        print(f"    {what} " + ", ".join(places))


if __name__ == "__main__":
    sys.exit(main())
