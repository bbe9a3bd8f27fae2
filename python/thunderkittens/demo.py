"""The package's main job on real input: train a small language model twice and compare.

A byte-level causal transformer learns the English text that every Python installation carries
(`pydoc_data.topics`, the pages behind `help("topics")`). One copy calls `tk.gemm` and
`tk.attention`, the other PyTorch's own ops; both start from the same weights, see the same batches
and use the same precision: fp32 weights, optimiser and residual stream, bf16 operands. If the
kernels and their gradients are right, the two losses stay together, so the demo fails when their
averages over the last steps differ by more than two percent.
"""

from __future__ import annotations

import argparse
import importlib.util
import math
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

TOLERANCE = 0.02
AVERAGED_STEPS = 20
CHUNK = 10  # steps of one model before the other's turn
VOCABULARY = 256


@dataclass(frozen=True)
class Config:
    """Size of the model and of the run; `seconds` bounds the training of both models together."""

    width: int
    layers: int
    heads: int
    context: int
    batch: int
    steps: int
    learning_rate: float
    seconds: float
    sample_bytes: int


CPU = Config(128, 2, 4, 96, 8, 500, 4e-3, seconds=80, sample_bytes=160)
GPU = Config(512, 6, 8, 512, 32, 200, 1.5e-3, seconds=45, sample_bytes=400)


@dataclass(frozen=True)
class Backend:
    """The two ops a model is built on.

    `linear(x, weight, bias)`: x (B, S, K), weight (N, K), bias (N,) to (B, S, N), all bf16.
    `attention(q, k, v)`: causal attention over (B, H, S, D), bf16.
    """

    name: str
    linear: Callable[[Tensor, Tensor, Tensor], Tensor]
    attention: Callable[[Tensor, Tensor, Tensor], Tensor]


def thunderkittens_backend() -> Backend:
    import thunderkittens as tk

    return Backend(
        "thunderkittens",
        lambda x, weight, bias: tk.gemm(x, weight.t(), bias=bias),
        lambda q, k, v: tk.attention(q, k, v, causal=True),
    )


def pytorch_backend() -> Backend:
    return Backend(
        "PyTorch",
        F.linear,
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True),
    )


def load_text() -> bytes:
    """The pages of `help("topics")` in alphabetical order: half a megabyte of English."""
    from pydoc_data.topics import topics

    return "\n\n".join(topics[name] for name in sorted(topics)).encode()


class Linear(nn.Module):
    """A linear layer with fp32 master weights, applied in bf16 by the backend."""

    def __init__(self, inputs: int, outputs: int, backend: Backend, scale: float = 1.0) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(outputs, inputs) * (scale / math.sqrt(inputs)))
        self.bias = nn.Parameter(torch.zeros(outputs))
        self.backend = backend

    def forward(self, x: Tensor) -> Tensor:
        weight, bias = self.weight.bfloat16(), self.bias.bfloat16()
        return self.backend.linear(x.bfloat16(), weight, bias)


class Block(nn.Module):
    """Pre-norm attention and multilayer perceptron around an fp32 residual stream."""

    def __init__(self, config: Config, backend: Backend) -> None:
        super().__init__()
        width, damping = config.width, 1 / math.sqrt(2 * config.layers)
        self.heads = config.heads
        self.backend = backend
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.qkv = Linear(width, 3 * width, backend)
        self.projection = Linear(width, width, backend, damping)
        self.up = Linear(width, 4 * width, backend)
        self.down = Linear(4 * width, width, backend, damping)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        qkv = self.qkv(self.norms[0](x)).view(batch, length, 3, self.heads, width // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)  # strided views: the ops take them as they are
        mixed = self.backend.attention(q, k, v).transpose(1, 2).reshape(batch, length, width)
        x = x + self.projection(mixed)
        hidden: Tensor = self.down(F.gelu(self.up(self.norms[1](x))))
        return x + hidden


class Model(nn.Module):
    """Bytes (B, S), int64, to the logits of the next byte (B, S, 256), fp32."""

    def __init__(self, config: Config, backend: Backend) -> None:
        super().__init__()
        self.context = config.context
        self.bytes = nn.Embedding(VOCABULARY, config.width)
        self.positions = nn.Embedding(config.context, config.width)
        for table in (self.bytes, self.positions):
            nn.init.normal_(table.weight, std=0.1)
        self.blocks = nn.ModuleList(Block(config, backend) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.width)
        self.head = Linear(config.width, VOCABULARY, backend)

    def forward(self, tokens: Tensor) -> Tensor:
        places = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.bytes(tokens) + self.positions(places)
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x))
        return logits.float()


@dataclass
class Trainee:
    """A model, its optimiser, and what its training has yielded so far."""

    name: str
    model: Model
    optimizer: torch.optim.Optimizer
    losses: list[float] = field(default_factory=list)
    seconds: float = 0.0
    timed_steps: int = 0

    def tokens_per_second(self, config: Config) -> float:
        tokens = self.timed_steps * config.batch * config.context
        return tokens / self.seconds if self.seconds else math.nan

    def final_loss(self) -> float:
        last = self.losses[-AVERAGED_STEPS:]
        return sum(last) / len(last)


def make_trainee(config: Config, backend: Backend, device: torch.device, seed: int) -> Trainee:
    """A model on `backend` with weights drawn from `seed`, the same on every device."""
    torch.manual_seed(seed)
    model = Model(config, backend).to(device)
    optimizer = torch.optim.AdamW(
        model.parameters(),
        lr=config.learning_rate,
        betas=(0.9, 0.95),
        weight_decay=0.01,
        fused=True,
    )
    return Trainee(backend.name, model, optimizer)


def make_batch(text: Tensor, config: Config, seed: int, step: int) -> tuple[Tensor, Tensor]:
    """Inputs and targets (B, S): random windows of the text, a function of seed and step alone."""
    generator = torch.Generator().manual_seed((seed * 1_000_003 + step) % 2**63)
    starts = torch.randint(len(text) - config.context, (config.batch, 1), generator=generator)
    windows = text[(starts + torch.arange(config.context + 1)).to(text.device)].long()
    return windows[:, :-1], windows[:, 1:]


def learning_rate(config: Config, step: int) -> float:
    """Linear warm-up over a tenth of the run, then a cosine down to a tenth of the peak."""
    warmup = max(1, config.steps // 10)
    if step < warmup:
        return config.learning_rate * (step + 1) / warmup
    progress = (step - warmup) / max(1, config.steps - warmup)
    return config.learning_rate * (0.55 + 0.45 * math.cos(math.pi * progress))


def train_chunk(trainee: Trainee, text: Tensor, config: Config, seed: int, steps: range) -> None:
    """Run `steps`; time counts from the second chunk on: warm-up stays out of the rate."""
    losses = []
    start = time.perf_counter()
    for step in steps:
        inputs, targets = make_batch(text, config, seed, step)
        for group in trainee.optimizer.param_groups:
            group["lr"] = learning_rate(config, step)
        loss = F.cross_entropy(trainee.model(inputs).flatten(0, 1), targets.flatten())
        torch.autograd.backward(loss)
        nn.utils.clip_grad_norm_(trainee.model.parameters(), 1.0)
        trainee.optimizer.step()
        trainee.optimizer.zero_grad(set_to_none=True)
        losses.append(loss.detach())
    trainee.losses += torch.stack(losses).tolist()  # waits for the device
    if steps.start > 0:
        trainee.seconds += time.perf_counter() - start
        trainee.timed_steps += len(steps)


def train(
    trainees: list[Trainee],
    text: Tensor,
    config: Config,
    seed: int,
    advance: Callable[[int, list[Trainee]], None],
) -> int:
    """Train the models in turns of `CHUNK` steps; returns the steps done before time ran out."""
    deadline = time.perf_counter() + config.seconds
    for start in range(0, config.steps, CHUNK):
        steps = range(start, min(start + CHUNK, config.steps))
        for trainee in trainees:
            train_chunk(trainee, text, config, seed, steps)
        advance(steps.stop, trainees)
        if time.perf_counter() > deadline:
            return steps.stop
    return config.steps


@torch.no_grad()
def generate(model: Model, prompt: str, count: int, device: torch.device, seed: int) -> str:
    """Continue `prompt` by `count` bytes, sampled at temperature 0.7."""
    generator = torch.Generator().manual_seed(seed)
    tokens = list(prompt.encode())
    for _ in range(count):
        window = torch.tensor([tokens[-model.context :]], device=device)
        logits = model(window)[0, -1].float().cpu() / 0.7
        tokens.append(int(torch.multinomial(logits.softmax(-1), 1, generator=generator)))
    return bytes(tokens).decode(errors="replace")


@contextmanager
def one_thread() -> Iterator[None]:
    """Keep PyTorch to one CPU thread.

    Matrices as small as the demo's gain little from more, and on a busy machine threads that wait
    for each other make it many times slower.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


@contextmanager
def progress_bar(total: int, quiet: bool) -> Iterator[Callable[[int, list[Trainee]], None]]:
    """A function that shows progress: a bar on a terminal, else lines, nothing when quiet."""

    def describe(trainees: list[Trainee]) -> str:
        return "  ".join(f"{t.name} {t.losses[-1]:.3f}" for t in trainees)

    def line(step: int, trainees: list[Trainee]) -> None:
        if step == total or step % max(CHUNK, total // 10 // CHUNK * CHUNK) == 0:
            print(f"step {step:4d}/{total}  loss: {describe(trainees)}", flush=True)

    if quiet:
        yield lambda step, trainees: None
        return
    if not sys.stdout.isatty() or importlib.util.find_spec("rich") is None:
        yield line
        return
    from rich import progress

    columns = (
        progress.TextColumn("training"),
        progress.BarColumn(),
        progress.MofNCompleteColumn(),
        progress.TimeElapsedColumn(),
        progress.TextColumn("loss: {task.description}"),
    )
    with progress.Progress(*columns) as bar:
        task = bar.add_task("", total=total)
        yield lambda step, trainees: bar.update(
            task, completed=step, description=describe(trainees)
        )


def choose_device(name: str | None) -> torch.device:
    """The device asked for, else the GPU if there is one; ValueError where it cannot be had."""
    try:
        device = torch.device(name or ("cuda" if torch.cuda.is_available() else "cpu"))
    except RuntimeError:
        device = torch.device("meta")
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"--device is {name!r}; expected cpu, cuda or cuda:<index>")
    count = torch.cuda.device_count()
    if device.type == "cuda" and (device.index or 0) >= count:
        raise ValueError(f"--device is {name!r}; PyTorch {torch.__version__} sees {count} GPUs")
    return device


def probe(backend: Backend, device: torch.device) -> None:
    """Run both ops once; ValueError with the reason in a line if this device has no kernels."""
    x = torch.zeros(1, 16, 64, dtype=torch.bfloat16, device=device)
    try:
        backend.linear(x, x[0], x[0, 0, :16])
        backend.attention(x[None], x[None], x[None])
    except (RuntimeError, ImportError) as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        hint = "" if device.type == "cpu" else " (`--device cpu` runs the demo without the GPU)"
        raise ValueError(reason + hint) from error


def describe_run(config: Config, device: torch.device, text: bytes, trainee: Trainee) -> str:
    """What is about to happen, in two lines."""
    where = "one CPU thread" if device.type == "cpu" else torch.cuda.get_device_name(device)
    parameters = sum(parameter.numel() for parameter in trainee.model.parameters())
    return (
        f"A transformer of {parameters / 1e6:.1f} M parameters ({config.layers} layers, width "
        f"{config.width}, {config.heads} heads, context {config.context})\n"
        f"learns {len(text) / 1e3:.0f} kB of Python's documentation in bf16: {config.steps} steps "
        f"of {config.batch * config.context} bytes on {where}."
    )


def report(trainees: list[Trainee], config: Config, steps: int) -> bool:
    """Print both models' losses and rates and the verdict; True when the losses agree."""
    if steps < config.steps:
        print(f"Stopped after {steps} of {config.steps} steps: {config.seconds:.0f} s are over.")
    averaged = min(steps, AVERAGED_STEPS)
    print(f"\n{'':16}{'loss':>8}{'tokens/s':>12}   (loss: mean of the last {averaged} steps)")
    for trainee in trainees:
        rate = trainee.tokens_per_second(config)
        shown = "-" if math.isnan(rate) else f"{rate:,.0f}"  # a single chunk is all warm-up
        print(f"{trainee.name:16}{trainee.final_loss():8.4f}{shown:>12}")
    ours, theirs = (trainee.final_loss() for trainee in trainees)
    difference = abs(ours - theirs) / theirs
    agree = difference <= TOLERANCE  # false for NaN
    allowed = f"{'within' if agree else 'NOT within'} the {TOLERANCE:.0%} allowed"
    print(f"The losses are {difference:.2%} apart, {allowed}.", flush=True)
    if not agree:
        print(
            "thunderkittens demo: the two models differ in their ops alone, so gemm, attention or "
            "a gradient is wrong here; please report it with `python -m thunderkittens info`",
            file=sys.stderr,
        )
    return agree


def add_arguments(parser: argparse.ArgumentParser) -> None:
    steps = f"training steps (default: {GPU.steps} on a GPU, {CPU.steps} on a CPU)"
    parser.add_argument("--steps", type=int, help=steps)
    parser.add_argument("--device", help="cpu, cuda or cuda:<index> (default: the GPU if any)")
    parser.add_argument("--seed", type=int, default=0, help="of weights, batches, sample (0)")
    parser.add_argument("--quiet", action="store_true", help="print the result only")


def run(args: argparse.Namespace) -> bool:
    """The whole demo; True when the losses agree, ValueError when it cannot run."""
    if args.steps is not None and args.steps < 1:
        raise ValueError(f"--steps is {args.steps}; expected at least 1")
    device = choose_device(args.device)
    text = load_text()
    backends = (thunderkittens_backend(), pytorch_backend())
    probe(backends[0], device)
    config = CPU if device.type == "cpu" else GPU
    config = replace(config, steps=args.steps or config.steps)
    data = torch.tensor(bytearray(text), dtype=torch.uint8, device=device)
    trainees = [make_trainee(config, backend, device, args.seed) for backend in backends]
    if not args.quiet:
        print(describe_run(config, device, text, trainees[0]), flush=True)
    with progress_bar(config.steps, args.quiet) as advance:
        steps = train(trainees, data, config, args.seed, advance)
    agree = report(trainees, config, steps)
    if not args.quiet:
        sample = generate(trainees[0].model, "The class ", config.sample_bytes, device, args.seed)
        print(f"\nA sample of the model on {trainees[0].name}:\n{sample}", flush=True)
    return agree


def main(args: argparse.Namespace) -> int:
    """Run the demo; 0 when the losses agree, 1 when they do not, 2 when it cannot run."""
    try:
        with one_thread():
            return 0 if run(args) else 1
    except (ValueError, ImportError) as error:
        print(f"thunderkittens demo: {error}", file=sys.stderr)
        return 2
