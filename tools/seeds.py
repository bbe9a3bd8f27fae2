"""Runs every kernel on the emulator under every policy, with many seeds: no alarm may be raised.

    seeds.py record [TEST_FILE...]   keeps the quickest calls of each kernel that the tests make
    seeds.py run --seeds 20          each under every policy with so many seeds, the quickest first
    seeds.py list                    what has become of each kernel of the registry

A shipped kernel is right whatever the order in which copies, products and threads take their turns.
So an error of the emulator in one of these runs is a mistake of the kernel or of the emulator, and
so are other bits than those of the recorded call, except where blocks add to memory in any order.

The order is the seed's only under the policy `random`, and where several operations are awaited at
a time. Calls and results stay in `.build/seeds`; `--again` runs those that have a result again.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import pickle
import re
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
WORK = ROOT / ".build" / "seeds"
ALIGNMENT = 128
# Whose blocks add in any order, unless they are told to take turns.
IN_ANY_ORDER = re.compile(r"attention_(varlen_)?backward")

# ---- calls ----


def packed(x: np.ndarray) -> tuple[Any, ...]:
    """What a file keeps of an array: all bytes between its first and its last one."""
    if x.size == 0:
        return x.shape, x.dtype.str, x.strides, 0, 0, b""
    low, high = np.lib.array_utils.byte_bounds(x)
    first = x.__array_interface__["data"][0] - low
    return (
        x.shape,
        x.dtype.str,
        x.strides,
        low % ALIGNMENT,
        first,
        ctypes.string_at(low, high - low),
    )


def unpacked(kept: tuple[Any, ...]) -> np.ndarray:
    """An array in memory of its own, with the alignment of the one that was packed."""
    shape, dtype, strides, alignment, first, data = kept
    room = np.zeros(len(data) + 2 * ALIGNMENT, np.uint8)
    begin = -room.__array_interface__["data"][0] % ALIGNMENT + alignment
    room[begin : begin + len(data)] = np.frombuffer(data, np.uint8)
    return np.ndarray(shape, dtype, room.data, begin + first, strides)


def bits(results: dict[str, np.ndarray]) -> dict[str, bytes]:
    return {name: x.tobytes() for name, x in results.items()}


def way(choice: dict[str, Any], scalars: dict[str, Any]) -> str:
    """What else decides which kernels run beside the one that is chosen: parts of a sequence or of
    a sum, and what is asked for."""
    parts = [key for key in ("segments", "splits", "head_splits") if choice.get(key, 1) > 1]
    parts += [f"{key}_{value:d}" for key, value in scalars.items() if isinstance(value, bool)]
    return "".join(f"+{part}" for part in sorted(parts))


class Recorder:
    """A plugin of pytest that keeps the quickest call of each kernel in each way to call it."""

    def __init__(self) -> None:
        from thunderkittens import emulation

        module = emulation._module
        if module is None:
            raise SystemExit(f"seeds.py: {emulation.problem}")
        self.run = module.run
        setattr(module, "run", self.record)  # noqa: B010
        self.seconds = {path.stem: load(path)["seconds"] for path in calls()}

    def record(self, op: str, arrays: dict, scalars: dict | None = None, **options: Any) -> Any:
        before = {name: packed(x) for name, x in arrays.items()}
        started = time.process_time()
        results, choice = self.run(op, arrays, scalars or {}, **options)
        seconds = time.process_time() - started
        name = f"{op}.{choice.get('kernel', 'all')}{way(choice, scalars or {})}"
        checked = options.get("check_order", True) and options.get("host_threads", 1) == 1
        if checked and seconds < self.seconds.get(name, 1e9):
            self.seconds[name] = seconds
            call = {"op": op, "arrays": before, "scalars": scalars or {}, "seconds": seconds}
            call |= {key: options.get(key, {}) for key in ("config", "device")}
            path = WORK / "calls" / f"{name}.pickle"
            path.write_bytes(pickle.dumps(call | {"results": bits(results)}))
        return results, choice

    def pytest_collection_modifyitems(self, items: list) -> None:
        back_ends = re.compile(r"\[(cpu|cuda)(?=[-\]])")
        items[:] = [item for item in items if not back_ends.search(item.nodeid)]


def calls() -> list[Path]:
    return sorted((WORK / "calls").glob("*.pickle"))


def load(path: Path) -> dict[str, Any]:
    return pickle.loads(path.read_bytes())


def record(args: argparse.Namespace) -> int:
    import pytest

    from mutate import emulated_files

    files = [str(Path(f).resolve()) for f in args.tests] or emulated_files()
    os.chdir(ROOT)
    options = ["--intensity", "1", "-q", "-p", "no:cacheprovider", "-p", "no:randomly"]
    return int(pytest.main([*options, *files], plugins=[Recorder()]))


# ---- runs ----


def results() -> dict[str, dict[str, Any]]:
    path = WORK / "results.json"
    return json.loads(path.read_text()) if path.is_file() else {}


def try_call(name: str, call: dict[str, Any], seeds: int, until: float) -> dict[str, Any]:
    """Runs a call under all policies; the first that goes wrong ends it."""
    from thunderkittens import emulation

    module = emulation._module
    assert module is not None
    done, started = 0, time.process_time()
    for seed in range(seeds):
        for policy in emulation.POLICIES:
            if time.monotonic() > until:
                return {"runs": done, "seconds": time.process_time() - started}
            where = f"{name}, {policy}, seed {seed}"
            arrays = {key: unpacked(kept) for key, kept in call["arrays"].items()}
            options = {"config": call["config"], "device": call["device"]}
            try:
                found, _ = module.run(
                    call["op"], arrays, call["scalars"], **options, policy=policy, seed=seed
                )
            except RuntimeError as error:
                return {"runs": done, "problem": f"{where}: {error}"}
            other = [key for key, value in bits(found).items() if value != call["results"][key]]
            if other and not IN_ANY_ORDER.match(call["op"]):
                return {"runs": done, "problem": f"{where}: other bits in {', '.join(other)}"}
            done += 1
    return {"runs": done, "seconds": time.process_time() - started}


def run(args: argparse.Namespace) -> int:
    WORK.mkdir(parents=True, exist_ok=True)
    chosen = [(load(path), path.stem) for path in calls() if re.search(args.only, path.stem)]
    chosen.sort(key=lambda entry: entry[0]["seconds"])
    until = time.monotonic() + 60 * args.minutes
    wanted = args.seeds * 4
    for call, name in chosen:
        known = results().get(name, {})
        if not args.again and (known.get("runs", 0) >= wanted or "problem" in known):
            continue
        if time.monotonic() > until:
            break
        found = try_call(name, call, args.seeds, until)
        (WORK / "results.json").write_text(json.dumps(results() | {name: found}, indent=1))
        print(f"{found['runs']:4} {found.get('problem', name)}", flush=True)
    return show(args)


def show(args: argparse.Namespace) -> int:
    from thunderkittens import _C

    found = {k: v for k, v in results().items() if re.search(args.only, k)}
    recorded = {path.stem.partition("+")[0] for path in calls()}
    missing = [
        name
        for name in (f"{kernel['op']}.{kernel['name']}" for kernel in _C.kernels())
        if name not in recorded and re.search(args.only, name)
    ]
    for name in missing:
        print(f"no call: {name}")
    for entry in found.values():
        if "problem" in entry:
            print(entry["problem"])
    problems = sum("problem" in entry for entry in found.values())
    runs = sum(entry["runs"] for entry in found.values())
    print(f"{runs} runs of {len(found)} of {len(calls())} recorded calls: {problems} problems")
    return int(problems > 0)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    commands = parser.add_subparsers(required=True)
    command = commands.add_parser("record")
    command.set_defaults(function=record)
    command.add_argument("tests", nargs="*", help="files; those on the emulator if none")
    for name, function in (("run", run), ("list", show)):
        command = commands.add_parser(name)
        command.set_defaults(function=function)
        command.add_argument("--only", default="", help="a regular expression for op.kernel")
        if name == "run":
            command.add_argument("--seeds", type=int, default=20)
            command.add_argument("--again", action="store_true", help="also those with a result")
            command.add_argument("--minutes", type=float, default=1e9, help="for all")
    args = parser.parse_args()
    (WORK / "calls").mkdir(parents=True, exist_ok=True)
    return args.function(args)


if __name__ == "__main__":
    sys.exit(main())
