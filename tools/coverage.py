"""Which lines and branches of the kernels the tests execute, on the emulator.

    cmake -S . -B .build/coverage -DTHUNDERKITTENS_COVERAGE=ON ...   (CONTRIBUTING.md has the rest)
    cmake --build .build/coverage && cmake --install .build/coverage --prefix .dev/coverage
    PYTHONPATH=.dev/coverage pytest --intensity 1
    python tools/coverage.py .build/coverage --missing

The emulator of such a build counts, in the folder `.coverage.gcov` of the directory that the tests
run in, what the code of `csrc/**/*.cuh` executes; this program adds up the counts of all instances
of a template and prints them by file of `csrc/**/*_sm90.cuh`. A line is executed if an instance of
it is. The branches of a line are those of its fullest instances: `if constexpr` and constants leave
others with fewer, of which each is one of the former. Branches to exceptions do not count, and a
choice between two values that the compiler makes without a branch is none.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

Branches = dict[int, list[bool]]  # by their number on the line: whether each is taken


def place_counts(build: Path, data: Path) -> list[Path]:
    """Puts the counts where gcov looks for them, and lists the notes of the compiler."""
    notes = sorted((build / "CMakeFiles/_emulator.dir").rglob("*.gcno"))
    for note in notes:
        counts = note.with_suffix(".gcda")
        counts.unlink(missing_ok=True)
        found = data / str(counts.relative_to(build)).replace("/", "#")
        if found.is_file():
            shutil.copy(found, counts)
    return notes


def read(notes: list[Path], build: Path) -> tuple[dict, dict]:
    """By file and line: whether it is executed, and its branches."""
    lines: dict[str, dict[int, bool]] = defaultdict(lambda: defaultdict(bool))
    branches: dict[str, dict[int, Branches]] = defaultdict(lambda: defaultdict(dict))
    for note in notes:
        command = ["gcov", "--json-format", "--branch-probabilities", "--stdout"]
        report = subprocess.check_output(
            [*command, note.relative_to(build)], cwd=build, stderr=subprocess.DEVNULL
        )
        for file in json.loads(report)["files"]:
            name = file["file"].removeprefix("./")
            if not (name.startswith("csrc/") and name.endswith("_sm90.cuh")):
                continue
            for line in file["lines"]:
                number = line["line_number"]
                lines[name][number] |= line["count"] > 0
                taken = [b["count"] > 0 for b in line["branches"] if not b["throw"]]
                if taken:
                    before = branches[name][number].setdefault(len(taken), [False] * len(taken))
                    branches[name][number][len(taken)] = [
                        a or b for a, b in zip(before, taken, strict=True)
                    ]
    return lines, branches


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("build", type=Path, help="of CMake, with THUNDERKITTENS_COVERAGE")
    parser.add_argument("--data", type=Path, default=Path(".coverage.gcov"), help="the counts")
    parser.add_argument("--missing", action="store_true", help="which lines, and of which branches")
    parser.add_argument("--fail-under", type=float, default=0, help="per cent of all branches")
    args = parser.parse_args()
    build = args.build.resolve()
    notes = place_counts(build, args.data.resolve())
    if not any(note.with_suffix(".gcda").is_file() for note in notes):
        parser.error(f"{args.data} has no counts of {build}")
    lines, branches = read(notes, build)
    sums = [0, 0, 0, 0]
    print(f"{'lines':>14} {'branches':>16}")
    for name in sorted(lines):
        fullest = {n: groups[max(groups)] for n, groups in branches[name].items()}
        every = [taken for each in fullest.values() for taken in each]
        row = [sum(lines[name].values()), len(lines[name]), sum(every), len(every)]
        sums = [a + b for a, b in zip(sums, row, strict=True)]
        print(f"{share(*row[:2]):>14} {share(*row[2:]):>16}  {name}")
        if args.missing:
            print_missing("lines", [n for n, hit in lines[name].items() if not hit])
            partly = [n for n, each in fullest.items() if not all(each) and lines[name][n]]
            print_missing("branches of", partly)
    print(f"{share(*sums[:2]):>14} {share(*sums[2:]):>16}  all")
    level = 100 * sums[2] / max(sums[3], 1)
    if level < args.fail_under:
        print(f"fewer branches than {args.fail_under} %: a new kernel's, or a test is gone")
    return int(level < args.fail_under)


def share(part: int, all_of_it: int) -> str:
    return f"{part}/{all_of_it} {100 * part / max(all_of_it, 1):5.1f}%"


def print_missing(what: str, numbers: list[int]) -> None:
    if numbers:
        print(f"    {what} " + ", ".join(str(n) for n in sorted(numbers)))


if __name__ == "__main__":
    sys.exit(main())
