"""Runs the steps of the ladder on the emulator, and then, where there is a GPU, on it.

    python examples/gemm/run.py                       all steps: right, and how fast
    python examples/gemm/run.py 3 8                   two of them
    python examples/gemm/run.py --build-only folder   only builds the GPU's library
    python examples/gemm/run.py --prebuilt folder     runs that one; needs torch alone
    python examples/gemm/run.py --save                also writes the figures to a file
    python examples/gemm/run.py --table               puts the file's figures into README.md

All steps are one library, built of a source that includes them: once by the C++ compiler for the
emulator, and once by nvcc. Times are those of CUDA events around calls back to back. The steps and
torch.matmul take turns in random order, on the same random normal inputs.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.util
import json
import os
import random
import re
import shutil
import statistics
import subprocess
import sysconfig
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
README = HERE / "README.md"
RESULTS = ROOT / "benchmarks" / "results" / "h200" / "examples_gemm.json"
MARKS = ("<!-- figures: run.py --table -->\n", "<!-- end of figures -->\n")

STEPS = {int(path.name[:2]): path for path in sorted(HERE.glob("[0-9][0-9]_*.cu"))}
SHAPES = ((64, 128, 64), (200, 520, 328), (257, 264, 72))  # small, and with ragged edges
SIZES = (4096, 8192)
PEER = "torch.matmul"
ROUNDS, SECONDS_EACH = 15, 0.02
MODULE = "gemm_steps"
LIBRARY = f"{MODULE}.so"


# ---- building ----


def write_source(steps: Sequence[int], folder: Path) -> Path:
    """One source of several steps, a module of Python with a function for each."""
    source = folder / "gemm_steps.cu"
    lines = [f'#include "{STEPS[step]}"' for step in steps]
    lines += ["KITTENS_PYTHON_MODULE(TORCH_EXTENSION_NAME, m) {"]
    lines += [f'    add_step(m, "step_{step:02}", step_{step:02}::run);' for step in steps]
    source.write_text("\n".join([*lines, "}\n"]))
    return source


def build_for_emulator(steps: Sequence[int], folder: Path) -> ModuleType:
    from thunderkittens import emulation

    return emulation.load(MODULE, write_source(steps, folder))


def find_nvcc() -> str | None:
    nvcc = shutil.which("nvcc") or "/usr/local/cuda/bin/nvcc"
    return nvcc if Path(nvcc).exists() else None


def build_for_gpu(steps: Sequence[int], folder: Path, nvcc: str) -> Path:
    library = folder / LIBRARY
    source = write_source(steps, folder)
    command = [nvcc, "-std=c++20", "-O3", "--expt-relaxed-constexpr", "-Xptxas=-v"]
    command += ["-gencode=arch=compute_90a,code=sm_90a", "-shared", "-Xcompiler=-fPIC"]
    # The limited API: the library serves every Python from 3.10 on.
    command += [f"-DTORCH_EXTENSION_NAME={MODULE}", "-DPy_LIMITED_API=0x030a0000"]
    command += [f"-I{ROOT}", f"-I{sysconfig.get_path('include')}", str(source), "-o", str(library)]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode != 0:
        raise RuntimeError(f"nvcc failed:\n{result.stderr}")
    if re.search(r"[1-9]\d* bytes spill|serialized", result.stderr):
        raise RuntimeError(f"a kernel spills, or ptxas serialised its products:\n{result.stderr}")
    return library


# ---- calling ----


class Ladder:
    """The steps of a built module, as functions of tensors."""

    def __init__(self, module: ModuleType) -> None:
        self.module = module

    @classmethod
    def from_library(cls, library: Path) -> Ladder:
        spec = importlib.util.spec_from_file_location(MODULE, library.resolve())
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return cls(module)

    def run(
        self,
        step: int,
        a: torch.Tensor,
        b: torch.Tensor,
        c: torch.Tensor,
        multiprocessors: int | None = None,
    ) -> None:
        """c = a b^T. `multiprocessors`: those of the GPU, unless told otherwise.

        Raises:
            TypeError, ValueError: a step does not take such tensors.
        """
        if multiprocessors is None:
            multiprocessors = torch.cuda.get_device_properties(a.device).multi_processor_count
        getattr(self.module, f"step_{step:02}")(a, b, c, multiprocessors=multiprocessors)


def check(ladder: Ladder, step: int, shape: tuple[int, int, int], device: str) -> None:
    """On small integers, whose sums are exact: every element is that of the rounded product, and
    nothing around the output is written."""
    m, n, k = shape
    generator = torch.Generator().manual_seed(m + n + k)
    a, b = (
        torch.randint(-2, 3, (rows, k), generator=generator).to(device, torch.bfloat16)
        for rows in (m, n)
    )
    guard = 64
    memory = torch.full((m * n + 2 * guard,), float("nan"), dtype=torch.bfloat16, device=device)
    c = memory[guard:-guard].view(m, n)
    ladder.run(step, a, b, c, None if device == "cuda" else 2)
    exact = torch.matmul(a.double(), b.double().t()).to(torch.bfloat16)
    if not torch.equal(c, exact):
        wrong = int((c != exact).sum())
        raise AssertionError(f"step {step}, {m} x {n} x {k}: {wrong} elements are wrong")
    if not (memory[:guard].isnan().all() and memory[-guard:].isnan().all()):
        raise AssertionError(f"step {step}, {m} x {n} x {k}: it wrote outside of the output")


# ---- timing ----


def seconds_of(call: Callable[[], Any], calls: int) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(calls):
        call()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1000 / calls


def measure(calls: dict[str, Callable[[], Any]]) -> dict[str, list[float]]:
    """Seconds a call, of each round. In a round all take their turn, in random order."""
    draw = random.Random(0)
    counts = {}
    for name, call in calls.items():
        seconds_of(call, 2)
        counts[name] = max(2, round(SECONDS_EACH / seconds_of(call, 2)))
    samples: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(ROUNDS):
        for name in draw.sample(sorted(calls), len(calls)):
            seconds_of(calls[name], 1)
            samples[name].append(seconds_of(calls[name], counts[name]))
    return samples


def time_size(ladder: Ladder, steps: Sequence[int], size: int) -> dict[str, Any]:
    """A case of the result file."""
    torch.manual_seed(0)
    a, b, c = (torch.randn(size, size, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    calls: dict[str, Callable[[], Any]] = {
        STEPS[step].stem: lambda step=step: ladder.run(step, a, b, c) for step in steps
    }
    calls[PEER] = lambda: torch.matmul(a, b.t(), out=c)
    flops = 2 * size**3
    results = {}
    for name, seconds in measure(calls).items():
        results[name] = {
            "time_us": {
                "median": statistics.median(seconds) * 1e6,
                "minimum": min(seconds) * 1e6,
                "maximum": max(seconds) * 1e6,
                "repetitions": len(seconds),
            },
            "tflops": flops / statistics.median(seconds) / 1e12,
        }
    return {
        "name": f"{size} x {size} x {size}",
        "parameters": {"m": size, "n": size, "k": size, "dtype": "bfloat16", "layout": "NT"},
        "flops": flops,
        "results": results,
    }


def measure_all(ladder: Ladder, steps: Sequence[int]) -> dict[str, Any]:
    """The content of the result file."""
    device = torch.cuda.get_device_properties(0)
    return {
        "schema": 1,
        "op": "examples_gemm",
        "machine": {
            "device": device.name,
            "compute_capability": f"{device.major}.{device.minor}",
            "multiprocessors": device.multi_processor_count,
            "torch": torch.__version__,
            "cuda": torch.version.cuda,
            "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        },
        "settings": {"rounds": ROUNDS, "seconds": SECONDS_EACH, "timer": "CUDA events"},
        "cases": [time_size(ladder, steps, size) for size in SIZES],
    }


# ---- figures ----


def table(document: dict[str, Any]) -> str:
    """TFLOP/s of each step, and its share of torch.matmul's."""
    cases = document["cases"]
    names = [name for name in cases[0]["results"] if name != PEER]
    sizes = [str(case["parameters"]["m"]) for case in cases]
    heads = [text for size in sizes for text in (f"{size}^3, TFLOP/s", f"of {PEER}'s")]
    lines = ["| step | " + " | ".join(heads) + " |", "|---|" + "---:|" * len(heads)]
    for name in [*names, PEER]:
        cells = []
        for case in cases:
            rate, peer = case["results"][name]["tflops"], case["results"][PEER]["tflops"]
            cells += [f"{rate:.0f}", f"{rate / peer:.0%}"]
        shown = name if name == PEER else f"[{name}]({name}.cu)"
        lines.append(f"| {shown} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def with_figures(text: str) -> str:
    """README.md with the table of the result file, or with none where there is no file."""
    before, rest = text.split(MARKS[0])
    after = rest.split(MARKS[1])[1]
    figures = ""
    if RESULTS.exists():
        document = json.loads(RESULTS.read_text())
        figures = f"\n{table(document)}\n"
    return before + MARKS[0] + figures + MARKS[1] + after


# ---- the command ----


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("steps", nargs="*", type=int, help=f"of {min(STEPS)} to {max(STEPS)}; all")
    parser.add_argument("--build-only", type=Path, metavar="DIR")
    parser.add_argument("--prebuilt", type=Path, metavar="DIR")
    parser.add_argument("--save", action="store_true", help=f"write {RESULTS.relative_to(ROOT)}")
    parser.add_argument("--table", action="store_true", help="update README.md, run nothing")
    args = parser.parse_args()
    args.steps = args.steps or list(STEPS)
    if wrong := sorted(set(args.steps) - set(STEPS)):
        parser.error(f"there is no step {wrong[0]}; there are {min(STEPS)} to {max(STEPS)}")
    if args.save and args.steps != list(STEPS):
        parser.error("--save is for all steps")
    return args


def run_on_emulator(steps: Sequence[int], folder: Path) -> None:
    from thunderkittens import emulation

    ladder = Ladder(build_for_emulator(steps, folder))
    for policy in emulation.POLICIES:
        os.environ["KITTENS_POLICY"] = policy
        for step in steps:
            for shape in SHAPES:
                check(ladder, step, shape, "cpu")
        print(f"emulator, {policy}: right")


def run_on_gpu(ladder: Ladder, steps: Sequence[int], save: bool) -> None:
    if save and "H200" not in torch.cuda.get_device_name():
        raise SystemExit(f"--save is for an H200; this is a {torch.cuda.get_device_name()}")
    for step in steps:
        for shape in (*SHAPES, (2048, 4096, 1024)):
            check(ladder, step, shape, "cuda")
    print(f"{torch.cuda.get_device_name()}: right")
    document = measure_all(ladder, steps)
    print(table(document), end="")
    if save:
        RESULTS.write_text(json.dumps(document, indent=1) + "\n")
        print(f"written: {RESULTS.relative_to(ROOT)}")


def main() -> None:
    args = arguments()
    if args.table:
        README.write_text(with_figures(README.read_text()))
        return
    nvcc = find_nvcc()
    if args.build_only:
        if nvcc is None:
            raise SystemExit("no nvcc: it is not on the path and not in /usr/local/cuda/bin")
        args.build_only.mkdir(parents=True, exist_ok=True)
        print(build_for_gpu(args.steps, args.build_only, nvcc))
        return
    if args.prebuilt:
        return run_on_gpu(Ladder.from_library(args.prebuilt / LIBRARY), args.steps, args.save)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        run_on_emulator(args.steps, folder)
        if not torch.cuda.is_available() or nvcc is None:
            print("no GPU or no nvcc: that is all here")
            return
        ladder = Ladder.from_library(build_for_gpu(args.steps, folder, nvcc))
        run_on_gpu(ladder, args.steps, args.save)


if __name__ == "__main__":
    main()
