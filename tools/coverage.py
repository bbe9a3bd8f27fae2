"""Which lines and branches of the kernels the tests execute, on the emulator.

    cmake -S . -B .build/coverage -DTHUNDERKITTENS_COVERAGE=ON ...   (CONTRIBUTING.md has the rest)
    cmake --build .build/coverage && cmake --install .build/coverage --prefix .dev/coverage
    PYTHONPATH=.dev/coverage pytest --intensity 1
    python tools/coverage.py .build/coverage --missing

The emulator of such a build counts, in the folder `.coverage.counts` of the directory that the
tests run in, what the code of `csrc/**/*_sm90.cuh` executes. The counts are clang's, of the source
and not of the machine code: what is inlined, unrolled or turned into a select counts as written.

- A branch is one outcome of one condition of the source: true or false of an `if`, a loop, `?:` or
  either side of `&&` and `||`, or one label of a `switch`. It is taken if an instance of a template
  takes it: the instances are not branches of their own.
- A condition that is a constant in an instance, as of `if constexpr`, counts for nothing there; one
  that is a constant in all of them is no branch.
- A line is executed if a piece of code that begins on it, or goes on to it, is, in an instance.

Code of templates without any instance is not seen at all.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

Place = tuple[int, int]  # line and column
KERNELS = "_sm90.cuh"


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


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("build", type=Path, help="of CMake, with THUNDERKITTENS_COVERAGE")
    parser.add_argument("--data", type=Path, default=Path(".coverage.counts"), help="the counts")
    parser.add_argument("--missing", action="store_true", help="which lines and which branches")
    parser.add_argument("--fail-under", type=float, default=0, help="per cent of all branches")
    args = parser.parse_args()
    report = export(args.build, args.data)
    branches = branches_of(report)
    sums = [0, 0, 0, 0]
    print(f"{'lines':>14} {'branches':>16}")
    for file in sorted(report["files"], key=lambda f: f["filename"]):
        name = relative(file["filename"])
        if not name.endswith(KERNELS):
            continue
        lines = lines_of(file["segments"])
        every = list(outcomes(name, branches[name]))
        row = [sum(lines.values()), len(lines), sum(t for *_, t in every), len(every)]
        sums = [a + b for a, b in zip(sums, row, strict=True)]
        print(f"{share(*row[:2]):>14} {share(*row[2:]):>16}  {name}")
        if args.missing:
            print_missing("lines", [str(n) for n, hit in lines.items() if not hit])
            print_missing("branches", [f"{n} {what}" for n, what, taken in every if not taken])
    print(f"{share(*sums[:2]):>14} {share(*sums[2:]):>16}  all")
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
