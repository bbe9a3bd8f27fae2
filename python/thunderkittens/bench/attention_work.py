"""The problems of attention that the suites measure: inputs, peers and the oracle, for both
directions and all options."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from .cases import (
    Case,
    Expected,
    Implementation,
    Inputs,
    NotApplicableError,
    Prepared,
    random_normal,
)
from .choices import dtype_name

SCORES = 1 << 28  # elements of a block of scores in the oracle: 1 GiB in fp32
Attend = Callable[..., Tensor]


@dataclass(frozen=True)
class Point:
    """A problem. `options` are those of `tk.attention`; an option "alibi" or "sink" stands for a
    random tensor. `needs` names the inputs whose gradients are computed. `baseline` is the problem
    that the cost of this one is held against. In memory heads come first, or tokens, and `padding`
    elements lie behind each row."""

    batch: int
    heads: int
    length: int
    dim: int
    causal: bool
    backward: bool = False
    rows: int | None = None
    kv_heads: int | None = None
    value_dim: int | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    needs: str = "qkv"
    name: str = ""
    groups: tuple[str, ...] = ()
    baseline: Point | None = None
    tokens_first: bool = False
    padding: int = 0

    def against(self, **changes: Any) -> Point:
        """This point with the given changes, and itself as the baseline."""
        return replace(self, **changes, baseline=self)

    @property
    def visible(self) -> float:
        """Pairs of a query and a key that it sees, per head."""
        rows, left = self.rows or self.length, dict(self.options).get("window_size", (-1, -1))[0]
        if not self.causal:
            return float(rows * self.length)
        if left >= 0:
            band = min(left, self.length)
            value: float = float(rows) * (band + 1) - band * (band + 1) / 2
            return value
        return rows * (self.length if rows == 1 else self.length / 2)

    @property
    def flops(self) -> float:
        """Two products per visible pair; of a gradient, those that its inputs need."""
        dim, value_dim = self.dim, self.value_dim or self.dim
        per_pair = 2.0 * (dim + value_dim)
        if self.backward:
            dims = {"q": dim, "k": dim, "v": value_dim}
            scores = dim + (value_dim if set(self.needs) & set("qk") else 0)
            per_pair = 2.0 * (scores + sum(dims[name] for name in self.needs))
        return per_pair * self.batch * self.heads * self.visible

    def bytes(self, itemsize: int) -> float:
        rows, value_dim = self.rows or self.length, self.value_dim or self.dim
        kv_heads = self.kv_heads or self.heads
        queries = self.heads * rows * (self.dim + value_dim)
        keys = kv_heads * self.length * (self.dim + value_dim)
        return float(itemsize * self.batch * (queries + keys) * (2 if self.backward else 1))

    def inputs(self, dtype: torch.dtype, generator: torch.Generator) -> Inputs:
        """What implementations take."""
        rows, value_dim = self.rows or self.length, self.value_dim or self.dim
        kv_heads = self.kv_heads or self.heads

        def draw(heads: int, length: int, dim: int) -> Tensor:
            order = (length, heads) if self.tokens_first else (heads, length)
            wide = (self.batch, *order, dim + self.padding)
            x = random_normal(*wide, dtype=dtype, generator=generator)[..., :dim]
            return x.transpose(1, 2) if self.tokens_first else x

        options = dict(self.options)
        for name in {"alibi", "sink"} & set(options):
            vector = random_normal(self.heads, dtype=torch.float32, generator=generator)
            del options[name]
            options["sink" if name == "sink" else "alibi_slopes"] = vector.abs() / 16
        return {
            "q": draw(self.heads, rows, self.dim),
            "k": draw(kv_heads, self.length, self.dim),
            "v": draw(kv_heads, self.length, value_dim),
            "causal": self.causal,
            "options": options,
            "grad_out": draw(self.heads, rows, value_dim) if self.backward else None,
            "needs": self.needs,
            "baseline": self.baseline and self.baseline.inputs(dtype, generator),
        }

    def case(self, dtype: torch.dtype) -> Case:
        """The point as the runner takes it."""
        parameters: dict[str, Any] = {
            "label": str(self.length),
            "direction": "backward" if self.backward else "forward",
            "batch": self.batch,
            "heads": self.heads,
            "length": self.length,
            "head_dim": self.dim,
            "causal": self.causal,
            "dtype": dtype_name(dtype),
        }
        for name in ("rows", "kv_heads", "value_dim"):
            if getattr(self, name):
                parameters[name] = getattr(self, name)
        if self.options:
            parameters["options"] = {name: str(value) for name, value in self.options.items()}
        if self.needs != "qkv":
            parameters["needs"] = self.needs
        return Case(
            name=self.name,
            make_inputs=lambda device, generator: self.inputs(dtype, generator),
            flops=self.flops,
            bytes=self.bytes(dtype.itemsize),
            groups=self.groups,
            parameters=parameters,
            oracle=oracle,
            # Those of the weights, which a gradient computes again.
            exponentials=self.batch * self.heads * self.visible,
        )


# The right answer.


def formula(operands: Sequence[Tensor], causal: bool, options: Mapping[str, Any]) -> Tensor:
    """softmax(q k^T / sqrt(D)) v at the inputs' precision; masks are aligned to the lower right."""
    q, k, v = operands
    left = options.get("window_size", (-1, -1))[0]
    softcap = options.get("softcap", 0.0)
    alibi_slopes, sink = options.get("alibi_slopes"), options.get("sink")
    group = q.shape[1] // k.shape[1]
    if group > 1:
        k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    scores = (q @ k.transpose(-1, -2)) * q.shape[3] ** -0.5
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    rows, columns = scores.shape[2:]
    if causal or alibi_slopes is not None:
        row = torch.arange(columns - rows, columns, device=q.device).unsqueeze(1)
        ahead = torch.arange(columns, device=q.device) - row
        if alibi_slopes is not None:
            scores = scores - (alibi_slopes.view(-1, 1, 1) * ahead.abs()).to(scores.dtype)
        if causal:
            hidden = ahead > 0
            if left >= 0:
                hidden |= ahead < -left
            scores = scores.masked_fill(hidden, -torch.inf)
    if sink is None:
        result: Tensor = scores.softmax(-1) @ v
        return result
    column = sink.to(scores.dtype).view(1, -1, 1, 1).expand(*scores.shape[:3], 1)
    return torch.cat([scores, column], -1).softmax(-1)[..., :-1] @ v


def oracle(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    causal: bool,
    options: Mapping[str, Any],
    grad_out: Tensor | None = None,
    needs: str = "qkv",
    baseline: Inputs | None = None,
) -> Iterator[Expected]:
    """The output or the gradients by blocks of heads, in fp32 and at the inputs' precision."""
    batch, kv_heads = k.shape[:2]
    group = q.shape[1] // kv_heads
    scores = group * q.shape[2] * k.shape[2]
    head_step = max(1, min(kv_heads, SCORES // scores))
    batch_step = max(1, SCORES // (kv_heads * scores))
    for b in range(0, batch, batch_step):
        for h in range(0, kv_heads, head_step):
            index = (slice(b, b + batch_step), slice(h, h + head_step))
            index_q = (index[0], slice(h * group, (h + head_step) * group))
            part = [q[index_q], k[index], v[index]]
            part_options = {
                name: x[index_q[1]] if isinstance(x, Tensor) else x for name, x in options.items()
            }
            if grad_out is None:
                exact = formula([x.float() for x in part], causal, part_options)
                yield Expected(0, index_q, exact, formula(part, causal, part_options))
                continue
            grads = [
                _gradients(
                    [x.to(dtype) for x in part], causal, part_options, grad_out[index_q], needs
                )
                for dtype in (torch.float32, q.dtype)
            ]
            for place, (name, exact, plain) in enumerate(zip(needs, *grads, strict=True)):
                yield Expected(place, index_q if name == "q" else index, exact, plain)


def _gradients(
    part: list[Tensor], causal: bool, options: Mapping[str, Any], grad_out: Tensor, needs: str
) -> tuple[Tensor, ...]:
    with torch.enable_grad():
        leaves = _leaves(part, needs)
        out = formula(leaves, causal, options)
    return torch.autograd.grad(out, [x for x in leaves if x.requires_grad], grad_out.to(out.dtype))


def _leaves(tensors: list[Tensor], needs: str) -> list[Tensor]:
    return [
        x.detach().requires_grad_(name in needs) for x, name in zip(tensors, "qkv", strict=True)
    ]


# Who computes it.


def as_given(x: Tensor) -> Tensor:
    return x


def work(attend: Attend, read: Callable[[Tensor], Tensor] = as_given) -> Prepared:
    """`attend(q, k, v, causal, options)` as an implementation: the call, or, where the inputs have
    a gradient of the output, the backward pass of one that was made before. `read` makes of each
    operand, and of that gradient, what the implementation can read; it is part of the call."""

    def prepare(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        causal: bool,
        options: Mapping[str, Any],
        grad_out: Tensor | None = None,
        needs: str = "qkv",
        baseline: Inputs | None = None,
    ) -> Callable[[], Any]:
        if grad_out is None:
            return lambda: attend(read(q), read(k), read(v), causal, options)
        leaves = _leaves([q, k, v], needs)
        out = attend(*map(read, leaves), causal=causal, options=options)
        wanted = [x for x in leaves if x.requires_grad]
        return lambda: torch.autograd.grad(out, wanted, read(grad_out), retain_graph=True)

    return Prepared(prepare)


def on_baseline(implementation: Prepared) -> Prepared:
    """The same on the case's baseline."""

    def prepare(baseline: Inputs | None = None, **inputs: Any) -> Callable[[], Any]:
        if baseline is None:
            raise NotApplicableError("the case has no baseline")
        return implementation.prepare(**baseline)

    return Prepared(prepare, another_problem=True)


def plain_only(options: Mapping[str, Any]) -> None:
    """Raises NotApplicableError where options ask for what a peer does not have."""
    if set(options) - {"deterministic"}:
        raise NotApplicableError("the peer has no such option")


def readable(x: Tensor) -> Tensor:
    """x, or a copy where its rows are not at multiples of 16 bytes: FlashAttention-2, and cuDNN's
    gradient, end the process's use of the GPU by a misaligned address then, and cuDNN's results are
    wrong."""
    rows = (stride * x.itemsize for stride in x.stride()[:-1])
    aligned = x.data_ptr() % 16 == 0 and all(row % 16 == 0 for row in rows)
    return x if aligned else x.clone(memory_format=torch.contiguous_format)


def sdpa(backend: SDPBackend) -> Prepared:
    """PyTorch's scaled_dot_product_attention held to one back end."""

    def attend(q: Tensor, k: Tensor, v: Tensor, causal: bool, options: Mapping[str, Any]) -> Tensor:
        plain_only(options)
        if causal and q.shape[2] not in (1, k.shape[2]):
            raise NotApplicableError("its mask is aligned to the upper left")
        # Of one query row against all keys, `is_causal` would see the first.
        grouped = q.shape[1] != k.shape[1]
        with sdpa_kernel(backend):
            return F.scaled_dot_product_attention(
                q, k, v, is_causal=causal and q.shape[2] > 1, enable_gqa=grouped
            )

    return work(attend, as_given if backend is SDPBackend.MATH else readable)


def flash_attention_2() -> Prepared:
    """PyTorch's FlashAttention-2 without the checks of scaled_dot_product_attention: masks of the
    lower right corner, windows, and fewer heads of keys."""

    def attend(q: Tensor, k: Tensor, v: Tensor, causal: bool, options: Mapping[str, Any]) -> Tensor:
        plain_only({name: x for name, x in options.items() if name != "window_size"})
        window: dict[str, int] = {}
        if "window_size" in options:
            left, right = options["window_size"]
            window = {"window_size_left": left, "window_size_right": right}
        rows, keys = q.shape[2], k.shape[2]
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        out: Tensor = torch.ops.aten._flash_attention_forward(
            q, k, v, None, None, rows, keys, 0.0, causal, False, scale=q.shape[3] ** -0.5, **window
        )[0]
        return out.transpose(1, 2)

    return work(attend, readable)


def flash_attn(module: str) -> Prepared | None:
    """`flash_attn_func` of a flash-attn package, which takes (B, N, H, D); None without it."""
    try:
        if importlib.util.find_spec(module) is None:
            return None
        function = importlib.import_module(module).flash_attn_func
    except (
        ImportError,
        AttributeError,
        RuntimeError,
        OSError,
    ):  # OSError: a library it needs is missing
        return None

    def attend(q: Tensor, k: Tensor, v: Tensor, causal: bool, options: Mapping[str, Any]) -> Tensor:
        plain_only(options)
        result = function(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), causal=causal)
        out: Tensor = result[0] if isinstance(result, tuple) else result
        return out.transpose(1, 2)

    return work(attend)


def implementations(device: torch.device) -> dict[str, Implementation]:
    """This package's op first, then itself on the baseline, then the peers that are installed."""
    import thunderkittens as tk

    def attend(q: Tensor, k: Tensor, v: Tensor, causal: bool, options: Mapping[str, Any]) -> Tensor:
        result: Tensor = tk.attention(q, k, v, causal=causal, **options)
        return result

    ours = work(attend)
    own = {"thunderkittens": ours, "baseline": on_baseline(ours)}
    if device.type != "cuda":
        return {**own, "PyTorch": sdpa(SDPBackend.MATH)}
    peers = {
        "flash-attn": flash_attn("flash_attn"),
        "flash-attn-3": flash_attn("flash_attn_interface"),
        "flash-attn-4": flash_attn("flash_attn.cute"),
    }
    return {
        **own,
        "cuDNN": sdpa(SDPBackend.CUDNN_ATTENTION),
        "torch flash": sdpa(SDPBackend.FLASH_ATTENTION),
        "FlashAttention-2": flash_attention_2(),
        **{name: peer for name, peer in peers.items() if peer is not None},
    }
