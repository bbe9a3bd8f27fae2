"""LoLCATS and its gradient beside causal attention and a compiled formula in linear time.

The attention is on the same queries, keys and values: what LoLCATS is put in place of. It is
another problem, whose time grows with the square of the length.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import torch._functorch.config as functorch_config
import torch.nn.functional as F
from torch import Tensor

from .. import models
from ..cases import Case, Expected, Implementation, Inputs, Prepared, random_normal
from ..choices import cases_of, parameters_of
from ..drawn import ANY, Draw, within
from ..host import Differentiable

WINDOW = 64

# Batch, heads, heads of keys, length, head dimension, features of one sign.
SHAPES: dict[str, list[tuple[int, int, int, int, int, int]]] = {
    "default": [
        (16, 16, 16, 1024, 128, 64),
        (16, 16, 16, 4096, 128, 64),
        (16, 16, 16, 16384, 128, 64),
        (1, 32, 32, 8192, 128, 64),
        (1, 32, 8, 8192, 128, 64),
        (16, 16, 16, 4096, 64, 32),
    ],
    "rated": [(16, 16, 16, length, 128, 64) for length in (1024, 4096, 16384)]
    + [(1, 32, 32, 8192, 128, 64)],
    "backward": [(16, 16, 16, length, 128, 64) for length in (1024, 4096, 16384)]
    + [(1, 32, 32, 8192, 128, 64), (16, 16, 16, 4096, 64, 32)],
    "tiny": [(1, 2, 1, 130, 64, 32)],
    "tiny_backward": [(1, 2, 2, 130, 64, 32)],
}
# The sets that `--save` keeps a file of.
SAVED = ("default", "backward")


DRAWN_FORMS = ("forward", "backward")
DRAWN_CLASSES = (ANY,)
DRAWN_PEERS: tuple[str, ...] = ()  # work per time, over the best of the run
OF_MODEL = models.lolcats


def chunked(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_map: Tensor,
    k_map: Tensor,
    alpha: Tensor,
    beta: Tensor,
) -> Tensor:
    """The formula at the op's precision in linear time, by blocks of 64 tokens."""
    length, dim, dtype = q.shape[2], q.shape[3], q.dtype
    group = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(group, 1) for x in (k, v))

    def features(x: Tensor, weight: Tensor) -> Tensor:
        z = (x @ weight[:, None]).float()
        return torch.cat([z.softmax(-1), (-z).softmax(-1)], -1).to(dtype)

    q, k, v = (F.pad(x, (0, 0, 0, -length % WINDOW)).unflatten(2, (-1, WINDOW)) for x in (q, k, v))
    phi_q, phi_k = features(q, q_map), features(k, k_map)

    def two_before(x: Tensor) -> Tensor:
        sums = x.cumsum(2)
        return F.pad(sums, (0, 0) * (x.dim() - 3) + (2, 0))[:, :, :-2]

    a, b = alpha[:, None, None, None], beta[:, None, None, None]
    state = (a * two_before((phi_k.mT @ v).float())).to(dtype)
    total = two_before(phi_k.float().sum(3))
    before_k, before_v = (F.pad(x, (0, 0, 0, 0, 1, 0))[:, :, :-1] for x in (k, v))
    scores = torch.cat([q @ before_k.mT, q @ k.mT], -1).float() / math.sqrt(dim)
    mask = torch.ones(WINDOW, 2 * WINDOW, dtype=torch.bool, device=q.device).tril(WINDOW)
    mask = mask.repeat(scores.shape[2], 1, 1)
    mask[0, :, :WINDOW] = False
    scores = scores.masked_fill(~mask, -math.inf)
    weights = b * (scores - scores.amax(-1, keepdim=True)).exp()
    out = (weights.to(dtype) @ torch.cat([before_v, v], 3)).float() + (phi_q @ state).float()
    denominator = weights.sum(-1) + a[..., 0] * (phi_q.float() * total.unsqueeze(3)).sum(-1)
    return (out / denominator.unsqueeze(-1)).to(dtype).flatten(2, 3)[:, :, :length]


def oracle(grad_out: Tensor | None = None, **operands: Tensor) -> Iterator[Expected]:
    """The first and the last heads: the whole matrix of weights fits no memory. Of gradients, those
    of q, k and v; the others are sums over the batch."""
    from ...reference import lolcats

    q, k = operands["q"], operands["k"]
    for b, h in ((0, 0), (q.shape[0] - 1, q.shape[1] - 1)):
        one = {name: operands[name][b, h][None, None] for name in ("q",)}
        kv = h * k.shape[1] // q.shape[1]
        one |= {name: operands[name][b, kv][None, None] for name in ("k", "v")}
        one |= {n: operands[n][h][None] for n in ("q_map", "k_map", "alpha", "beta")}
        wide: dict[str, Any] = {name: x.float() for name, x in one.items()}
        if grad_out is None:
            yield Expected(0, (b, h), lolcats(**wide)[0, 0], chunked(**one)[0, 0])
            continue
        weights = grad_out[b, h][None, None]
        exact, plain = gradients(lolcats, weights, wide)(), gradients(chunked, weights, one)()
        for i in range(3):
            yield Expected(i, (b, h), exact[i][0, 0], plain[i][0, 0])


def gradients(
    function: Callable[..., Tensor], grad_out: Tensor, operands: Mapping[str, Tensor]
) -> Callable[[], tuple[Tensor, ...]]:
    """The backward pass, of a forward pass that this runs; whose graph, also where it is compiled,
    is kept from one call to the next."""
    with torch.enable_grad(), functorch_config.patch(donated_buffer=False):
        leaves = {name: x.detach().requires_grad_() for name, x in operands.items()}
        out = function(**leaves)
    weights = grad_out.to(out.dtype)

    def run() -> tuple[Tensor, ...]:
        wanted = list(leaves.values())
        grads = torch.autograd.grad(out, wanted, weights, retain_graph=True, allow_unused=True)
        return tuple(x for x in grads if x is not None)

    return run


def forward_or_gradient(function: Callable[..., Tensor], another_problem: bool = False) -> Prepared:
    """Times a function, or where there is a gradient of its output its backward pass; that of
    another problem apart."""

    def prepare(grad_out: Tensor | None = None, **operands: Tensor) -> Callable[[], Any]:
        if grad_out is None:
            return lambda: function(**operands)
        return gradients(function, grad_out, operands)

    return Prepared(prepare, another_problem, apart=another_problem)


def make_case(
    batch: int,
    heads: int,
    kv_heads: int,
    length: int,
    dim: int,
    features: int,
    dtype: torch.dtype,
    backward: bool = False,
) -> Case:
    """LoLCATS on (batch, heads, length) tokens, or its gradient: of each product two, and again the
    scores, projections and sums."""

    def make_inputs(device: torch.device, generator: torch.Generator) -> Inputs:
        def normal(*shape: int) -> Tensor:
            return random_normal(*shape, dtype=dtype, generator=generator)

        inputs = {"q": normal(batch, heads, length, dim)}
        inputs |= {name: normal(batch, kv_heads, length, dim) for name in ("k", "v")}
        inputs |= {n: normal(heads, dim, features) / math.sqrt(dim) for n in ("q_map", "k_map")}
        ones = torch.ones(heads, device=inputs["q"].device)
        inputs |= {"alpha": 0.9 * ones, "beta": 0.1 * ones}
        return inputs | ({"grad_out": normal(batch, heads, length, dim)} if backward else {})

    tokens, times = batch * heads * length, (2.5 if backward else 1.0)
    parameters = parameters_of(
        f"{batch}x{heads}\nx{length}", dtype, batch=batch, heads=heads, kv_heads=kv_heads,
        length=length, head_dim=dim, features=features,
    )  # fmt: skip
    return Case(
        name=("backward " if backward else "")
        + f"{batch} x {heads} x {length} x {dim}"
        + (f", {kv_heads} heads of keys" if kv_heads < heads else ""),
        make_inputs=make_inputs,
        flops=2.0
        * tokens
        * dim
        * ((6 if backward else 2) * features + times * 4 * (WINDOW + features)),
        bytes=dtype.itemsize * batch * length * dim * (2.0 * heads + 2 * kv_heads) * (1 + backward),
        groups=("backward" if backward else "forward",),
        parameters=parameters,
        oracle=oracle,
        # Of the window, and of both signs of features of queries and, as often, of keys.
        exponentials=tokens * (1.5 * WINDOW + 4.0 * features),
    )


cases = cases_of(SHAPES, make_case, backward=True)


def drawn(draw: Draw) -> Case:
    """Tokens of any number; both head dimensions and numbers of features that there are."""
    batch, kv_heads, group, length = within(
        draw,
        lambda: (
            draw.size(1, 32),
            draw.size(1, 32),
            draw.choice((1, 1, 2, 4, 8)),
            draw.size(16, 16384),
        ),
        lambda s: 1 << 14 <= s[0] * s[1] * s[2] * s[3] <= 1 << 21,
    )
    dim, features = draw.choice((64, 128)), draw.choice((32, 64))
    backward, heads = draw.form == "backward", kv_heads * group
    case = make_case(batch, heads, kv_heads, length, dim, features, draw.dtype, backward)
    problem = draw.problem(
        batch=batch, heads=heads, kv_heads=kv_heads, length=length, head_dim=dim, features=features
    )
    known = {} if backward else {"problem": problem}
    return draw.case(case, f"{case.name}, {features} features, {draw.code}", **known)


def attention_on(q: Tensor, k: Tensor, v: Tensor, **rest: Tensor) -> Tensor:
    """Causal attention on the same operands."""
    import thunderkittens as tk

    return tk.attention(q, k, v, causal=True)


def implementations(device: torch.device) -> dict[str, Implementation]:
    """This package's op first, then its own attention, and on a GPU the compiled formula."""
    import thunderkittens as tk

    found: dict[str, Implementation] = {
        "thunderkittens": forward_or_gradient(tk.lolcats),
        "attention": forward_or_gradient(attention_on, another_problem=True),
    }
    if device.type == "cuda":  # compiled at the first call
        found["torch.compile"] = forward_or_gradient(torch.compile(chunked, dynamic=False))
    return found


def small_operands(device: torch.device, length: int) -> tuple[Tensor, ...]:
    """Of one head, bf16."""
    options: dict[str, Any] = {"dtype": torch.bfloat16, "device": device}
    tokens = (torch.randn(1, 1, length, 128, **options) for _ in "qkv")
    maps = (torch.randn(1, 128, 64, **options) / 12 for _ in "qk")
    return (*tokens, *maps, torch.ones(1, device=device), torch.ones(1, device=device))


def host_calls(device: torch.device) -> dict[str, Differentiable]:
    """Calls on 128 tokens of one head, bf16."""
    import thunderkittens as tk

    operands = small_operands(device, 128)
    return {"thunderkittens.lolcats": Differentiable(lambda *x: tk.lolcats(*x), operands)}
