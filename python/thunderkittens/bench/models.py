"""The shapes of published models by name: what `--model llama3-8b --tokens 4096` measures.

A model's sizes are those of its published configuration (`config.json`: hidden_size,
num_attention_heads, num_key_value_heads, head_dim, intermediate_size, vocab_size, and of a mixture
of experts their number, how many a token goes to, and the width of one). From them follow the
calls of a layer on so many tokens, in one or several sequences:

- attention: forward and backward over the sequences, and a step of decoding behind them;
- linear layers: qkv (q, k and v in one), o, gate_up (gate and up in one), down, head; of experts
  the grouped gate_up and down, and the router;
- matrices: the activations that go into linear layers, and the weights.

Each suite names as `OF_MODEL` the function here whose entries are in the form of its `SHAPES`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from .cases import Case

TOKENS, SEQUENCES = 4096, 1
#: Head dimensions that a converted model's linear attention has kernels for.
LINEAR_DIMS = (64, 128)


class NotInModelError(ValueError):
    """The model has no such calls."""


@dataclass(frozen=True)
class Model:
    """A decoder's sizes. `intermediate` is the width of the feed-forward network, or of one of the
    `experts`, `chosen` of which a token goes to. `window` is the number of tokens that some layers
    see. Without `gated` the network has one matrix up instead of two."""

    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocabulary: int
    experts: int = 0
    chosen: int = 0
    window: int = 0
    gated: bool = True


MODELS: dict[str, Model] = {
    "gpt2": Model(768, 12, 12, 64, 3072, 50257, gated=False),
    "llama2-7b": Model(4096, 32, 32, 128, 11008, 32000),
    "llama3-8b": Model(4096, 32, 8, 128, 14336, 128256),
    "llama3-70b": Model(8192, 64, 8, 128, 28672, 128256),
    "llama3-405b": Model(16384, 128, 8, 128, 53248, 128256),
    "llama3.2-1b": Model(2048, 32, 8, 64, 8192, 128256),
    "llama3.2-3b": Model(3072, 24, 8, 128, 8192, 128256),
    "mistral-7b": Model(4096, 32, 8, 128, 14336, 32768),
    "mixtral-8x7b": Model(4096, 32, 8, 128, 14336, 32000, experts=8, chosen=2),
    "qwen2.5-7b": Model(3584, 28, 4, 128, 18944, 152064),
    "qwen3-8b": Model(4096, 32, 8, 128, 12288, 151936),
    "qwen3-32b": Model(5120, 64, 8, 128, 25600, 151936),
    "qwen3-30b-a3b": Model(2048, 32, 4, 128, 768, 151936, experts=128, chosen=8),
    "gemma2-9b": Model(3584, 16, 8, 256, 14336, 256000, window=4096),
    "phi-4": Model(5120, 40, 10, 128, 17920, 100352),
    "gpt-oss-20b": Model(2880, 64, 8, 64, 2880, 201088, experts=32, chosen=4, window=128),
    "gpt-oss-120b": Model(2880, 64, 8, 64, 2880, 201088, experts=128, chosen=4, window=128),
}


@dataclass(frozen=True)
class Work:
    """A model's layer on `tokens` tokens, which are `sequences` sequences of one length."""

    model: Model
    tokens: int = TOKENS
    sequences: int = SEQUENCES

    @property
    def length(self) -> int:
        return self.tokens // self.sequences


Sizes = dict[str, Any]  # a size as the suite's SHAPES have it, by what it is in the model


# Attention.


def attention(work: Work) -> Sizes:
    """Points of `attention_work`: forward, backward, a step of decoding, and with a window."""
    from .attention_work import Point

    model, batch = work.model, work.sequences
    mask = "causal"
    base = Point(
        batch,
        model.heads,
        work.length,
        model.head_dim,
        causal=True,
        kv_heads=model.kv_heads if model.kv_heads < model.heads else None,
    )
    text = f"{batch} x {work.length}, {model.heads} heads on {model.kv_heads}, D={model.head_dim}"

    def named(point: Point, kind: str) -> Point:
        return replace(point, name=f"{kind} {text}", groups=(kind,))

    points = {
        "forward": named(base, mask),
        "backward": named(replace(base, backward=True), f"backward {mask}"),
        "decode": named(replace(base, rows=1), "decode, 1 row"),
    }
    if model.window:
        window = replace(base, options={"window_size": (model.window - 1, 0)})
        points["window"] = named(window, f"window {model.window}")
        backward = replace(window, backward=True)
        points["window, backward"] = named(backward, f"backward window {model.window}")
    return points


def packed(work: Work) -> Sizes:
    """The same number of tokens in sequences of one length, and in ones of mixed lengths."""
    from .suites.attention_varlen import mixed

    model = work.model
    heads = (model.head_dim, True), (model.heads, model.kv_heads)
    lengths = {"equal": (work.length,) * work.sequences, "mixed": mixed(work.length, work.tokens)}
    return {
        f"{name}{', backward' * backward}": (lengths[name], *heads[0], backward, *heads[1])
        for backward in (False, True)
        for name in lengths
    }


def _lines(work: Work) -> tuple[int, int, int]:
    """Batch, heads, heads of keys of a layer whose attention is made linear."""
    model = work.model
    if model.head_dim not in LINEAR_DIMS:
        raise NotInModelError(
            f"linear attention has head dimensions {LINEAR_DIMS}, and the model {model.head_dim}"
        )
    return work.sequences, model.heads, model.kv_heads


def lolcats(work: Work) -> Sizes:
    """The model converted to LoLCATS, with half a head dimension as features of one sign."""
    dim = work.model.head_dim
    return {"forward": (*_lines(work), work.length, dim, dim // 2)}


def lolcats_decode(work: Work) -> Sizes:
    dim = work.model.head_dim
    return {"step": (*_lines(work), dim, dim // 2)}


def based(work: Work) -> Sizes:
    """The model's heads with Based in place of attention."""
    batch, heads, _ = _lines(work)
    return {"forward": (batch, heads, work.length, work.model.head_dim)}


def based_decode(work: Work) -> Sizes:
    batch, heads, _ = _lines(work)
    return {"step": (batch, heads, work.model.head_dim)}


def ssd(work: Work) -> Sizes:
    """The model's heads with SSD of Mamba-2's usual state in place of attention, in one group."""
    batch, heads, _ = _lines(work)
    return {"forward": (batch, heads, 1, work.length, work.model.head_dim, 128)}


def ssd_decode(work: Work) -> Sizes:
    batch, heads, _ = _lines(work)
    return {"step": (batch, heads, 1, 1, work.model.head_dim, 128)}


def linear_attention(work: Work) -> Sizes:
    """The model's heads with linear attention in place of softmax."""
    batch, heads, _ = _lines(work)
    dim = work.model.head_dim
    return {"forward": (batch, heads, work.length, dim, dim)}


def linear_attention_decode(work: Work) -> Sizes:
    batch, heads, _ = _lines(work)
    dim = work.model.head_dim
    return {"step": (batch, heads, 1, dim, dim)}


def _convolved(work: Work) -> int:
    """Channels of q, k and v in one, as layers of linear attention convolve them."""
    model = work.model
    return (model.heads + 2 * model.kv_heads) * model.head_dim


def causal_conv1d(work: Work) -> Sizes:
    """Of q, k and v, where the layer's attention is linear."""
    return {"forward": (work.sequences, _convolved(work), work.length, "channels")}


def causal_conv1d_update(work: Work) -> Sizes:
    return {"step": (work.sequences, _convolved(work))}


def gated_delta_rule(work: Work) -> Sizes:
    """The model's heads with the gated delta rule in place of attention, grouped values where its
    keys are."""
    batch, heads, groups = _lines(work)
    dim = work.model.head_dim
    return {"forward": (batch, groups, heads, work.length, dim, dim, "mamba")}


def gated_delta_rule_decode(work: Work) -> Sizes:
    batch, heads, groups = _lines(work)
    dim = work.model.head_dim
    return {"step": (batch, groups, heads, 1, dim, dim, 4)}


def attention_paged(work: Work) -> Sizes:
    """A step behind the tokens, and behind a cache of fp8."""
    model, lengths = work.model, (work.length,) * work.sequences
    point = (lengths, 1, (model.heads, model.kv_heads), model.head_dim, 64)
    return {"step": (*point, "same"), "step, e4m3": (*point, "e4m3")}


def append_kv(work: Work) -> Sizes:
    """Of a step, and of all tokens."""
    model = work.model
    return {
        "step": (work.sequences, 1, model.kv_heads, model.head_dim, "same"),
        "prefill": (work.sequences, work.length, model.kv_heads, model.head_dim, "same"),
    }


def attention_schedule(work: Work) -> Sizes:
    model = work.model
    return {"step": ((work.length,) * work.sequences, model.heads, model.kv_heads, model.head_dim)}


def merge_attention(work: Work) -> Sizes:
    """A shared prefix and the rest, for a step."""
    return {"step": (2, work.sequences, work.model.heads, work.model.head_dim)}


# Linear layers.


def weights(model: Model) -> dict[str, tuple[int, int]]:
    """(N, K) of the dense linear layers' weights, the head's last."""
    width = model.heads * model.head_dim
    layers = {
        "qkv": (width + 2 * model.kv_heads * model.head_dim, model.hidden),
        "o": (model.hidden, width),
    }
    if model.experts:
        layers["router"] = (model.experts, model.hidden)
    else:
        layers["gate_up" if model.gated else "up"] = _up(model)
        layers["down"] = (model.hidden, model.intermediate)
    layers["head"] = (model.vocabulary, model.hidden)
    return layers


def _up(model: Model) -> tuple[int, int]:
    return ((1 + model.gated) * model.intermediate, model.hidden)


def products(work: Work) -> Sizes:
    """(M, N, K) of the dense linear layers."""
    return {name: (work.tokens, *weight) for name, weight in weights(work.model).items()}


def dense_and_fused(work: Work) -> Sizes:
    """The same, and gate_up with its activation in the product."""
    sizes: Sizes = products(work)
    if "gate_up" in sizes:
        sizes["gate_up, fused"] = (*sizes["gate_up"], "swiglu")
    return sizes


def quantised(work: Work) -> Sizes:
    """(M, N, K) of the layers that are quantised: neither router nor head."""
    return {name: x for name, x in products(work).items() if name not in ("router", "head")}


def experts(work: Work) -> Sizes:
    """Experts, tokens of all of them, N, K, and whether they are spread evenly."""
    model = work.model
    if not model.experts:
        raise NotInModelError("the model has no experts, and grouped products are of experts")
    tokens = work.tokens * model.chosen
    down = (model.hidden, model.intermediate)
    layers = {"experts' gate_up": _up(model), "experts' down": down}
    return {name: (model.experts, tokens, *weight, False) for name, weight in layers.items()}


def quantised_and_experts(work: Work) -> Sizes:
    """(M, N, K) of the dense layers, and (groups, M of each, N, K) of the experts."""
    sizes = quantised(work)
    if work.model.experts:
        for name, (count, tokens, n, k, _) in experts(work).items():
            sizes[name] = (count, max(tokens // count, 1), n, k)
    return sizes


# Matrices.


def kept(work: Work) -> Sizes:
    """Rows and columns of the weights that are quantised, those of one expert among them."""
    model = work.model
    sizes: Sizes = {name: x for name, x in weights(model).items() if name not in ("router", "head")}
    if model.experts:
        sizes["an expert's gate_up"] = _up(model)
        sizes["an expert's down"] = (model.hidden, model.intermediate)
    return sizes


def matrices(work: Work) -> Sizes:
    """The activations that go into linear layers, and the weights."""
    model = work.model
    rows = work.tokens * max(model.chosen, 1)
    return {
        "x": (work.tokens, model.hidden),
        "activations": (rows, model.intermediate),
        **kept(work),
    }


# Norms and positions.


def rows(work: Work) -> Sizes:
    """The norm before a layer, and that of the heads of queries and keys."""
    model = work.model
    heads = model.heads + model.kv_heads
    return {
        "hidden": (work.tokens, model.hidden),
        "heads": (work.tokens * heads, model.head_dim),
    }


def rotary(work: Work) -> Sizes:
    """Queries and keys, of all tokens and of a step."""
    model = work.model
    heads = model.heads + model.kv_heads
    sizes = model.head_dim, model.head_dim
    return {
        "forward": (work.sequences, heads, work.length, *sizes),
        "step": (work.sequences, heads, 1, *sizes),
    }


# Cases.


def find(name: str, tokens: int = TOKENS, sequences: int = SEQUENCES) -> Work:
    """The work of a model by its name. ValueError for what there is not."""
    if name not in MODELS:
        raise ValueError(f"--model is {name!r}; expected one of {', '.join(MODELS)}")
    if tokens < 1 or sequences < 1 or tokens % sequences:
        raise ValueError(
            f"--tokens {tokens} are not {sequences} sequences of one length (--sequences)"
        )
    return Work(MODELS[name], tokens, sequences)


def cases(
    suite: Any, work: Work, *, dtype: torch.dtype, options: Mapping[str, Any] | None = None
) -> list[Case]:
    """The suite's cases on the model's sizes, in the order of the suite's own; the names say what
    they are in the model."""
    of_model: Callable[[Work], Sizes] = suite.OF_MODEL
    made = [
        replace(case, name=f"{layer}: {case.name}", parameters={**case.parameters, "layer": layer})
        for layer, size in of_model(work).items()
        for case in suite.cases([size], dtype=dtype, **(options or {}))
    ]
    order = list(dict.fromkeys(case.groups[:1] for case in made))
    return sorted(made, key=lambda case: order.index(case.groups[:1]))
