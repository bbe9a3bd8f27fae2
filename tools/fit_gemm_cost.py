"""The learned part of the dense GEMM's model of cost, from timings of choices.

    python tools/fit_gemm_cost.py time samples.jsonl --seed 1 --shapes 1500   # on an H200
    python tools/fit_gemm_cost.py fit samples.jsonl [...]                     # where torch is

`time` draws products, as `bench gemm --shapes drawn` does, and runs of each the choice, the choices
that the model expects to be the shortest, and others at random, because a fit to those that looked
good alone takes what was never timed. A CUDA graph calls the op on rotating operands, larger
together than the L2 cache; graphs are replayed in random order, and a time is a median. A line of
the file is a product: its problem, the epilogue, and choices with microseconds.

`fit` writes csrc/gemm/dense/learned_cost_weights.h: a perceptron of two hidden layers, whose inputs
csrc/gemm/dense/learned_cost.h computes, and whose result is the binary logarithm of a choice's time
over that of the model. The loss weighs a choice by the square of the best time over its own. Before
that it fits to two thirds of the products, and prints how near the choice comes to the best of the
others.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import math
import random
import textwrap
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn

import thunderkittens as tk
from thunderkittens import _load
from thunderkittens.bench import forced
from thunderkittens.bench.cases import Case
from thunderkittens.bench.drawn import Draw
from thunderkittens.bench.stream import copies_for
from thunderkittens.bench.suites import gemm as suite
from thunderkittens.info import EXAMPLE_GPU

ROOT = Path(__file__).resolve().parents[1]
WEIGHTS = ROOT / "csrc/gemm/dense/learned_cost_weights.h"
HIDDEN = (32, 16)
CYCLES_PER_US = 1755  # of the clock that the model's constants are of
LIKELY, RANDOM, ROUNDS = 12, 12, 5  # choices of a product; replays of each
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


def captured(calls: Sequence[Callable[[], Any]], count: int) -> torch.cuda.CUDAGraph:
    graph = torch.cuda.CUDAGraph()
    kept: list[Any] = [None] * len(calls)
    with torch.cuda.graph(graph):
        for index in range(count):
            kept[index % len(calls)] = calls[index % len(calls)]()
    return graph


def timed(case: Case, choices: Sequence[dict[str, Any]], rng: random.Random) -> list[float]:
    """Microseconds of each; NaN for one that fails, or whose result is not that of the first."""
    device = torch.device("cuda")
    cache = torch.cuda.get_device_properties(device).L2_cache_size
    copies = copies_for(case.bytes, cache, case.bytes, 3e9)
    generator = torch.Generator(device).manual_seed(0)
    calls = [partial(tk.gemm, **case.make_inputs(device, generator)) for _ in range(copies)]
    least_us = max(2.0, case.flops / 7e8, case.bytes / 4.2e6)
    count = copies * max(1, math.ceil(240 / (least_us * copies)))
    graphs: dict[int, torch.cuda.CUDAGraph] = {}
    reference: Tensor | None = None
    force = forced.library_function()
    for index, choice in enumerate(choices):
        with forced.forced(force, "gemm", forced.text_of(choice)):
            result = calls[0]().float()
            reference = result if reference is None else reference
            if (result - reference).norm() <= 0.02 * reference.norm():
                graphs[index] = captured(calls, count)
    order = [index for index in graphs for _ in range(ROUNDS)]
    rng.shuffle(order)
    marks: dict[int, list[tuple[torch.cuda.Event, torch.cuda.Event]]] = {i: [] for i in graphs}
    for index in [*graphs, *order]:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graphs[index].replay()
        end.record()
        marks[index].append((start, end))
    torch.cuda.synchronize()
    result_us = [math.nan] * len(choices)
    for index, (_, *events) in marks.items():
        result_us[index] = float(np.median([s.elapsed_time(e) for s, e in events])) * 1e3 / count
    return result_us


def time_choices(path: Path, seed: int, shapes: int) -> None:
    rng = random.Random(seed)
    with path.open("w") as file:
        for case in drawn(seed, shapes):
            problem = dict(case.parameters["problem"])
            choices = selected(problem, rng)
            samples = [
                [{key: x for key, x in choice.items() if key not in NOT_A_FIELD}, us]
                for choice, us in zip(choices, timed(case, choices, rng), strict=True)
                if us == us
            ]
            file.write(json.dumps({"problem": problem, "samples": samples}) + "\n")
            print(case.name, len(samples), f"{samples[0][1]:.2f} us", flush=True)
            gc.collect()


# The fit.


class Perceptron(nn.Module):
    """Inputs within the range of those that it was fitted to, one result."""

    def __init__(self, least: Tensor, most: Tensor, mean: Tensor, deviation: Tensor) -> None:
        super().__init__()
        self.least, self.most, self.mean, self.deviation = least, most, mean, deviation
        sizes = (len(mean), *HIDDEN, 1)
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


HEADER = """\
// Written by tools/fit_gemm_cost.py: fitted to {samples} timings of choices of {products} products.
// clang-format off
#pragma once

#include <array>

namespace thunderkittens::gemm {{

constexpr int COST_INPUTS = {inputs}, COST_HIDDEN_1 = {hidden[0]}, COST_HIDDEN_2 = {hidden[1]};
struct LearnedCost {{
    // The range of the inputs that the weights are fitted to.
    std::array<float, COST_INPUTS> least, most;
    std::array<std::array<float, COST_HIDDEN_1>, COST_INPUTS> weight_1;
    std::array<float, COST_HIDDEN_1> bias_1;
    std::array<std::array<float, COST_HIDDEN_2>, COST_HIDDEN_1> weight_2;
    std::array<float, COST_HIDDEN_2> bias_2;
    std::array<float, COST_HIDDEN_2> weight_3;
    float bias_3;
}};
constexpr LearnedCost LEARNED_COST = {{
{values}
}};

}}  // namespace thunderkittens::gemm
"""


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
    output.write_text(HEADER.format(
        products=products, samples=samples, inputs=len(model.mean), hidden=HIDDEN,
        values="\n".join(fields)))  # fmt: skip


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
        time_choices(options.path, options.seed, options.shapes)
    else:
        fit(options.paths, options.epochs, options.output)


if __name__ == "__main__":
    main()
