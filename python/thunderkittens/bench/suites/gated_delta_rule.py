"""The gated delta rule and its gradient beside flash-linear-attention, where that is installed, and
a compiled formula of chunks."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .. import models
from ..cases import Case, Expected, Implementation, Inputs, Prepared, random_normal
from ..choices import cases_of, parameters_of
from ..drawn import ANY, Draw, within
from ..host import Differentiable
from .lolcats import forward_or_gradient, gradients

CHUNK = 64
# How fast a head forgets: what a kernel may leave out that is not exact depends on it.
GATES = ("weak", "mamba", "strong")

# Sequences, heads, value heads, length, K, V, gate.
SHAPES: dict[str, list[tuple[int, int, int, int, int, int, str]]] = {
    "default": [
        (1, 16, 32, 8192, 128, 128, "mamba"),
        (1, 16, 32, 32768, 128, 128, "mamba"),
        (4, 16, 64, 8192, 128, 128, "mamba"),
        (8, 32, 32, 4096, 128, 128, "mamba"),
        (1, 2, 8, 32768, 128, 128, "mamba"),
        (1, 2, 8, 32768, 128, 128, "weak"),
    ],
    "rated": [
        (batch, heads, value_heads, length, 128, 128, gate)
        for heads, value_heads in ((2, 8), (4, 16), (8, 32), (16, 64), (16, 32), (16, 16), (32, 32))
        for batch, length in ((1, 2048), (1, 8192), (1, 32768), (4, 8192), (8, 1024))
        for gate in GATES
    ],
    "backward": [
        (1, 2, 4, 8192, 128, 128, "mamba"),
        (1, 2, 4, 32768, 128, 128, "mamba"),
        (1, 8, 16, 32768, 128, 128, "mamba"),
        (1, 16, 32, 8192, 128, 128, "mamba"),
        (1, 16, 32, 32768, 128, 128, "mamba"),
        (8, 16, 32, 4096, 128, 128, "mamba"),
    ],
    "tiny": [(1, 1, 2, 130, 64, 64, "mamba")],
    "tiny_backward": [(1, 1, 2, 130, 64, 64, "mamba")],
}
# The sets that `--save` keeps a file of.
SAVED = ("default", "backward")


DRAWN_CLASSES = (ANY,)
DRAWN_PEERS: tuple[str, ...] = ()  # work per time, over the best of the run
OF_MODEL = models.gated_delta_rule


def log_decay(gate: str, uniform: Tensor) -> Tensor:
    """Log decays of one of GATES, from numbers in [0, 1)."""
    if gate == "weak":
        return -1e-3 * uniform
    if gate == "strong":
        return -5 * uniform
    # -exp(A_log) softplus(.), with A up to 16 and steps of 1e-3 to 0.1.
    heads = torch.linspace(0.1, 16, uniform.shape[1], device=uniform.device).view(1, -1, 1)
    return -heads * 10 ** (-3 + 2 * uniform)


def chunked(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
    """The formula of chunks, a chunk at a time, at the op's precision."""
    from ...reference import delta_rule_operands

    x = delta_rule_operands(q, k, v, g, beta, qk_l2norm=True)
    dtype, state = q.dtype, x.v.new_zeros(*x.v.shape[:2], x.k.shape[3], x.v.shape[3])
    outs = []
    for cq, ck, cv, cg, cb in zip(*(y.split(CHUNK, 2) for y in x), strict=True):
        within_chunk = cg.cumsum(2)
        decay = (within_chunk.unsqueeze(3) - within_chunk.unsqueeze(2)).tril().exp().tril()
        ck, cq, operand = ck.to(dtype), cq.to(dtype), state.to(dtype)
        scores = cb.unsqueeze(3) * (ck @ ck.mT).float() * decay
        identity = torch.eye(cq.shape[2], device=q.device)
        before = within_chunk.exp().unsqueeze(3)
        rest = cb.unsqueeze(3) * (cv - before * (ck @ operand).float())
        new = torch.linalg.solve_triangular(
            identity + scores.tril(-1), rest, upper=False, unitriangular=True
        )
        weights = ((cq @ ck.mT).float() * decay).to(dtype)
        outs.append(before * (cq @ operand).float() + (weights @ new.to(dtype)).float())
        last = within_chunk[:, :, -1:]
        after = ((last - within_chunk).exp().unsqueeze(3) * new).to(dtype)
        state = last.exp().unsqueeze(3) * state + (ck.mT @ after).float()
    return torch.cat(outs, 2).to(dtype)


def oracle(grad_out: Tensor | None = None, **operands: Tensor) -> Iterator[Expected]:
    """The first and the last value heads; of gradients those of q, k and v, of the first and the
    last head with its value heads."""
    from ...reference import gated_delta_rule_chunked

    def exact(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
        return gated_delta_rule_chunked(q, k, v, g, beta, qk_l2norm=True)[0]

    heads, value_heads = operands["q"].shape[1], operands["v"].shape[1]
    ratio = value_heads // heads
    for b, head in ((0, 0), (operands["q"].shape[0] - 1, value_heads - 1)):
        key_head = head // ratio
        values = slice(head, head + 1)
        if grad_out is not None:
            values = slice(key_head * ratio, (key_head + 1) * ratio)
        one = {
            name: x[b : b + 1, slice(key_head, key_head + 1) if name in ("q", "k") else values]
            for name, x in operands.items()
        }
        wide = {name: x.double() for name, x in one.items()}
        if grad_out is None:
            yield Expected(0, (b, head), exact(**wide)[0, 0], chunked(**one)[0, 0])
            continue
        weights = grad_out[b : b + 1, values]
        right, plain = gradients(exact, weights, wide)(), gradients(chunked, weights, one)()
        for i, at in ((0, key_head), (1, key_head), (2, key_head * ratio)):
            yield Expected(i, (b, at), right[i][0, 0], plain[i][0, 0])


def make_case(
    batch: int,
    heads: int,
    value_heads: int,
    length: int,
    keys: int,
    columns: int,
    gate: str,
    dtype: torch.dtype,
    backward: bool = False,
) -> Case:
    """Sequences of so many tokens, with queries and keys that the op normalises; or the gradient,
    with the products that make the states again."""

    def make_inputs(device: torch.device, generator: torch.Generator) -> Inputs:
        def normal(*shape: int, dtype: torch.dtype = dtype) -> Tensor:
            return random_normal(batch, *shape, dtype=dtype, generator=generator)

        numbers = normal(2, value_heads, length, dtype=torch.float32)
        inputs = {
            "q": normal(heads, length, keys),
            "k": normal(heads, length, keys),
            "v": normal(value_heads, length, columns),
            "g": log_decay(gate, numbers[:, 0].sigmoid()),
            "beta": numbers[:, 1].sigmoid(),
        }
        return inputs | ({"grad_out": normal(value_heads, length, columns)} if backward else {})

    tokens, values = batch * heads * length, batch * value_heads * length
    parameters = parameters_of(
        f"{batch}x{heads}/{value_heads}\nx{length}", dtype, batch=batch, heads=heads,
        value_heads=value_heads, length=length, key_dim=keys, value_dim=columns, gate=gate,
    )  # fmt: skip
    return Case(
        name=("backward " if backward else "")
        + f"{batch} x {heads}/{value_heads} x {length} x {keys}x{columns}, {gate}",
        make_inputs=make_inputs,
        flops=2.0 * tokens * 2 * CHUNK * keys
        + 2.0
        * values
        * (
            8 * keys * columns + CHUNK * (5 * columns + 4 * keys)
            if backward
            else columns * (3 * keys + 2 * CHUNK)
        ),
        bytes=(1 + backward)
        * (dtype.itemsize * (2.0 * tokens * keys + 2.0 * values * columns) + 8.0 * values),
        groups=("backward" if backward else gate,),
        parameters=parameters,
        oracle=oracle,
    )


cases = cases_of(SHAPES, make_case, backward=True)


def drawn(draw: Draw) -> Case:
    """Tokens of any number, keys and values of any width, each of the gates."""
    batch, heads, ratio, length = within(
        draw,
        lambda: (draw.size(1, 16), draw.size(1, 32), draw.size(1, 8), draw.size(64, 32768)),
        lambda s: 1 << 14 <= s[0] * s[1] * s[2] * s[3] <= 1 << 21,
    )
    keys, columns = draw.size(8, 128, 8), draw.size(8, 256, 8)
    gate = GATES[draw.size(1, len(GATES)) - 1]
    case = make_case(batch, heads, heads * ratio, length, keys, columns, gate, draw.dtype)
    problem = draw.problem(
        sequences=batch, heads=heads, value_heads=heads * ratio, length=length, key_dim=keys,
        value_dim=columns,
    )  # fmt: skip
    return draw.case(case, problem=problem)


def prepare_fla(**operands: Tensor) -> Callable[[], Any]:
    """flash-linear-attention's kernels, on operands in their own layout."""
    run = importlib.import_module("fla.ops.gated_delta_rule").chunk_gated_delta_rule
    own = {name: x.transpose(1, 2).contiguous() for name, x in operands.items()}
    grad_out = own.pop("grad_out", None)

    def function(**args: Tensor) -> Tensor:
        out: Tensor = run(**args, use_qk_l2norm_in_kernel=True)[0]
        return out

    if grad_out is None:
        return lambda: function(**own).transpose(1, 2)
    backward = gradients(function, grad_out, own)
    return lambda: tuple(x.transpose(1, 2) for x in backward())


def implementations(device: torch.device) -> dict[str, Implementation]:
    """This package's op first, and on a GPU the compiled formula and what is installed."""
    import thunderkittens as tk

    def op(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
        return tk.gated_delta_rule(q, k, v, g, beta, qk_l2norm=True)

    found: dict[str, Implementation] = {"thunderkittens": forward_or_gradient(op)}
    if device.type == "cuda":
        found["torch.compile"] = forward_or_gradient(torch.compile(chunked, dynamic=False))
        if importlib.util.find_spec("fla") is not None:
            found["fla"] = Prepared(prepare_fla)
    else:
        found["formula"] = forward_or_gradient(chunked)
    return found


def host_calls(device: torch.device) -> dict[str, Differentiable]:
    """Calls on 128 tokens of one head, bf16."""
    import thunderkittens as tk

    q, k, v = torch.randn(3, 1, 1, 128, 128, dtype=torch.bfloat16, device=device)
    k = F.normalize(k, dim=-1)
    g, beta = -torch.rand(1, 1, 128, device=device), torch.rand(1, 1, 128, device=device)
    call = Differentiable(lambda *x: tk.gated_delta_rule(*x), (q, k, v, g, beta))
    return {"thunderkittens.gated_delta_rule": call}
