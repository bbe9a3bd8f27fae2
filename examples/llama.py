"""A Llama-shaped model in plain PyTorch, and on this package's kernels: `python examples/llama.py`.

The model below knows nothing of this package. What is done to it, from the least change on:

  attention            `with tk.sdpa():` around what runs it
  attention and gemm   its linear layers call `tk.gemm`, the gated one with its activation in it
  fp8                  its linear layers are `tk.Fp8Linear`, for training in fp8

Parameters and `state_dict` stay as they are. Without options it trains a small model each way and
prints the losses. With `--measure` it times steps of training and of prefill, eager and compiled,
beside PyTorch:

  python examples/llama.py --measure --json llama.json
  python examples/llama.py --measure --stacks tiny --device cpu   # to try the tool

Two stacks are measured: `large`, two blocks of 4096 with 32 heads on 8 and 14336 hidden units, on
2 x 4096 tokens, and `small`, four blocks of 768 with 12 heads, on 8 x 512. Blocks are compiled one
by one (`nn.Module.compile`), so that those of a stack share their code. All ways take turns in the
same rounds; results are checked as docs/benchmarks.md says, but for fp8, which rounds.
"""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import thunderkittens as tk
from thunderkittens import bench
from thunderkittens.bench import machine, progress, steps
from thunderkittens.bench.timing import Within

# The model.


class GatedMlp(nn.Module):
    """down(silu(gate(x)) * up(x)), gate and up in one matrix."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.gate_up = nn.Linear(width, 2 * hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        return self.down(F.silu(gate) * up)


class Block(nn.Module):
    """Causal attention with rotary positions and fewer heads of keys, and a gated MLP."""

    def __init__(self, width: int, heads: int, kv_heads: int, hidden: int, length: int) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.dim = heads, kv_heads, width // heads
        cos, sin = angles(length, self.dim)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)
        self.norm_1, self.norm_2 = nn.RMSNorm(width), nn.RMSNorm(width)
        self.qkv = nn.Linear(width, (heads + 2 * kv_heads) * self.dim, bias=False)
        self.o = nn.Linear(width, width, bias=False)
        self.mlp = GatedMlp(width, hidden)

    def forward(self, x: Tensor) -> Tensor:
        qkv = self.qkv(self.norm_1(x)).unflatten(-1, (-1, self.dim)).transpose(1, 2)
        q, k, v = qkv.split((self.heads, self.kv_heads, self.kv_heads), dim=1)
        q, k = rotated(q, self.cos, self.sin), rotated(k, self.cos, self.sin)
        out = F.scaled_dot_product_attention(
            q, k, v, is_causal=True, enable_gqa=self.heads != self.kv_heads
        )
        x = x + self.o(out.transpose(1, 2).flatten(2))
        return x + self.mlp(self.norm_2(x))


def angles(length: int, dim: int, theta: float = 500000.0) -> tuple[Tensor, Tensor]:
    """Cosines and sines of the rotary angles, (length, dim / 2)."""
    places = torch.arange(dim // 2) / (dim // 2)
    turns = torch.outer(torch.arange(length).float(), theta**-places)
    return turns.cos(), turns.sin()


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary positions: of each of (B, H, S, D) the halves turned against each other."""
    a, b = x.chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)


@dataclass(frozen=True)
class Size:
    """Of a stack of blocks and its batch; `steps` of a call that is timed."""

    width: int
    layers: int
    heads: int
    kv_heads: int
    hidden: int
    batch: int
    length: int
    steps: int

    def flops(self, training: bool) -> float:
        """Of the products of a step; half of attention's for the causal mask."""
        tokens, kv_width = self.batch * self.length, self.width * self.kv_heads / self.heads
        linear = 2.0 * tokens * self.width * (2 * self.width + 2 * kv_width + 3 * self.hidden)
        attention = 2.0 * tokens * self.length * self.width
        return self.layers * (
            linear * (3 if training else 1) + attention * (3.5 if training else 1)
        )


SIZES = {
    "large": Size(4096, 2, 32, 8, 14336, 2, 4096, steps=2),
    "small": Size(768, 4, 12, 12, 2048, 8, 512, steps=8),
    "tiny": Size(64, 2, 4, 2, 96, 2, 24, steps=2),
}


def make_model(size: Size) -> nn.Sequential:
    sizes = size.width, size.heads, size.kv_heads, size.hidden, size.length
    return nn.Sequential(*(Block(*sizes) for _ in range(size.layers)), nn.RMSNorm(size.width))


# On this package's kernels.


class GemmLinear(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return tk.gemm(x, self.weight.t(), bias=self.bias)


class FusedMlp(GatedMlp):
    """The activation is part of the product that it follows."""

    def forward(self, x: Tensor) -> Tensor:
        return self.down(tk.gemm(x, self.gate_up.weight.t(), activation="swiglu"))


def on_gemm(model: nn.Module) -> None:
    """Linear layers and gated MLPs run on `tk.gemm`; their parameters are what they were."""
    for module in model.modules():
        if type(module) is nn.Linear:
            module.__class__ = GemmLinear
        elif type(module) is GatedMlp:
            module.__class__ = FusedMlp


def on_fp8(model: nn.Module, scaling: str = "row") -> None:
    """Linear layers become `tk.Fp8Linear` with the same parameters."""
    for module in list(model.modules()):
        for name, layer in list(module.named_children()):
            if type(layer) is nn.Linear:
                sizes = layer.in_features, layer.out_features
                fp8 = tk.Fp8Linear(*sizes, bias=False, device="meta", scaling=scaling)
                fp8.weight = layer.weight
                setattr(module, name, fp8)


Context = Callable[[], contextlib.AbstractContextManager[None]]
# What is done to the model, and around what runs it. PyTorch's own comes last.
ATTENTION, BOTH, FP8 = WAYS = ("attention", "attention and gemm", "attention and fp8")
CHANGES: dict[str, tuple[Callable[[nn.Module], None] | None, Context]] = {
    BOTH: (on_gemm, tk.sdpa),
    ATTENTION: (None, tk.sdpa),
    FP8: (on_fp8, tk.sdpa),
    steps.PEER: (None, contextlib.nullcontext),
}


# Steps to time.

TASKS, MODES = ("training", "prefill"), ("eager", "compiled")


def make_steps(
    way: str,
    size: Size,
    weights: dict[str, Tensor],
    x: Tensor,
    target: Tensor,
    task: str,
    mode: str = "eager",
) -> Callable[[], tuple[Tensor, ...]]:
    """A call that does `size.steps` steps of the model one way, in the dtype of x."""
    change, context = CHANGES[way]
    with x.device:
        model = make_model(size).to(x.dtype)
    model.load_state_dict(weights)
    if change is not None:
        change(model)
    if mode == "compiled":
        for block in model:
            block.compile(**steps.compiler(x.device))
    if task == "prefill":
        return Within(steps.prefill(model, x, count=size.steps), context)
    x = x.detach().requires_grad_()  # as behind an embedding: all blocks are alike
    with context():
        call = steps.training(model, model, x, target, count=size.steps, learning_rate=1e-4)
    return Within(call, context)


def oracle(task: str, mode: str, x: Tensor, size: Size, **inputs: Any) -> Iterator[bench.Expected]:
    """The results on PyTorch's own ops, in fp32 and in the dtype of x. The errors of a few losses
    are a matter of luck; they may differ by a rounding, and gradients say the rest."""
    exact, plain = (
        make_steps(steps.PEER, size=size, x=x.to(dtype), task=task, **inputs)()
        for dtype in (torch.float32, x.dtype)
    )
    for output, pair in enumerate(zip(exact, plain, strict=True)):
        losses = task == "training" and output == 0
        allowance = torch.finfo(x.dtype).eps / 2 if losses else 0.0
        yield bench.Expected(output, slice(None), *pair, allowance=allowance)


def make_case(stack: str, task: str, mode: str) -> bench.Case:
    size = SIZES[stack]

    def make_inputs(device: torch.device, generator: torch.Generator) -> dict[str, Any]:
        with torch.random.fork_rng(devices=()):
            torch.manual_seed(generator.initial_seed())
            weights = make_model(size).bfloat16().state_dict()
        normal = partial(
            bench.random_normal, size.batch, size.length, size.width, generator=generator
        )
        return {
            "size": size,
            "weights": {name: weight.to(device) for name, weight in weights.items()},
            "x": normal(dtype=torch.bfloat16),
            "target": normal(dtype=torch.float32),
            "task": task,
            "mode": mode,
        }

    return bench.Case(
        name=f"{stack}, {task}, {mode}",
        make_inputs=make_inputs,
        flops=size.flops(task == "training"),
        groups=(stack, f"{stack}, {task}"),
        parameters={"stack": stack, "task": task, "mode": mode, **asdict(size)},
        oracle=oracle,
    )


def measure(
    stack: str,
    device: torch.device,
    tasks: tuple[str, ...] = TASKS,
    modes: tuple[str, ...] = MODES,
    **limits: Any,
) -> list[bench.Measurement]:
    """The figures of a stack, one measurement for each task, mode and way; fp8 is not of the small
    one."""
    ways = [way for way in CHANGES if way != FP8 or stack != "small"]
    # fp8 rounds, so that the accuracy rule for bf16 is none for it.
    implementations: dict[str, bench.Implementation] = {
        way: bench.Prepared(partial(make_steps, way), another_problem=way == FP8) for way in ways
    }
    cases = [make_case(stack, task, mode) for task in tasks for mode in modes]
    found = []
    for case in progress.follow(cases, len(cases), lambda case: case.name):
        torch.compiler.reset()
        timer = bench.StepTimer(device, SIZES[stack].steps)
        found += bench.compare([case], implementations, timer=timer, **limits)
    return [one for m in found for one in steps.apart(m, [w for w in WAYS if w in ways])]


# The program.


def train_each_way(device: torch.device) -> None:
    """Losses of a small model, each way from the same weights."""
    size = SIZES["small" if device.type == "cuda" else "tiny"]
    torch.manual_seed(0)
    weights = {name: w.to(device) for name, w in make_model(size).bfloat16().state_dict().items()}
    shape = (size.batch, size.length, size.width)
    x, target = (torch.randn(shape, device=device) for _ in range(2))
    for way in reversed(CHANGES):
        train = make_steps(way, size, weights, x.bfloat16(), target, "training")
        losses = [float(loss) for _ in range(3) for loss in train()[0]]
        print(f"{way:20} loss {losses[0]:.4f} to {losses[-1]:.4f} in {len(losses)} steps")


def names(text: str, known: tuple[str, ...]) -> tuple[str, ...]:
    chosen = tuple(text.split(","))
    if set(chosen) - set(known):
        raise SystemExit(f"{text!r} is no part of {','.join(known)}")
    return chosen


def report(
    name: str,
    found: list[bench.Measurement],
    device: torch.device,
    limits: dict[str, Any],
    path: Path | None,
) -> None:
    """Prints the figures as a table, and writes them to a file if there is a path."""
    record = machine.record(device)
    print(bench.table(found, peak=record["peak_tflops"]))
    if path:
        settings = {**limits, **bench.StepTimer(device, 1).protocol(), "seed": 0}
        del settings["steps"]  # the cases have theirs
        bench.write_json(path, bench.document(name, found, machine=record, settings=settings))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add = parser.add_argument
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    add("--measure", action="store_true", help="time steps beside PyTorch")
    add("--stacks", default="large,small", help="large, small, tiny, with commas")
    add("--tasks", default=",".join(TASKS), help="with commas")
    add("--modes", default=",".join(MODES), help="with commas")
    add("--repetitions", type=int, default=20, help="calls of each way (default: 20)")
    add("--seconds", type=float, default=0.8, help="limit for each way and case (default: 0.8)")
    add("--json", type=Path, metavar="FILE", help="write the figures with the machine's record")
    args = parser.parse_args()
    device = torch.device(args.device)
    if not args.measure:
        train_each_way(device)
        return
    limits: dict[str, Any] = {"repetitions": args.repetitions, "seconds": args.seconds}
    chosen = names(args.tasks, TASKS), names(args.modes, MODES)
    found = [
        m
        for stack in names(args.stacks, tuple(SIZES))
        for m in measure(stack, device, *chosen, **limits)
    ]
    report("llama", found, device, limits, args.json)


if __name__ == "__main__":
    main()
