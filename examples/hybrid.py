"""A small hybrid model, trained on associative recall: `python examples/hybrid.py`.

Three blocks of four have `tk.nn.GatedDeltaNet`, whose memory does not grow with the length, and one
has `tk.attention`, as in Qwen3-Next. Attention has no positions: the layers before it know the
order. A sequence is pairs of a key and a value, drawn anew, and then all keys again in another
order; the model says the value of each. Losses go down, the share of values that are recalled goes
up, and tokens per second are printed. Then the model answers new sequences, whole and token by
token over caches. On a CPU it takes seconds, in float32 (`--size tiny`); a GPU trains `small` or
`medium` in bfloat16 by autocast, where the layers call the kernels.

With `--measure` it times steps of training and of prefill of the blocks alone, beside the same in
plain PyTorch, eager and compiled:

  python examples/hybrid.py --measure --json hybrid.json
  python examples/hybrid.py --measure --stacks tiny --device cpu   # to try the tool

In plain PyTorch the recurrence is the formula of chunks, `tk.reference.gated_delta_rule_chunked`,
which is what models run where no kernels are installed, and attention is PyTorch's. All ways take
turns in the same rounds; results are checked as docs/benchmarks.md says.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from llama import GatedMlp, names, report
from torch import Tensor, nn

import thunderkittens as tk
from thunderkittens import bench
from thunderkittens.bench import progress, steps

HALVES = (torch.bfloat16, torch.float16)
OURS, PLAIN = "tk.nn.GatedDeltaNet and tk.attention", steps.PEER
PERIOD = 4  # blocks, of which the last has attention

# The model.


@dataclass(frozen=True)
class Size:
    """Heads are those of queries and keys; values have twice as many in the recurrence, and up to
    four queries share keys in attention."""

    width: int
    layers: int
    heads: int
    head_dim: int
    hidden: int


class PlainDeltaNet(tk.nn.GatedDeltaNet):
    """The same layer in plain PyTorch, without caches."""

    def forward(self, x: Tensor, cache: Any = None, **options: Any) -> Tensor:
        qkv, gate = self.in_proj_qkv(x), self.in_proj_z(x).unflatten(-1, (-1, self.value_dim))
        taps = self.conv1d.weight.to(x.dtype)
        padded = F.pad(qkv.transpose(1, 2), (taps.shape[2] - 1, 0))
        qkv = F.silu(F.conv1d(padded, taps, groups=taps.shape[0])).transpose(1, 2)
        dims = self.key_dim, self.key_dim, self.value_dim
        q, k, v = (
            y.unflatten(-1, (-1, dim)).transpose(1, 2)
            for y, dim in zip(qkv.split(self.parts, -1), dims, strict=True)
        )
        # Contiguous, as compiled gradients of a CPU need them to be.
        beta, a = (
            layer(x).transpose(1, 2).contiguous() for layer in (self.in_proj_b, self.in_proj_a)
        )
        numbers = {"A_log": self.A_log.float(), "dt_bias": self.dt_bias.float()}
        out, _ = tk.reference.gated_delta_rule_chunked(
            q, k, v, a, beta, qk_l2norm=True, beta_sigmoid=True, **numbers
        )
        out = F.rms_norm(out.transpose(1, 2), (self.value_dim,), self.norm.weight, self.norm.eps)
        return self.out_proj((out * F.silu(gate)).flatten(2).to(x.dtype))


class Attention(nn.Module):
    """Causal attention with fewer heads of keys, and without positions."""

    def __init__(self, size: Size, way: str) -> None:
        super().__init__()
        self.way, self.dim = way, size.head_dim
        self.heads = size.heads, max(1, size.heads // 4)
        self.qkv = nn.Linear(size.width, (sum(self.heads) + self.heads[1]) * self.dim, bias=False)
        self.o = nn.Linear(size.heads * self.dim, size.width, bias=False)

    def forward(self, x: Tensor, cache: list[Tensor] | None = None) -> Tensor:
        qkv = self.qkv(x).unflatten(-1, (-1, self.dim)).transpose(1, 2)
        q, k, v = qkv.split((*self.heads, self.heads[1]), dim=1)
        if cache is not None:  # it grows, which is enough here; tk.nn.PagedCache does not
            if cache:
                k, v = (torch.cat(both, 2) for both in zip(cache, (k, v), strict=True))
            cache[:] = k, v
        if self.way == PLAIN:
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        else:
            attend: Any = tk.attention if q.dtype in HALVES else tk.reference.attention
            out = attend(q, k, v, causal=True)
        return self.o(out.transpose(1, 2).flatten(2))

    def new_cache(self, batch: int) -> list[Tensor]:
        return []


class Block(nn.Module):
    def __init__(self, size: Size, index: int, way: str) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = nn.RMSNorm(size.width), nn.RMSNorm(size.width)
        if index % PERIOD == PERIOD - 1:
            self.mixer: Any = Attention(size, way)
        else:
            kind = PlainDeltaNet if way == PLAIN else tk.nn.GatedDeltaNet
            heads = {"value_heads": 2 * size.heads, "key_dim": size.head_dim}
            self.mixer = kind(size.width, size.heads, **heads)
        self.mlp = GatedMlp(size.width, size.hidden)

    def forward(self, x: Tensor, cache: Any = None) -> Tensor:
        x = x + self.mixer(self.norm_1(x), cache)
        return x + self.mlp(self.norm_2(x))


def make_blocks(size: Size, way: str) -> list[Block]:
    return [Block(size, index, way) for index in range(size.layers)]


class Hybrid(nn.Module):
    """Tokens (B, T) to the logits of the next one (B, T, vocabulary)."""

    def __init__(self, size: Size, vocabulary: int, way: str = OURS) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, size.width)
        self.blocks = nn.ModuleList(make_blocks(size, way))
        self.norm = nn.RMSNorm(size.width)
        self.head = nn.Linear(size.width, vocabulary, bias=False)

    def new_cache(self, batch: int) -> list[Any]:
        return [block.mixer.new_cache(batch) for block in self.blocks]

    def forward(self, tokens: Tensor, cache: list[Any] | None = None) -> Tensor:
        x = self.embedding(tokens)
        for index, block in enumerate(self.blocks):
            x = block(x, None if cache is None else cache[index])
        return self.head(self.norm(x))


# The task, and training.


@dataclass(frozen=True)
class Task:
    """Pairs of a sequence, of so many keys and as many values that there are; and how long the
    training is."""

    pairs: int
    keys: int
    batch: int
    steps: int
    rate: float

    @property
    def length(self) -> int:
        return 4 * self.pairs - 1

    def batch_of(self, generator: torch.Generator, device: torch.device) -> tuple[Tensor, Tensor]:
        """Tokens (B, length + 1), and at which of them a key is asked for."""
        shape = self.batch, self.pairs
        keys = torch.rand(self.batch, self.keys, generator=generator).argsort(1)[:, : self.pairs]
        values = self.keys + torch.randint(self.keys, shape, generator=generator)
        order = torch.rand(shape, generator=generator).argsort(1)
        asked = [x.gather(1, order) for x in (keys, values)]
        tokens = torch.cat([torch.stack(x, 2).flatten(1) for x in ((keys, values), asked)], 1)
        questions = torch.arange(2 * self.pairs, 4 * self.pairs, 2)
        return tokens.to(device), questions.to(device)


TRAINED: dict[str, tuple[Size, Task]] = {
    "tiny": (Size(64, 4, 2, 16, 128), Task(4, 8, 32, 120, 5e-3)),
    "small": (Size(256, 4, 2, 64, 512), Task(32, 128, 64, 600, 2e-3)),
    "medium": (Size(512, 8, 4, 64, 1024), Task(128, 1024, 64, 2000, 1e-3)),
}


def precision(device: torch.device) -> torch.autocast:
    """bfloat16 on a GPU, where the layers then call the kernels."""
    return torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda")


def answers(model: Hybrid, tokens: Tensor, questions: Tensor) -> tuple[Tensor, Tensor]:
    """The logits behind the keys that are asked for, and their values."""
    return model(tokens[:, :-1])[:, questions].float(), tokens[:, questions + 1]


def train(model: Hybrid, task: Task, device: torch.device, seed: int, reports: int = 8) -> None:
    """Prints losses, the share that is recalled, and at the end tokens per second."""
    generator = torch.Generator().manual_seed(seed)
    options = {"betas": (0.9, 0.95), "weight_decay": 0.0}
    optimizer = torch.optim.AdamW(model.parameters(), lr=task.rate, **options)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, task.rate, total_steps=max(2, task.steps), pct_start=0.1
    )
    begin, timed = time.perf_counter(), 0
    for step in range(task.steps):
        tokens, questions = task.batch_of(generator, device)
        with precision(device):
            logits, values = answers(model, tokens, questions)
        loss = F.cross_entropy(logits.flatten(0, 1), values.flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        if step % max(1, task.steps // reports) == 0 or step == task.steps - 1:
            share = (logits.argmax(-1) == values).float().mean()
            print(f"step {step:5}   loss {loss.item():.3f}   recalled {share.item():4.0%}")
        if step == task.steps // 10:  # what comes once is over
            wait(device)
            begin, timed = time.perf_counter(), step + 1
    wait(device)
    tokens_of_all = (task.steps - timed) * task.batch * task.length
    print(f"{tokens_of_all / (time.perf_counter() - begin):.4g} tokens per second")


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


@torch.no_grad()
def recalled(model: Hybrid, task: Task, device: torch.device, seed: int) -> tuple[float, float]:
    """The share of values of new sequences that are recalled: of whole sequences, and token by
    token over caches, behind the pairs as a prompt."""
    tokens, questions = task.batch_of(torch.Generator().manual_seed(seed), device)
    with precision(device):
        whole, values = answers(model, tokens, questions)
        cache = model.new_cache(task.batch)
        model(tokens[:, : 2 * task.pairs], cache)
        rest = tokens[:, 2 * task.pairs : -1].split(1, 1)
        stepped = torch.cat([model(token, cache) for token in rest][::2], 1)
    shares = [(x.argmax(-1) == values).float().mean().item() for x in (whole, stepped)]
    return shares[0], shares[1]


# Steps to time.


@dataclass(frozen=True)
class Stack:
    """Blocks on a batch; `steps` of a call that is timed."""

    size: Size
    batch: int
    length: int
    steps: int

    def flops(self, training: bool) -> float:
        """Of the products of a step; half of attention's for the causal mask, and those of the
        recurrence in chunks of 64 tokens. The gradient's are twice as many of linear layers, three
        times of the recurrence, and 2.5 times of attention."""
        size, tokens = self.size, float(self.batch * self.length)
        inner, dim = size.heads * size.head_dim, size.head_dim
        attention = size.layers // PERIOD
        recurrent = size.layers - attention
        shared = max(1, size.heads // 4) * dim
        linear = 3 * size.width * size.hidden * size.layers
        linear += size.width * (8 * inner + 4 * size.heads) * recurrent
        linear += size.width * 2 * (inner + shared) * attention
        chunks = 2 * size.heads * (64 * dim + dim * (3 * dim + 128)) * recurrent
        scores = self.length * inner * attention
        factors = (3, 4, 3.5) if training else (1, 1, 1)
        parts = (linear, chunks, scores)
        return 2 * tokens * sum(n * factor for n, factor in zip(parts, factors, strict=True))


STACKS = {
    "large": Stack(Size(2048, 4, 16, 128, 5632), 2, 4096, steps=2),
    "small": Stack(Size(1024, 4, 8, 128, 2816), 8, 1024, steps=4),
    "tiny": Stack(Size(64, 4, 2, 16, 96), 2, 70, steps=2),
}
TASKS, MODES = ("training", "prefill"), ("eager", "compiled")


def make_model(size: Size, way: str) -> nn.Sequential:
    return nn.Sequential(*make_blocks(size, way), nn.RMSNorm(size.width))


def make_steps(
    way: str,
    stack: Stack,
    weights: dict[str, Tensor],
    x: Tensor,
    target: Tensor,
    task: str,
    mode: str = "eager",
) -> Callable[[], tuple[Tensor, ...]]:
    """A call that does `stack.steps` steps of the blocks one way, in the dtype of x."""
    with x.device:
        model = make_model(stack.size, way).to(x.dtype)
    model.load_state_dict(weights)
    if mode == "compiled":
        for block in model:
            block.compile(**steps.compiler(x.device))
    if task == "prefill":
        return steps.prefill(model, x, count=stack.steps)
    x = x.detach().requires_grad_()  # as behind an embedding: all blocks are alike
    return steps.training(model, model, x, target, count=stack.steps, learning_rate=1e-4)


def oracle(task: str, mode: str, x: Tensor, **inputs: Any) -> Iterator[bench.Expected]:
    """The results in plain PyTorch, in fp32 and in the dtype of x. The errors of a few losses are a
    matter of luck; they may differ by a rounding, and gradients say the rest."""
    exact, plain = (
        make_steps(PLAIN, x=x.to(dtype), task=task, **inputs)()
        for dtype in (torch.float32, x.dtype)
    )
    for output, pair in enumerate(zip(exact, plain, strict=True)):
        losses = task == "training" and output == 0
        allowance = torch.finfo(x.dtype).eps / 2 if losses else 0.0
        yield bench.Expected(output, slice(None), *pair, allowance=allowance)


def make_case(name: str, task: str, mode: str) -> bench.Case:
    stack = STACKS[name]

    def make_inputs(device: torch.device, generator: torch.Generator) -> dict[str, Any]:
        with torch.random.fork_rng(devices=()):
            torch.manual_seed(generator.initial_seed())
            weights = make_model(stack.size, PLAIN).bfloat16().state_dict()
        normal = partial(
            bench.random_normal, stack.batch, stack.length, stack.size.width, generator=generator
        )
        return {
            "stack": stack,
            "weights": {name: weight.to(device) for name, weight in weights.items()},
            "x": normal(dtype=torch.bfloat16),
            "target": normal(dtype=torch.float32),
            "task": task,
            "mode": mode,
        }

    sizes = {"batch": stack.batch, "length": stack.length, "steps": stack.steps}
    return bench.Case(
        name=f"{name}, {task}, {mode}",
        make_inputs=make_inputs,
        flops=stack.flops(task == "training"),
        groups=(name, f"{name}, {task}"),
        parameters={"stack": name, "task": task, "mode": mode, **sizes, **asdict(stack.size)},
        oracle=oracle,
    )


def measure(
    name: str,
    device: torch.device,
    tasks: tuple[str, ...] = TASKS,
    modes: tuple[str, ...] = MODES,
    **limits: Any,
) -> list[bench.Measurement]:
    """The figures of a stack, one measurement for each task and mode."""
    implementations: dict[str, bench.Implementation] = {
        way: bench.Prepared(partial(make_steps, way)) for way in (OURS, PLAIN)
    }
    cases = [make_case(name, task, mode) for task in tasks for mode in modes]
    found = []
    for case in progress.follow(cases, len(cases), lambda case: case.name):
        torch.compiler.reset()
        timer = bench.StepTimer(device, STACKS[name].steps)
        found += bench.compare([case], implementations, timer=timer, **limits)
    return [one for m in found for one in steps.apart(m, [OURS])]


def speeds(found: list[bench.Measurement]) -> Iterator[str]:
    """Tokens per second of each way."""
    for m in found:
        tokens = m.case.parameters["batch"] * m.case.parameters["length"]
        rates = {name: tokens / timing.median * 1e6 for name, timing in m.timings.items()}
        yield f"{m.case.name}: " + ", ".join(f"{x} {rate:.4g}" for x, rate in rates.items())


# The program.


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add = parser.add_argument
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    add("--size", choices=TRAINED, help="tiny on a CPU, small on a GPU by default")
    add("--seed", type=int, default=0)
    add("--measure", action="store_true", help="time steps beside plain PyTorch")
    add("--stacks", default="large,small", help="large, small, tiny, with commas")
    add("--tasks", default=",".join(TASKS), help="with commas")
    add("--modes", default=",".join(MODES), help="with commas")
    add("--repetitions", type=int, default=20, help="calls of each way (default: 20)")
    add("--seconds", type=float, default=2, help="limit for each way and case (default: 2)")
    add("--json", type=Path, metavar="FILE", help="write the figures with the machine's record")
    args = parser.parse_args()
    device = torch.device(args.device)
    if not args.measure:
        size, task = TRAINED[args.size or ("tiny" if device.type == "cpu" else "small")]
        torch.manual_seed(args.seed)
        model = Hybrid(size, 2 * task.keys).to(device)
        train(model, task, device, args.seed)
        whole, stepped = recalled(model, task, device, args.seed + 1)
        print(f"of new sequences {whole:.1%}, and token by token over caches {stepped:.1%}")
        return
    limits: dict[str, Any] = {"repetitions": args.repetitions, "seconds": args.seconds}
    chosen = names(args.tasks, TASKS), names(args.modes, MODES)
    found = [
        m
        for name in names(args.stacks, tuple(STACKS))
        for m in measure(name, device, *chosen, **limits)
    ]
    report("hybrid", found, device, limits, args.json)
    print("tokens per second", *speeds(found), sep="\n  ")


if __name__ == "__main__":
    main()
