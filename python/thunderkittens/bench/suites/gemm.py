"""GEMM beside cuBLAS (`torch.matmul`), in the four layouts of its operands.

The shapes `weights` and `few` are those of weights of models, with many and with few rows, and
`batched` is a batch of small products. `fused` has one product with each epilogue, beside the same
in PyTorch's own ops; its first case is the product alone, which says what an epilogue costs.

A layout is two letters, one per operand: N is stored as it is multiplied, row by row; T is stored
transposed and passed as a view. NT is what a linear layer does: activations times the transpose of
a weight.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from .. import models
from ..cases import Case, Expected, Implementation, Inputs, random_normal
from ..choices import FEW_ROWS, WEIGHTS, Flag, Names, check_part, parameters_of, sizes_of
from ..drawn import Draw
from ..host import Differentiable

LAYOUTS = ("NN", "NT", "TN", "TT")
SQUARES = (512, 1024, 2048, 4096, 8192)
RATED = (2048, 4096, 8192)  # sizes whose mean ratio is the op's headline
EPILOGUES = ("none", "relu", "gelu", "gelu_tanh", "silu", "swiglu", "residual")
# Of an element of the product; that of swiglu has as many gates as values.
EXPONENTIALS = {"gelu_tanh": 1.0, "silu": 1.0, "swiglu": 0.5}
BATCH = 64  # of the batched products
SHAPES: dict[str, list[tuple[int, int, int]]] = {
    "default": [*((size,) * 3 for size in SQUARES), (4096, 11008, 4096), (4097, 1003, 777)],
    "square": [(size,) * 3 for size in SQUARES],
    "rated": [(size,) * 3 for size in RATED],
    "skinny": [(m, n, k) for n, k in ((4096, 7168), (7168, 2048)) for m in (1, 16, 64, 128, 256)],
    "small": [(size,) * 3 for size in (512, 1024, 2048)],
    "few": [(m, n, k) for n, k in WEIGHTS for m in FEW_ROWS],
    "weights": [(m, n, k) for n, k in WEIGHTS for m in (128, 256, 4096)],
    "batched": [(512,) * 3],
    "fused": [(4096, 14336, 4096)],
    "tiny": [(64, 64, 64), (65, 33, 17)],
}
LARGE = (16384, 16384, 16384)
# The sets that `--save` keeps a file of.
SAVED = ("default", "small", "batched", "few", "weights", "fused")


DRAWN_FORMS = ("plain", "batched", "fused")
DRAWN_DEFAULT = ("plain",)
DRAWN_PEERS = ("cuBLAS", "PyTorch")
OF_MODEL = models.dense_and_fused


CHOICES = (
    Names(LAYOUTS, ("NN", "NT"), "layouts"),
    Flag("large", "add M = N = K = 16384"),
)


def plain(
    a: Tensor, b: Tensor, activation: str | None = None, residual: Tensor | None = None
) -> Tensor:
    """The product and its epilogue by PyTorch's own ops, at the operands' precision."""
    z = torch.matmul(a, b)
    if activation == "swiglu":
        gate, value = z.chunk(2, dim=-1)
        return torch.nn.functional.silu(gate) * value
    if activation is not None:
        functions: dict[str, Callable[[Tensor], Tensor]] = {
            "relu": torch.relu,
            "gelu": torch.nn.functional.gelu,
            "gelu_tanh": lambda x: torch.nn.functional.gelu(x, approximate="tanh"),
            "silu": torch.nn.functional.silu,
        }
        z = functions[activation](z)
    return z if residual is None else z + residual


def oracle(a: Tensor, b: Tensor, **epilogue: Any) -> Iterator[Expected]:
    exact: dict[str, Any] = {
        name: x.float() if isinstance(x, Tensor) else x for name, x in epilogue.items()
    }
    yield Expected(0, slice(None), plain(a.float(), b.float(), **exact), plain(a, b, **epilogue))


def make_case(
    m: int,
    n: int,
    k: int,
    layout: str,
    dtype: torch.dtype,
    *,
    batch: int = 0,
    epilogue: str = "",
    padding: tuple[int, int] = (0, 0),
) -> Case:
    """The product of (m, k) and (k, n), or `batch` of them; `epilogue` is one of EPILOGUES, and
    `padding` what lies between the rows of a and of b in memory."""
    lead = (batch,) if batch else ()

    def operand(
        rows: int, columns: int, kind: str, generator: torch.Generator, pad: int = 0
    ) -> Tensor:
        if kind == "T":
            return operand(columns, rows, "N", generator, pad).mT
        wide = random_normal(*lead, rows, columns + pad, dtype=dtype, generator=generator)
        return wide[..., :columns]

    def make_inputs(device: torch.device, generator: torch.Generator) -> Inputs:
        a = operand(m, k, layout[0], generator, padding[0])
        b = operand(k, n, layout[1], generator, padding[1])
        inputs: Inputs = {"a": a, "b": b}
        if epilogue == "residual":
            inputs["residual"] = operand(m, n, "N", generator)
        elif epilogue not in ("", "none"):
            inputs["activation"] = epilogue
        return inputs

    square = m == n == k
    groups = [layout]
    if square and m in RATED and not batch:
        groups.append(f"{layout}, M=N=K in 2048, 4096, 8192")
    name = f"{layout} {m} x {n} x {k}"
    if batch:
        name = f"{layout} {batch} x ({m} x {n} x {k})"
    if epilogue:
        name += f", {epilogue}"
    parameters = parameters_of(
        epilogue or (str(m) if square else f"{m}x{n}\nx{k}"), dtype, m=m, n=n, k=k, layout=layout,
    )  # fmt: skip
    return Case(
        name=name,
        make_inputs=make_inputs,
        flops=2.0 * m * n * k * max(batch, 1),
        bytes=dtype.itemsize * float(m * k + k * n + m * n) * max(batch, 1),
        groups=tuple(groups),
        parameters=parameters,
        oracle=oracle,
        exponentials=float(m * n * max(batch, 1)) * EXPONENTIALS.get(epilogue, 0.0),
    )


def linear(sizes: Sequence[int], layout: str) -> tuple[int, int, int]:
    """(M, N, K) of the product that has this layout where a linear layer takes k elements of each
    token to n: the layer's is NT, that of its input's gradient NN, of its weight's TN."""
    tokens, n, k = sizes
    return {"NN": (tokens, k, n), "TN": (n, k, tokens)}.get(layout, (tokens, n, k))


def cases(
    shapes: str | list[Any] = "default",
    *,
    dtype: torch.dtype = torch.bfloat16,
    layouts: Sequence[str] = ("NN", "NT"),
    large: bool = False,
) -> list[Case]:
    """The cases of a set of shapes in each layout, or of the given linear layers. ValueError for a
    name there is not."""
    check_part("layout", layouts, LAYOUTS)
    if not isinstance(shapes, str):
        return [
            make_case(*linear(size[:3], layout), layout, dtype, epilogue=(*size, "")[3])
            for layout in layouts
            for size in shapes
            if layout == "NT" or len(size) == 3
        ]
    sizes = sizes_of(SHAPES, shapes) + ([LARGE] if large else [])
    batch = BATCH if shapes == "batched" else 0
    epilogues = EPILOGUES if shapes == "fused" else ("",)
    return [
        make_case(*size, layout, dtype, batch=batch, epilogue=epilogue)
        for layout in layouts
        for size in sizes
        for epilogue in epilogues
    ]


def drawn(draw: Draw) -> Case:
    """A product of any layout; in class `aligned` each dimension that is contiguous in an operand
    or in the result is a multiple of 8, and so are the pitches."""
    layout, form = draw.choice(LAYOUTS), draw.form
    high = 2048 if form == "batched" else 10000
    batch = draw.size(2, 64) if form == "batched" else 0
    epilogue = draw.choice(EPILOGUES[1:]) if form == "fused" else ""
    gated = epilogue == "swiglu"
    unit = 8 if draw.aligned else 1
    m = draw.size(32, high, unit if layout[0] == "T" else 1)
    n = draw.size(32, high, unit * 2 if gated else unit)
    k = draw.size(32, high, unit if layout[0] == "N" or layout[1] == "T" else 1)
    padding = (draw.padding(8), draw.padding(8))
    pitches = (
        (k if layout[0] == "N" else m) + padding[0],
        (n if layout[1] == "N" else k) + padding[1],
    )
    case = make_case(m, n, k, layout, draw.dtype, batch=batch, epilogue=epilogue, padding=padding)
    text = case.name + "".join(f", {x} + {p}" for x, p in zip("ab", padding, strict=True) if p)
    problem = draw.problem(
        m=m, n=n, k=k, batch=max(batch, 1), out_dtype=draw.code, a_m_major=layout[0] == "T",
        b_n_major=layout[1] == "N", gate=int(gated), fused=bool(epilogue),
        a_alignment=alignment(pitches[0], padding[0]),
        b_alignment=alignment(pitches[1], padding[1]),
        a_needs_copy=pitches[0] % 8 != 0, b_needs_copy=pitches[1] % 8 != 0,
    )  # fmt: skip
    return draw.case(case, f"{text}, {draw.code}", layout, problem=problem, pitches=list(pitches))


def alignment(pitch: int, padding: int) -> int:
    """The bytes that rows of 16-bit elements begin at multiples of where the product reads them, at
    most 128: the op copies rows that are no multiple of 16 bytes apart, to lines unless that made
    them a quarter longer."""
    if pitch % 8 != 0:
        vectors = -(-(pitch - padding) // 8) * 8
        lines = -(-vectors // 64) * 64
        pitch = lines if lines * 4 <= vectors * 5 else vectors
    return math.gcd(pitch * 2, 128)


def implementations(device: torch.device) -> dict[str, Implementation]:
    """This package's op first, then the peers."""
    import thunderkittens as tk

    return {
        "thunderkittens": tk.gemm,
        "cuBLAS" if device.type == "cuda" else "PyTorch": plain,
    }


def host_calls(device: torch.device) -> dict[str, Differentiable]:
    """Products of 128 x 128 x 128, bf16, as a linear layer has them: `x @ w.t()`."""
    import thunderkittens as tk

    x, w, r = (torch.randn(128, 128, dtype=torch.bfloat16, device=device) for _ in range(3))
    bias = torch.randn(128, dtype=torch.bfloat16, device=device)
    ours: dict[str, tuple[Callable[..., Tensor], tuple[Tensor, ...]]] = {
        "": (lambda x, w: tk.gemm(x, w.t()), (x, w)),
        ", bias": (lambda x, w, bias: tk.gemm(x, w.t(), bias=bias), (x, w, bias)),
        ", bias and gelu": (
            lambda x, w, bias: tk.gemm(x, w.t(), bias=bias, activation="gelu"),
            (x, w, bias),
        ),
        ", swiglu": (lambda x, w: tk.gemm(x, w.t(), activation="swiglu"), (x, w)),
        ", residual": (lambda x, w, r: tk.gemm(x, w.t(), residual=r), (x, w, r)),
    }
    return {
        **{f"thunderkittens.gemm{name}": Differentiable(*call) for name, call in ours.items()},
        "torch.matmul": Differentiable(lambda x, w: torch.matmul(x, w.t()), (x, w)),
        "torch.nn.functional.linear": Differentiable(torch.nn.functional.linear, (x, w, bias)),
    }
