"""What two runs of the same software differ by, from the history of the result files.

    python tools/between_runs.py [FOLDER]

Peers did not change from one commit of a file to the next, as long as device and versions are the
same, and their times did. It prints quantiles of the absolute logarithms of changes: of times, of
ratios of two peers of a case, and of means of these over the cases of a file. The constants
`BETWEEN_RUNS` of bench/comparison.py are from it.
"""

from __future__ import annotations

import itertools
import json
import math
import subprocess
import sys
from typing import Any

SAME = ("device", "torch", "cuda", "cudnn", "driver")
LEAST_CASES = 5
QUANTILES = (0.5, 0.8, 0.9, 0.95)


def git(*arguments: str) -> str:
    return subprocess.run(["git", *arguments], check=True, capture_output=True, text=True).stdout


def versions(path: str) -> list[dict[str, Any]]:
    """All contents that a result file has had."""
    found = []
    for commit in git("log", "--format=%H", "--diff-filter=AM", "--", path).split():
        content = json.loads(git("show", f"{commit}:{path}"))
        if "cases" in content and "subject" in content:
            found.append(content)
    return found


def medians(content: dict[str, Any]) -> dict[tuple[str, Any], dict[str, float]]:
    """(name, protocol) of a case to the logarithms of the medians of its peers."""
    return {
        (case["name"], case.get("protocol")): {
            name: math.log(result["time_us"]["median"])
            for name, result in case["results"].items()
            if name != content["subject"] and result["time_us"]
        }
        for case in content["cases"]
    }


def changes(old: dict[str, Any], new: dict[str, Any]) -> dict[tuple[str, ...], list[float]]:
    """For each peer, and for each two of them, the changes of all cases."""
    result: dict[tuple[str, ...], list[float]] = {}
    before, after = medians(old), medians(new)
    for case in before.keys() & after.keys():
        a, b = before[case], after[case]
        common = [name for name in a if name in b]
        for name in common:
            result.setdefault((name,), []).append(b[name] - a[name])
        for x, y in itertools.combinations(common, 2):
            result.setdefault((x, y), []).append(b[x] - b[y] - a[x] + a[y])
    return result


def main(folder: str = "benchmarks/results/h200") -> None:
    found: dict[str, list[float]] = {}
    for path in git("ls-files", folder).split():
        for old, new in itertools.combinations(versions(path), 2):
            if any(old["machine"].get(key) != new["machine"].get(key) for key in SAME):
                continue
            for names, values in changes(old, new).items():
                kind = ("times", "ratios of peers")[len(names) - 1]
                found.setdefault(kind, []).extend(values)
                if len(values) >= LEAST_CASES:
                    found.setdefault(f"means of {kind}", []).append(sum(values) / len(values))
    for kind, values in found.items():
        sizes = sorted(map(abs, values))
        texts = (
            f"{q:.0%} {sizes[min(len(sizes) - 1, int(q * len(sizes)))]:.4f}" for q in QUANTILES
        )
        print(f"{kind} ({len(sizes)}): {', '.join(texts)}")


if __name__ == "__main__":
    main(*sys.argv[1:])
