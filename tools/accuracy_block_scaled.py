"""Accuracy of `tk.mxfp8_gemm` per format, path and distribution, as the table of docs/numerics.md.

For each, two signal-to-noise ratios in dB: of the result against the product, in float64, of the
operands before they were quantised, and of those that the quantised ones stand for, which is what
the op itself adds. And the share of the tiles of 128 rows that the re-based path leaves to the
exact one.

    python tools/accuracy_block_scaled.py            # on the GPU, if there is one
    python tools/accuracy_block_scaled.py --emulate  # the kernels on the CPU, small matrices
"""

from __future__ import annotations

import argparse
import contextlib

import torch
from torch import Tensor

import thunderkittens as tk

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
FORMATS = {
    "e4m3, rceil": ({"dtype": E4M3}, {"dtype": E4M3}),
    "e4m3, floor": ({"dtype": E4M3, "rule": "floor"}, {"dtype": E4M3, "rule": "floor"}),
    "e5m2 x e4m3": ({"dtype": E5M2}, {"dtype": E4M3}),
    "e5m2": ({"dtype": E5M2}, {"dtype": E5M2}),
}
PATHS = ("exact", "rebased")


def distributions(rows: int, columns: int, device: str) -> dict[str, Tensor]:
    """Matrices as in the table of the quantisers."""

    def normal() -> Tensor:
        return torch.randn(rows, columns, device=device)

    rare = torch.rand(rows, columns, device=device) < 1 / 256
    chi = (normal().square() + normal().square()) / 2
    return {
        "normal": normal(),
        "outliers": normal() * torch.where(rare, 100.0, 1.0),
        "Student t, 2": normal() / chi.sqrt(),
        "rows": normal() * torch.exp(2 * torch.randn(rows, 1, device=device)),
        "columns": normal() * torch.exp(2 * torch.randn(1, columns, device=device)),
    }


def decibels(actual: Tensor, expected: Tensor) -> float:
    error = (actual.double() - expected).norm()
    return float(20 * torch.log10(expected.norm() / error))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--emulate", action="store_true", help="the kernels on the CPU")
    parser.add_argument("--size", type=int, nargs=3, metavar=("M", "N", "K"))
    args = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() and not args.emulate else "cpu"
    m, n, k = args.size or ((1024, 1024, 4096) if device == "cuda" else (128, 128, 1024))
    torch.manual_seed(0)
    sources = distributions(m, k, device)
    w = (torch.randn(n, k, device=device) / k**0.5).to(torch.bfloat16)
    print(f"{m} x {n} x {k}, {device}; dB to the operands before / after they were quantised")
    print("| | path | " + " | ".join(sources) + " |")
    print("|---" * (len(sources) + 2) + "|")
    for name, (options_a, options_b) in FORMATS.items():
        for path in PATHS:
            cells = []
            for x in sources.values():
                x = x.to(torch.bfloat16)
                a, scale_a = tk.mxfp8_quantize(x, **options_a)
                b, scale_b = tk.mxfp8_quantize(w, **options_b)
                with tk.emulate() if args.emulate else contextlib.nullcontext():
                    out = tk.mxfp8_gemm(
                        a, b.t(), scale_a, scale_b, path=path, out_dtype=torch.float32
                    )
                    marks = tk.mxfp8_prepare(a, scale_a).marks
                given = tk.reference.mxfp8_gemm(a, b.t(), scale_a, scale_b, out_dtype=torch.float64)
                before = decibels(out, x.double() @ w.double().t())
                cell = f"{before:.1f} / {decibels(out, given):.0f}"
                share = float((marks != 0).any(-1).double().mean())
                if path == "rebased" and share > 0:
                    cell += f", {share:.0%} exact"
                cells.append(cell)
            print(f"| {name} | {path} | " + " | ".join(cells) + " |", flush=True)


if __name__ == "__main__":
    main()
