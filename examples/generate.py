"""Generation of Llama-shaped models with random weights: `python examples/generate.py`.

The model below is plain PyTorch, and takes its cache from outside: `StaticCache`, which is plain
PyTorch too, or `tk.nn.PagedCache`. Without options a small model generates with either, and the
tokens are printed. With `--measure` steps are timed behind 4096 tokens of context, for one sequence
and for 64, beside PyTorch's attention:

  python examples/generate.py --measure --json generate.json
  python examples/generate.py --measure --sizes tiny --batches 2 --device cpu   # to try the tool

  loop "own"            the model below: with `tk.nn.PagedCache`; and with weights of 4 bits by
                        `tk.convert`, but for the head, or with the head
  loop "transformers"   `LlamaForCausalLM` with its static cache, whose attention is this package's
                        ("thunderkittens") or PyTorch's ("sdpa")

Layers are compiled, one for all of a model. A step picks the likeliest token, and on a GPU is one
CUDA graph, mask and schedule included. Caches hold random keys and values; all ways of a loop have
the same. A call generates several tokens from the end of the context on. The logits of its first
step are checked as docs/benchmarks.md says, but for those of 4 bits, which round.
"""

from __future__ import annotations

import argparse
import copy
import inspect
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from llama import GatedMlp, angles, names, report, rotated
from torch import Tensor, nn

import thunderkittens as tk
from thunderkittens import bench
from thunderkittens.bench import progress, steps
from thunderkittens.bench.models import MODELS, Model, weights

# The model, and a cache in plain PyTorch.


class Block(nn.Module):
    """Causal attention with fewer heads of keys, over a cache, and a gated MLP. The next block adds
    up what this one changes, beside its norm: one kernel also where blocks are compiled alone."""

    def __init__(self, sizes: Model, index: int) -> None:
        super().__init__()
        self.index, self.dim = index, sizes.head_dim
        self.heads = [sizes.heads, sizes.kv_heads, sizes.kv_heads]
        width = sizes.heads * sizes.head_dim
        self.norm_1, self.norm_2 = nn.RMSNorm(sizes.hidden), nn.RMSNorm(sizes.hidden)
        self.qkv = nn.Linear(sizes.hidden, sum(self.heads) * self.dim, bias=False)
        self.o = nn.Linear(width, sizes.hidden, bias=False)
        self.mlp = GatedMlp(sizes.hidden, sizes.intermediate)

    def forward(
        self, x: Tensor, change: Tensor, step: Any, cos: Tensor, sin: Tensor
    ) -> tuple[Tensor, Tensor]:
        x = x + change
        qkv = self.qkv(self.norm_1(x)).unflatten(-1, (-1, self.dim))
        q, k, v = qkv.split(self.heads, dim=2)
        q, k = (rotated(y, cos, sin).to(x.dtype) for y in (q, k))
        x = x + self.o(step.attend(self.index, q, k, v).flatten(2))
        return x, self.mlp(self.norm_2(x))


class Llama(nn.Module):
    def __init__(self, sizes: Model, layers: int, length: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(sizes.vocabulary, sizes.hidden)
        self.blocks = nn.ModuleList(Block(sizes, index) for index in range(layers))
        self.norm = nn.RMSNorm(sizes.hidden)
        self.head = nn.Linear(sizes.hidden, sizes.vocabulary, bias=False)
        cos, sin = angles(length, sizes.head_dim)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)

    def forward(self, tokens: Tensor, cache: Any, **options: Any) -> Tensor:
        """(B, s) new tokens to the logits (B, vocabulary) of what follows; the cache grows."""
        step = cache.step(tokens.shape[1], **options)
        x = self.embedding(tokens)
        cos, sin = self.turns(step.positions)
        change = torch.zeros_like(x)
        for block in self.blocks:
            x, change = block(x, change, step, cos, sin)
        step.advance()
        return self.head(self.norm((x + change)[:, -1]))

    def turns(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        return self.cos[positions].unsqueeze(2), self.sin[positions].unsqueeze(2)


class StaticCache:
    """Keys and values (B, H, length, D) of each layer, as `scaled_dot_product_attention` takes
    them; a mask hides what is not written yet."""

    def __init__(self, keys: list[Tensor], values: list[Tensor]) -> None:
        self.k, self.v = keys, values
        self.lengths = torch.zeros(1, dtype=torch.int64, device=keys[0].device)

    def step(self, tokens: int, prompt: bool = False) -> StaticStep:
        return StaticStep(self, tokens)


class StaticStep:
    def __init__(self, cache: StaticCache, tokens: int) -> None:
        self.cache, self.tokens = cache, tokens
        self.index = cache.lengths + torch.arange(tokens, device=cache.lengths.device)
        self.positions = self.index.unsqueeze(0)
        places = torch.arange(cache.k[0].shape[2], device=cache.lengths.device)
        self.mask = places <= self.index.unsqueeze(1)

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        keys, values = self.cache.k[layer], self.cache.v[layer]
        keys.index_copy_(2, self.index, k.transpose(1, 2))
        values.index_copy_(2, self.index, v.transpose(1, 2))
        if self.tokens == 1:  # the heads that share keys are rows, which no kernel has to repeat
            rows = q.view(q.shape[0], k.shape[2], -1, q.shape[3])
            out = F.scaled_dot_product_attention(rows, keys, values, attn_mask=self.mask)
            return out.view(q.shape)
        out = F.scaled_dot_product_attention(
            q.transpose(1, 2), keys, values, attn_mask=self.mask, enable_gqa=True
        )
        return out.transpose(1, 2)

    def advance(self) -> None:
        self.cache.lengths.add_(self.tokens)


# What is measured.


@dataclass(frozen=True)
class Size:
    """Of a model, its context, and `steps` of a call that is timed."""

    sizes: Model
    layers: int
    context: int
    steps: int

    @property
    def length(self) -> int:
        return self.context + self.steps

    @property
    def parameters(self) -> int:
        """Of the matrices that a step reads: not of the embedding."""
        *of_layer, head = (n * k for n, k in weights(self.sizes).values())
        return self.layers * sum(of_layer) + head

    def flops(self, batch: int) -> float:
        pairs = batch * self.context * self.layers
        return 2.0 * batch * self.parameters + 4.0 * pairs * self.sizes.heads * self.sizes.head_dim

    def bytes(self, batch: int) -> float:
        """Read in a step, with weights and cache of 16 bits."""
        row = 2 * self.sizes.kv_heads * self.sizes.head_dim
        return 2.0 * (self.parameters + batch * self.context * self.layers * row)


SIZES = {
    "1b": Size(MODELS["llama3.2-1b"], 16, 4096, steps=32),
    "8b": Size(MODELS["llama3-8b"], 32, 4096, steps=32),
    "tiny": Size(Model(64, 4, 2, 16, 128, 112), 2, 20, steps=3),
}


@torch.no_grad()
def randomize(model: nn.Module, generator: torch.Generator) -> nn.Module:
    for parameter in model.parameters():
        if parameter.ndim > 1:
            parameter.normal_(std=parameter.shape[1] ** -0.5, generator=generator)
        else:
            parameter.fill_(1)
    return model


Logits = Callable[[], Tensor]


class Generation:
    """Calls that generate `size.steps` tokens behind the context.

    Args:
        logits: a step of the model on `tokens`, which are replaced by what it picks.
        start: sets the cache back to the end of the context.
        tokens: (B, 1).
    """

    def __init__(
        self, size: Size, logits: Callable[[Tensor], Tensor], start: Callable[[], Any], tokens: Any
    ) -> None:
        self.size, self.logits, self.start = size, logits, start
        self.given, self.tokens = tokens, tokens.clone()
        self.run = self.graph() if tokens.is_cuda else self.step
        self.begin()
        # Of the first step, by which ways are checked.
        self.first = self.run().clone()

    def begin(self) -> None:
        self.start()
        self.tokens.copy_(self.given)

    @torch.no_grad()
    def step(self) -> Tensor:
        logits = self.logits(self.tokens)
        self.tokens.copy_(logits.argmax(-1, keepdim=True))
        return logits

    def graph(self) -> Logits:
        """The step as a CUDA graph, after some that compile it and load what it needs."""
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            self.begin()
            for _ in range(min(3, self.size.steps)):
                self.step()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            logits = self.step()

        def replay() -> Tensor:
            graph.replay()
            return logits

        return replay

    def __call__(self) -> tuple[Tensor, ...]:
        self.begin()
        for _ in range(self.size.steps):
            self.run()
        return (self.first,)


class Layer(nn.Module):
    """A layer of a model, compiled. All run the code of one, which is compiled once, as nothing
    that is traced differs between them: by `view` of its arguments, of which one is a cache or a
    step, each layer is the first, and there is no other."""

    def __init__(self, layer: nn.Module, view: Callable[..., Any], device: torch.device) -> None:
        super().__init__()
        self.layer, self.view = torch.compile(layer, **steps.compiler(device)), view

    def forward(self, *args: Any, **options: Any) -> Any:
        args, options = self.view(*args, **options)
        return self.layer(*args, **options)


def replaced(module: nn.Module, **attributes: Any) -> Any:
    """The module with other attributes, and the same weights."""
    other = copy.copy(module)
    other._modules = dict(module._modules)
    for name, value in attributes.items():
        setattr(other, name, value)
    return other


def unguarded(tensors: Iterable[Tensor]) -> None:
    """Addresses of caches are static, but code that is compiled serves others too."""
    for x in tensors:
        torch._dynamo.mark_static_address(x, guard=False)


OURS, BITS_4, ALL_4_BITS = "tk.nn cache", "NVFP4, head bf16", "NVFP4, head NVFP4"
INTEGRATION = "transformers' static cache"
WAYS = {"own": (OURS, BITS_4, ALL_4_BITS), "transformers": (INTEGRATION,)}


class OwnLoop:
    """The model above, with either cache."""

    def __init__(
        self, size: Size, batch: int, device: torch.device, generator: torch.Generator
    ) -> None:
        self.size, self.device = size, device
        with torch.device("meta"):
            model = Llama(size.sizes, size.layers, size.length).bfloat16()
        self.model = randomize(model.to_empty(device=device), generator).eval()
        for name in ("cos", "sin"):  # positions need more digits than bfloat16 has
            table = angles(size.length, size.sizes.head_dim)[name == "sin"]
            setattr(self.model, name, table.to(device))
        shape = size.layers, batch, size.sizes.kv_heads, size.sizes.head_dim
        self.paged = tk.nn.PagedCache(*shape, max_length=size.length, device=device)
        self.paged.reserve(size.length)
        for pages in (*self.paged.k, *self.paged.v):
            pages.normal_(generator=generator)
        vocabulary = size.sizes.vocabulary
        self.tokens = torch.randint(vocabulary, (batch, 1), generator=generator, device=device)

    def context(self, layer: int, keys: int) -> list[Tensor]:
        """Keys and values (B, H, keys, D) of a layer, out of the pages."""
        table = self.paged.page_table.long()
        pages = self.paged.k[layer], self.paged.v[layer]
        return [x[table].flatten(1, 2)[:, :keys].transpose(1, 2).contiguous() for x in pages]

    @cached_property
    def static(self) -> StaticCache:
        layers = (self.context(layer, self.size.length) for layer in range(self.size.layers))
        keys, values = zip(*layers, strict=True)
        return StaticCache(list(keys), list(values))

    def prepare(self, way: str, compiled: bool = True) -> Generation:
        model, cache = self.model, self.static if way == steps.PEER else self.paged
        if way in (BITS_4, ALL_4_BITS):
            model = copy.deepcopy(model)
            tk.convert(model, "nvfp4", filter=lambda _, name: way == ALL_4_BITS or name != "head")
        if compiled:
            unguarded((*cache.k, *cache.v, cache.lengths))
            layers = (
                Layer(replaced(block, index=0), partial(of_layer, index), self.device)
                for index, block in enumerate(model.blocks)
            )
            model = replaced(model, blocks=nn.ModuleList(layers))
        start = partial(cache.lengths.fill_, self.size.context)
        return Generation(self.size, lambda tokens: model(tokens, cache), start, self.tokens)

    @torch.no_grad()
    def exact(self) -> Tensor:
        """The first logits in fp32, block by block: not all of it is in memory at once."""
        step = ExactStep(self)
        x = self.model.embedding(self.tokens).float()
        cos, sin = self.model.turns(torch.full_like(self.tokens, self.size.context))
        change = torch.zeros_like(x)
        for block in self.model.blocks:
            x, change = copy.deepcopy(block).float()(x, change, step, cos, sin)
        norm, head = (copy.deepcopy(y).float() for y in (self.model.norm, self.model.head))
        return head(norm((x + change)[:, -1]))


def of_layer(index: int, x: Tensor, change: Tensor, step: Any, *turns: Tensor) -> Any:
    """The arguments of a block, whose step has one layer."""
    one = copy.copy(step)
    one.cache = copy.copy(step.cache)
    one.cache.k, one.cache.v = [step.cache.k[index]], [step.cache.v[index]]
    return (x, change, one, *turns), {}


class ExactStep:
    """One token behind the context, in fp32."""

    def __init__(self, loop: Any) -> None:
        self.loop = loop

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        keys, values = self.joined(layer, k.transpose(1, 2), v.transpose(1, 2))
        rows = q.view(q.shape[0], k.shape[2], -1, q.shape[3])
        return F.scaled_dot_product_attention(rows, keys, values).reshape(q.shape)

    def update(self, k: Tensor, v: Tensor, layer: int, *args: Any, **options: Any) -> Any:
        """As the layers of transformers call their cache."""
        return self.joined(layer, k, v)

    def joined(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        before = self.loop.context(layer, self.loop.size.context)
        keys, values = (torch.cat([x.float(), y], 2) for x, y in zip(before, (k, v), strict=True))
        return keys, values


def of_cache(index: int, *args: Any, **options: Any) -> Any:
    """The arguments of a layer of transformers, whose cache has one layer."""
    (name,) = {"cache", "past_key_values"} & options.keys()
    one = copy.copy(options[name])
    one.layers = [one.layers[index]]
    return args, options | {name: one}


def name_of_cache(module: nn.Module) -> str:
    """Of the argument, which depends on the version of transformers."""
    known = inspect.signature(module.forward).parameters
    return "cache" if "cache" in known else "past_key_values"


class TransformersLoop:
    """`LlamaForCausalLM` of transformers, with one static cache for both ways."""

    def __init__(
        self, size: Size, batch: int, device: torch.device, generator: torch.Generator
    ) -> None:
        import transformers

        import thunderkittens.integrations.transformers as integration

        integration.register()
        self.size, self.device, sizes = size, device, size.sizes
        self.config = transformers.LlamaConfig(
            hidden_size=sizes.hidden,
            intermediate_size=sizes.intermediate,
            num_hidden_layers=size.layers,
            num_attention_heads=sizes.heads,
            num_key_value_heads=sizes.kv_heads,
            head_dim=sizes.head_dim,
            vocab_size=sizes.vocabulary,
            max_position_embeddings=size.length,
        )
        self.kind = transformers.LlamaForCausalLM
        with device:
            model = self.kind._from_config(self.config, dtype=torch.bfloat16)
        self.model = randomize(model, generator).eval()
        self.cache = transformers.StaticCache(config=self.config, max_cache_len=size.length)
        heads = {"batch_size": batch, "num_heads": sizes.kv_heads, "head_dim": sizes.head_dim}
        self.cache.early_initialization(**heads, dtype=torch.bfloat16, device=device)
        for layer in self.cache.layers:
            layer.keys.normal_(generator=generator)
            layer.values.normal_(generator=generator)
        self.tokens = torch.randint(
            sizes.vocabulary, (batch, 1), generator=generator, device=device
        )

    def context(self, layer: int, keys: int) -> list[Tensor]:
        cache = self.cache.layers[layer]
        return [cache.keys[:, :, :keys], cache.values[:, :, :keys]]

    def start(self) -> None:
        for layer in self.cache.layers:
            layer.cumulative_length.fill_(self.size.context)

    def prepare(self, way: str, compiled: bool = True) -> Generation:
        config = copy.deepcopy(self.config)
        with torch.device("meta"):
            model = self.kind._from_config(config, dtype=torch.bfloat16)
        model.load_state_dict(self.model.state_dict(), assign=True)
        model.model.rotary_emb = self.model.model.rotary_emb
        model.set_attn_implementation("sdpa" if way == steps.PEER else "thunderkittens")
        model.eval()
        options = {name_of_cache(model): self.cache}
        if compiled:
            for x in self.cache.layers:
                unguarded((x.keys, x.values, x.cumulative_length))
            layers = model.model.layers
            for index, layer in enumerate(layers):
                first = replaced(layer, self_attn=replaced(layer.self_attn, layer_idx=0))
                layers[index] = Layer(first, partial(of_cache, index), self.device)

        def logits(tokens: Tensor) -> Tensor:
            result: Tensor = model(tokens, **options).logits[:, -1]
            return result

        return Generation(self.size, logits, self.start, self.tokens)

    @torch.no_grad()
    def exact(self) -> Tensor:
        inner, step = self.model.model, ExactStep(self)
        x = inner.embed_tokens(self.tokens).float()
        turns = inner.rotary_emb(x, torch.full_like(self.tokens, self.size.context))
        for layer in inner.layers:
            wide = copy.deepcopy(layer).float()
            x = wide(x, position_embeddings=turns, **{name_of_cache(wide): step})
        norm, head = (copy.deepcopy(y).float() for y in (inner.norm, self.model.lm_head))
        return head(norm(x[:, -1]))


LOOPS: dict[str, Any] = {"own": OwnLoop, "transformers": TransformersLoop}


def oracle(loop: Any) -> Iterator[bench.Expected]:
    """The first logits on PyTorch's own ops, in fp32 and in bf16."""
    plain = loop.prepare(steps.PEER, compiled=False).first
    yield bench.Expected(0, slice(None), loop.exact(), plain)


def make_case(name: str, batch: int, loop: str) -> bench.Case:
    size = SIZES[name]

    def make_inputs(device: torch.device, generator: torch.Generator) -> dict[str, Any]:
        return {"loop": LOOPS[loop](size, batch, device, generator)}

    sizes = {"layers": size.layers, "context": size.context, "steps": size.steps}
    return bench.Case(
        name=f"{name}, batch {batch}, {loop}",
        make_inputs=make_inputs,
        flops=size.flops(batch),
        bytes=size.bytes(batch),
        groups=(name, f"{name}, batch {batch}"),
        parameters={"size": name, "batch": batch, "loop": loop, **sizes, **asdict(size.sizes)},
        oracle=oracle,
    )


def measure(
    name: str, batch: int, loop: str, device: torch.device, **limits: Any
) -> list[bench.Measurement]:
    """The figures of a model with so many sequences: one measurement for each way."""
    ways = WAYS[loop]
    implementations: dict[str, bench.Implementation] = {
        way: bench.Prepared(
            lambda loop, way=way: loop.prepare(way), another_problem=way in (BITS_4, ALL_4_BITS)
        )
        for way in (*ways, steps.PEER)
    }
    torch.compiler.reset()
    case, timer = make_case(name, batch, loop), bench.StepTimer(device, SIZES[name].steps)
    (found,) = bench.compare([case], implementations, timer=timer, **limits)
    return steps.apart(found, ways)


def speeds(found: list[bench.Measurement]) -> Iterator[str]:
    """Tokens per second, of all sequences together, of each way and of PyTorch's attention."""
    for m in found:
        rates = {
            name: m.case.parameters["batch"] / timing.median * 1e6
            for name, timing in m.timings.items()
        }
        yield f"{m.case.name}: " + ", ".join(f"{x} {rate:.4g}" for x, rate in rates.items())


# The program.


@torch.no_grad()
def generate_with_each_cache(device: torch.device, count: int = 12) -> None:
    """A prompt, and what a small model picks behind it, one token after the other."""
    torch.manual_seed(0)
    sizes, layers = SIZES["tiny"].sizes, SIZES["tiny"].layers
    prompt = torch.randint(sizes.vocabulary, (2, 9)).to(device)
    generator = torch.Generator(device).manual_seed(0)
    with device:
        model = Llama(sizes, layers, 64).to(torch.bfloat16)
    randomize(model, generator)
    shape = len(prompt), sizes.kv_heads, 64, sizes.head_dim
    memory = [torch.zeros(2, *shape, dtype=torch.bfloat16, device=device) for _ in range(layers)]
    paged = tk.nn.PagedCache(
        layers, len(prompt), sizes.kv_heads, sizes.head_dim, max_length=64, device=device
    )
    for name, cache in (
        ("PyTorch", StaticCache(*map(list, zip(*memory, strict=True)))),
        ("tk.nn.PagedCache", paged),
    ):
        tokens, made = prompt, []
        for step in range(count):
            if isinstance(cache, tk.nn.PagedCache):
                cache.reserve(tokens.shape[1])
            tokens = model(tokens, cache, prompt=step == 0).argmax(-1, keepdim=True)
            made.append(tokens)
        for row in torch.cat(made, 1).tolist():
            print(f"{name:18}", *row)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add = parser.add_argument
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    add("--measure", action="store_true", help="time steps beside PyTorch's attention")
    add("--sizes", default="1b,8b", help="1b, 8b, tiny, with commas")
    add("--batches", default="1,64", help="numbers of sequences, with commas")
    add("--loops", default=",".join(LOOPS), help="with commas")
    add("--repetitions", type=int, default=20, help="calls of each way (default: 20)")
    add("--seconds", type=float, default=4, help="limit for each way and case (default: 4)")
    add("--json", type=Path, metavar="FILE", help="write the figures with the machine's record")
    args = parser.parse_args()
    device = torch.device(args.device)
    if not args.measure:
        generate_with_each_cache(device)
        return
    limits: dict[str, Any] = {"repetitions": args.repetitions, "seconds": args.seconds}
    cases = [
        (name, int(batch), loop)
        for name in names(args.sizes, tuple(SIZES))
        for batch in args.batches.split(",")
        for loop in names(args.loops, tuple(LOOPS))
    ]
    found = []
    for case in progress.follow(cases, len(cases), lambda case: make_case(*case).name):
        found += measure(*case, device, **limits)
    report("generate", found, device, limits, args.json)
    print("tokens per second", *speeds(found), sep="\n  ")


if __name__ == "__main__":
    main()
