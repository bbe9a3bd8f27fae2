"""The learned part of the dense GEMM's model of cost, from timings of choices.

    python tools/fit_gemm_cost.py time samples.jsonl --seed 1 --shapes 1500   # on an H200
    python tools/fit_gemm_cost.py fit samples.jsonl [...]                     # where torch is

`time` draws products, as `bench gemm --shapes drawn` does, and runs of each the choice, the choices
that the model expects to be the shortest, and others at random, because a fit to those that looked
good alone takes what was never timed. They are checked and timed as the bench does by its protocol
`stream`. A line of the file is a product: its problem, choices with microseconds, and, if it is to
count for more than one, its `weight`.

`fit` writes csrc/gemm/dense/learned_cost_weights.h: a perceptron of two hidden layers, whose inputs
csrc/gemm/dense/learned_cost.h computes, and whose result is the binary logarithm of a choice's time
over that of the model. The loss weighs a choice by the square of the best time over its own. Before
that it fits to two thirds of the products, and prints how near the choice comes to the best of the
others.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import random
import re
import textwrap
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn

import thunderkittens as tk
from thunderkittens import _load
from thunderkittens.bench import compare, forced
from thunderkittens.bench.cases import Case
from thunderkittens.bench.drawn import Draw
from thunderkittens.bench.regret import medians
from thunderkittens.bench.stream import STREAM, make_timer
from thunderkittens.bench.suites import gemm as suite
from thunderkittens.info import EXAMPLE_GPU

ROOT = Path(__file__).resolve().parents[1]
WEIGHTS = ROOT / "csrc/gemm/dense/learned_cost_weights.h"
VALUES = "constexpr LearnedCost LEARNED_COST = {\n"
#: The header above the values, but for its first line, and the layers that it declares.
DECLARED = WEIGHTS.read_text().partition(VALUES)[0].split("\n", 1)[1]
INPUTS, *HIDDEN = (int(x) for x in re.findall(r"COST_[A-Z0-9_]+ = (\d+)", DECLARED))
CYCLES_PER_US = 1755  # of the clock that the model's constants are of
LIKELY, RANDOM = 12, 12  # choices of a product
ROUNDS, SECONDS = 5, 0.02  # of each
NOT_A_FIELD = ("kernel", "dtype", "a_m_major", "b_n_major")


def inputs(problem: dict[str, Any], choices: Iterable[dict[str, Any]]) -> np.ndarray:
    """(choices, inputs), the first of which is the logarithm of the model's cycles."""
    module = _load.compiled_module()
    device = module.DeviceProperties(**EXAMPLE_GPU)
    fields = [{k: v for k, v in c.items() if k not in NOT_A_FIELD} for c in choices]
    return np.array([module.cost_inputs("gemm", problem, f, device) for f in fields], np.float32)


# Timing.


def drawn(seed: int, count: int) -> Iterable[Case]:
    """Products of all forms that the suite draws: six of ten in multiples of 8."""
    forms = [("aligned", "plain")] * 6 + [("any", "plain")] * 2 + [("aligned", "fused")] * 2
    for index in range(count):
        kind, form = forms[index % len(forms)]
        yield suite.drawn(Draw("gemm", seed, kind, index, (form,)))


def selected(problem: dict[str, Any], rng: random.Random) -> list[dict[str, Any]]:
    """The choice, those that are expected to be the shortest, and some at random."""
    chosen, *others = forced.candidates("gemm", problem, forced.gpu_record())
    expected = inputs(problem, others)[:, 0] if others else np.zeros(0)
    order = [int(i) for i in np.argsort(expected)]
    near = [i for i in order if expected[i] < expected.min() + 1]
    rest = near[LIKELY:]
    picked = near[:LIKELY] + rng.sample(rest, min(RANDOM, len(rest)))
    return [chosen, *(others[i] for i in picked)]


def time_choices(path: Path, seed: int, shapes: int, device: torch.device) -> None:
    rng, timer, force = random.Random(seed), make_timer(device, STREAM), forced.library_function()
    with path.open("w") as file:
        for case in drawn(seed, shapes):
            problem = dict(case.parameters["problem"])
            choices = dict(zip(forced.labels(found := selected(problem, rng)), found, strict=True))
            variants = {
                name: forced.forcing(tk.gemm, "gemm", fields, force)
                for name, fields in choices.items()
            }
            (measured,) = compare(
                [case], variants, timer=timer, repetitions=ROUNDS, seconds=SECONDS, seed=seed
            )
            samples = [
                [{key: x for key, x in choices[name].items() if key not in NOT_A_FIELD}, us]
                for name, us in medians(measured).items()
            ]
            file.write(json.dumps({"problem": problem, "samples": samples}) + "\n")
            print(case.name, len(samples), flush=True)


# The fit.


class Perceptron(nn.Module):
    """Inputs within the range of those that it was fitted to, one result."""

    def __init__(self, least: Tensor, most: Tensor, mean: Tensor, deviation: Tensor) -> None:
        super().__init__()
        self.least, self.most, self.mean, self.deviation = least, most, mean, deviation
        sizes = (INPUTS, *HIDDEN, 1)
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in itertools.pairwise(sizes))

    def forward(self, x: Tensor) -> Tensor:
        x = (x.clamp(self.least, self.most) - self.mean) / self.deviation
        *hidden, last = self.layers
        for layer in hidden:
            x = layer(x).relu()
        return last(x).squeeze(1)


def fitted(x: Tensor, y: Tensor, weight: Tensor, epochs: int) -> Perceptron:
    torch.manual_seed(0)
    deviation = x.std(0)
    deviation[deviation < 1e-4] = math.inf  # the same in all samples
    model = Perceptron(x.amin(0), x.amax(0), x.mean(0), deviation)
    batch = 512
    optimizer = torch.optim.AdamW(model.parameters(), weight_decay=1e-3)
    steps = epochs * math.ceil(len(y) / batch)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 6e-3, total_steps=steps)
    for _ in range(epochs):
        for part in torch.randperm(len(y)).split(batch):
            loss = nn.functional.smooth_l1_loss(model(x[part]), y[part], reduction="none", beta=0.2)
            optimizer.zero_grad()
            (loss * weight[part]).mean().backward()
            optimizer.step()
            schedule.step()
    return model


def regret(time_us: Tensor, expected: Tensor, product: Tensor) -> Tensor:
    """Of each product the best time over that of the choice whose expected time is the least."""
    result = []
    for index in product.unique():
        mine = product == index
        result.append(time_us[mine].min() / time_us[mine][expected[mine].argmin()])
    return torch.stack(result)


def fit(paths: Sequence[Path], epochs: int, output: Path) -> None:
    lines = [json.loads(line) for path in paths for line in path.open()]
    rows, times, products, weights = [], [], [], []
    for index, line in enumerate(lines):
        us = torch.tensor([us for _, us in line["samples"]])
        rows.append(torch.from_numpy(inputs(line["problem"], [c for c, _ in line["samples"]])))
        times.append(us)
        weights.append((us.min() / us) ** 2 * line.get("weight", 1))
        products.append(torch.full_like(us, index, dtype=torch.int64))
    x, time_us, product, weight = map(torch.cat, (rows, times, products, weights))
    y = (time_us * CYCLES_PER_US).log2() - x[:, 0]
    held_out = product % 3 == 0
    model = fitted(x[~held_out], y[~held_out], weight[~held_out], epochs)
    with torch.no_grad():
        learned = x[:, 0] + model(x)
    for name, expected in (("by the model of cost.h", x[:, 0]), ("with what is learned", learned)):
        found = regret(time_us[held_out], expected[held_out], product[held_out])
        print(f"{name}: the best time is {mean(found):.4f} of the choice's, at least", end=" ")
        print(f"{float(found.min()):.3f}, of {len(found)} products that are held out", flush=True)
    write(fitted(x, y, weight, epochs), len(lines), len(y), output)


def mean(ratios: Tensor) -> float:
    return float(ratios.log().mean().exp())


def literal(x: float) -> str:
    text = f"{x:.5g}"
    return text + ("f" if "." in text or "e" in text else ".0f")


def write(model: Perceptron, products: int, samples: int, output: Path) -> None:
    """The header, with mean and deviation in the weights of the first layer."""
    first, second, last = (cast(nn.Linear, layer) for layer in model.layers)
    weight_1 = first.weight / model.deviation
    values = {
        "least": model.least, "most": model.most, "weight_1": weight_1.T,
        "bias_1": first.bias - weight_1 @ model.mean, "weight_2": second.weight.T,
        "bias_2": second.bias, "weight_3": last.weight[0], "bias_3": last.bias,
    }  # fmt: skip
    fields = []
    for name, value in values.items():
        text = ", ".join(literal(x) for x in value.flatten().tolist())
        fields.append(textwrap.fill(f".{name} = {{{text}}},", 96, initial_indent="    ",
                                    subsequent_indent="        "))  # fmt: skip
    counts = f"{samples} timings of choices of {products} products"
    first_line = f"// Written by tools/fit_gemm_cost.py: fitted to {counts}.\n"
    end = "\n};\n\n}  // namespace thunderkittens::gemm\n"
    output.write_text(first_line + DECLARED + VALUES + "\n".join(fields) + end)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    timing = commands.add_parser("time", help="times choices of drawn products on this GPU")
    timing.add_argument("path", type=Path)
    timing.add_argument("--seed", type=int, default=0)
    timing.add_argument("--shapes", type=int, default=1500)
    fitting = commands.add_parser("fit", help="fits to such timings, and writes the weights")
    fitting.add_argument("paths", type=Path, nargs="+")
    fitting.add_argument("--epochs", type=int, default=80)
    fitting.add_argument("--output", type=Path, default=WEIGHTS)
    options = parser.parse_args()
    if options.command == "time":
        time_choices(options.path, options.seed, options.shapes, torch.device("cuda"))
    else:
        fit(options.paths, options.epochs, options.output)


if __name__ == "__main__":
    main()
