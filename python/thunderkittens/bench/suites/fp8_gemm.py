"""fp8 GEMM beside cuBLAS (`torch._scaled_mm`, `torch.nn.functional.scaled_mm`).

A weight (N, K) is multiplied with M rows; both are quantised from random normal values. Kinds:
`tensor` and `row` scales with the sums left to the tensor cores ("fast") or promoted ("accurate"),
and `block`, 1 x 128 of the rows with 128 x 128 of the weight. `grouped_block` and `grouped_row` are
products of groups of M rows with a weight each, sums promoted.

cuBLAS has other kernels for scales of rows than for those of tensors, and either may be the faster.
"cuBLAS, other scales" times the other kind beside it in the same rounds, since clocks and power
change from case to case: the same scale for all rows, or one scale in place of those of rows.

The tensor cores take 8-bit operands with K contiguous alone. The shapes `majors` have others beside
them, named by two letters: a's, N where its rows are contiguous, and b's, T where it is a weight
that is transposed by a view. So NT is what they take; the op transposes others in a pass before the
product, and a user of cuBLAS copies them. "copy" copies as many bytes as are to be transposed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from .. import models
from ..cases import (
    Case,
    Expected,
    Implementation,
    Inputs,
    NotApplicableError,
    Prepared,
    random_normal,
)
from ..choices import PRODUCTS, Names, check_part, product_case, sizes_of
from ..drawn import Draw, within
from ..host import Differentiable

KINDS = ("fast", "accurate", "fast_row", "accurate_row", "block", "grouped_block", "grouped_row")
SHAPES = PRODUCTS | {"majors": [(4096, 8192, 8192), (4096, 7168, 2048), (16, 8192, 8192)]}
# The sets that `--save` keeps a file of.
SAVED = ("default", "skinny", "majors")

# Orders of a and b in memory, and the kinds that are measured in all of them.
MAJORS = ("NT", "NN", "TT", "TN")
KINDS_OF_MAJORS = ("fast", "accurate")

# Of the grouped kinds: groups, rows of each, N, K.
GROUPED: dict[str, list[tuple[int, int, int, int]]] = {
    "default": [(8, 4096, 4096, 7168)],
    "rated": [(8, 4096, 4096, 7168)],
    "skinny": [(8, 64, 4096, 7168)],
    "majors": [],
    "tiny": [(3, 40, 48, 272)],
}


DRAWN_FORMS = KINDS
DRAWN_PEERS = (
    "cuBLAS",
    "cuBLAS behind copies",
    "cuBLAS blocks",
    "PyTorch grouped",
    "PyTorch",
)
OF_MODEL = models.quantised_and_experts


CHOICES = (Names(KINDS),)


def _quantised(kind: str, x: Tensor, is_weight: bool) -> tuple[Tensor, Tensor]:
    import thunderkittens as tk

    granularity = "row" if kind.endswith("_row") else "tensor"
    if kind.endswith("block"):
        granularity = "128x128" if is_weight else "1x128"
    codes, scale = tk.fp8_quantize(x, granularity)
    return codes, scale.reshape(1, 1) if granularity == "tensor" else scale


def make_case(m: int, n: int, k: int, kind: str, dtype: torch.dtype, major: str = "") -> Case:
    """The product of (m, k) and the transpose of (n, k), in one of `MAJORS` or, without, in NT."""

    def make_inputs(device: torch.device, generator: torch.Generator) -> Inputs:
        x = random_normal(m, k, dtype=dtype, generator=generator)
        w = random_normal(n, k, dtype=dtype, generator=generator)
        a, scale_a = _quantised(kind, x, False)
        b, scale_b = _quantised(kind, w, True)
        return {
            "a": a.t().contiguous().t() if major.startswith("T") else a,
            "b": b.t().contiguous() if major.endswith("N") else b.t(),
            "scale_a": scale_a,
            "scale_b": scale_b.t(),
            "accurate": not kind.startswith("fast"),
        }

    def oracle(
        a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, accurate: bool
    ) -> Iterator[Expected]:
        import thunderkittens as tk

        exact = tk.reference.fp8_gemm(a, b, scale_a, scale_b, out_dtype=torch.float32)
        # What the formula of plain PyTorch would give for operands rounded to bfloat16.
        plain = exact.to(dtype)
        # A step of 32 of k cuts the sum that the tensor cores keep to 13 bits (docs/numerics.md).
        # Cuts go towards zero and add up over all steps; promoted, over four steps.
        steps = min(k, 128) / 32 if accurate else k / 32
        yield Expected(0, slice(None), exact, plain, allowance=steps * 2.0**-13)

    return product_case(
        m,
        n,
        k,
        f"{kind} {major}".rstrip(),
        dtype,
        operands="fp8",
        bytes_moved=float(m * k + k * n + 2 * m * n),
        make_inputs=make_inputs,
        oracle=oracle,
    )


def make_grouped_case(groups: int, m: int, n: int, k: int, kind: str, dtype: torch.dtype) -> Case:
    """`groups` times the product of (m, k) and the transpose of (n, k)."""

    def make_inputs(device: torch.device, generator: torch.Generator) -> Inputs:
        x = random_normal(groups * m, k, dtype=dtype, generator=generator)
        a, scale_a = _quantised(kind, x, False)
        del x
        codes, scales = [], []
        for _ in range(groups):
            w = random_normal(n, k, dtype=dtype, generator=generator)
            b, scale_b = _quantised(kind, w, True)
            codes.append(b.view(torch.uint8))
            scales.append(scale_b)
        return {
            "a": a,
            "b": torch.stack(codes).view(a.dtype).mT,
            "scale_a": scale_a,
            "scale_b": torch.stack(scales).mT,
            "offs": torch.arange(1, groups + 1, device=device, dtype=torch.int32) * m,
        }

    def oracle(
        a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, offs: Tensor
    ) -> Iterator[Expected]:
        import thunderkittens as tk

        for group in range(groups):
            rows = slice(group * m, (group + 1) * m)
            exact = tk.reference.fp8_gemm(
                a[rows], b[group], scale_a[rows], scale_b[group], out_dtype=torch.float32
            )
            allowance = min(k, 128) / 32 * 2.0**-13
            yield Expected(0, rows, exact, exact.to(dtype), allowance=allowance)

    return product_case(
        m,
        n,
        k,
        kind,
        dtype,
        groups=groups,
        operands="fp8",
        bytes_moved=float(groups * (m * k + k * n + 2 * m * n)),
        make_inputs=make_inputs,
        oracle=oracle,
    )


def cases(
    shapes: str | list[Any] = "default",
    *,
    dtype: torch.dtype = torch.bfloat16,
    kinds: Sequence[str] = KINDS,
) -> list[Case]:
    """The cases of a set of shapes of each kind, or of given sizes, four of a grouped product.
    ValueError for a name there is not."""
    check_part("kind", kinds, KINDS)
    if isinstance(shapes, str):
        sizes, grouped = sizes_of(SHAPES, shapes), GROUPED[shapes]
    else:
        sizes = [size for size in shapes if len(size) == 3]
        grouped = [size for size in shapes if len(size) == 4]
    selected = []
    for kind in kinds:
        if kind.startswith("grouped"):
            selected += [make_grouped_case(*size, kind, dtype) for size in grouped]
        elif shapes == "majors":
            majors = MAJORS if kind in KINDS_OF_MAJORS else ()
            selected += [make_case(*s, kind, dtype, major) for s in sizes for major in majors]
        else:
            selected += [make_case(*size, kind, dtype) for size in sizes]
    return selected


def drawn(draw: Draw) -> Case:
    """A product of one of the kinds. The peer takes multiples of 16 as N and K, of 128 as K with
    scales of blocks; in class `any` the operands of some kinds lie in other orders than NT."""
    kind = draw.form
    unit = 128 if kind.endswith("block") else 16
    groups = draw.size(2, 32) if kind.startswith("grouped") else 0
    m, n, k = within(
        draw,
        lambda: (
            draw.size(1, 2048 if groups else 8192),
            draw.size(64, 16384, 16),
            draw.size(128, 16384, unit),
        ),
        lambda s: max(groups, 1) * (s[1] * s[2] + s[0] * s[1]) <= 1 << 30,
    )
    major = draw.choice(MAJORS) if not draw.aligned and kind in KINDS_OF_MAJORS else ""
    if groups:
        case = make_grouped_case(groups, m, n, k, kind, torch.bfloat16)
    else:
        case = make_case(m, n, k, kind, torch.bfloat16, major)
    problem = {
        "m": m * max(groups, 1),
        "n": n,
        "k": k,
        "groups": max(groups, 1),
        "accurate": not kind.startswith("fast"),
        "blockwise": kind.endswith("block"),
        "grouped": bool(groups),
    }
    return draw.case(case, case.name, problem=problem)


def _to_transpose(a: Tensor, b: Tensor) -> list[Tensor]:
    """The operands whose K is not contiguous, as matrices of rows."""
    return [x for x, along_k in ((a.mT, a.stride(-1)), (b, b.stride(-2))) if along_k != 1]


def _cublas(
    a: Tensor,
    b: Tensor,
    scale_a: Tensor,
    scale_b: Tensor,
    accurate: bool = True,
    offs: Tensor | None = None,
) -> Tensor:
    if offs is not None:
        raise NotApplicableError("groups: see PyTorch grouped")
    if _to_transpose(a, b):
        raise NotApplicableError("other orders: see cuBLAS behind copies")
    if scale_a.shape[1] == 1:
        return torch._scaled_mm(
            a, b, scale_a, scale_b, out_dtype=torch.bfloat16, use_fast_accum=not accurate
        )
    raise NotApplicableError("scales of blocks: see cuBLAS blocks")


def _cublas_other(
    a: Tensor,
    b: Tensor,
    scale_a: Tensor,
    scale_b: Tensor,
    accurate: bool = True,
    offs: Tensor | None = None,
) -> Any:
    if offs is not None or scale_a.shape[1] != 1 or _to_transpose(a, b):
        raise NotApplicableError("neither scales of tensors nor of rows, or other orders")
    if scale_a.shape[0] > 1:
        scale_a, scale_b = scale_a[:1], scale_b[:, :1]
    else:
        scale_a = scale_a.repeat(a.shape[0], 1)
        scale_b = scale_b.repeat(1, b.shape[1])
    return lambda: _cublas(a, b, scale_a, scale_b, accurate)


def _cublas_behind_copies(
    a: Tensor, b: Tensor, offs: Tensor | None = None, **others: Any
) -> Tensor:
    if offs is not None or not _to_transpose(a, b):
        raise NotApplicableError("K is contiguous: see cuBLAS")
    return _cublas(a.contiguous(), b.t().contiguous().t(), **others)


def _copy(a: Tensor, b: Tensor, offs: Tensor | None = None, **others: Any) -> Callable[[], Any]:
    sources = [] if offs is not None else [x.view(torch.uint8) for x in _to_transpose(a, b)]
    if not sources:
        raise NotApplicableError("nothing is transposed")
    targets = [torch.empty_like(x) for x in sources]
    return lambda: [to.copy_(x) for to, x in zip(targets, sources, strict=True)]


def _cublas_blocks(
    a: Tensor,
    b: Tensor,
    scale_a: Tensor,
    scale_b: Tensor,
    accurate: bool = True,
    offs: Tensor | None = None,
) -> Any:
    if offs is not None:
        raise NotApplicableError("groups: see PyTorch grouped")
    if scale_a.shape[1] == 1:
        raise NotApplicableError("scales of tensors and rows: see cuBLAS")
    from torch.nn import functional
    from torch.nn.functional import ScalingType

    # Blocks of k adjacent in memory, and padded to a multiple of four.
    padded = torch.nn.functional.pad(scale_b.t(), (0, -scale_b.shape[0] % 4)).contiguous().t()
    by_column = scale_a.t().contiguous().t()
    return lambda: functional.scaled_mm(
        a,
        b,
        by_column,
        ScalingType.BlockWise1x128,
        padded,
        ScalingType.BlockWise128x128,
        output_dtype=torch.bfloat16,
    )


def _grouped(
    a: Tensor,
    b: Tensor,
    scale_a: Tensor,
    scale_b: Tensor,
    accurate: bool = True,
    offs: Tensor | None = None,
) -> Tensor:
    if offs is None:
        raise NotApplicableError("no groups: see cuBLAS")
    if scale_a.shape[1] != 1:
        raise NotApplicableError("PyTorch has no grouped product with scales of blocks")
    return torch._scaled_grouped_mm(
        a, b, scale_a.flatten(), scale_b.flatten(1), offs=offs, out_dtype=torch.bfloat16
    )


def implementations(device: torch.device) -> dict[str, Implementation]:
    """This package's op first, then the peers."""
    import thunderkittens as tk

    def ours(
        a: Tensor,
        b: Tensor,
        scale_a: Tensor,
        scale_b: Tensor,
        accurate: bool = True,
        offs: Tensor | None = None,
    ) -> Tensor:
        return tk.fp8_gemm(a, b, scale_a, scale_b, accurate=accurate, offs=offs)

    if device.type != "cuda":
        return {
            "thunderkittens": ours,
            "PyTorch": lambda a, b, scale_a, scale_b, accurate=True, offs=None: (
                tk.reference.fp8_gemm(a, b, scale_a, scale_b, offs=offs)
            ),
        }
    return {
        "thunderkittens": ours,
        "cuBLAS": _cublas,
        "cuBLAS, other scales": Prepared(_cublas_other, another_problem=True),
        "cuBLAS behind copies": _cublas_behind_copies,
        "copy": Prepared(_copy, another_problem=True),
        "cuBLAS blocks": Prepared(_cublas_blocks),
        "PyTorch grouped": _grouped,
    }


def host_calls(device: torch.device) -> dict[str, Callable[[], Any] | Differentiable]:
    """Calls on a problem of 128 x 128 x 128, of the product and of the linear layer on it."""
    import thunderkittens as tk

    x, w = (torch.randn(128, 128, dtype=torch.bfloat16, device=device) for _ in range(2))
    a, scale = tk.fp8_quantize(x, "tensor")
    calls: dict[str, Callable[[], Any] | Differentiable] = {
        "thunderkittens.fp8_gemm": lambda: tk.fp8_gemm(a, a.t(), scale, scale),
        "thunderkittens.fp8_linear": Differentiable(lambda x, w: tk.fp8_linear(x, w), (x, w)),
        "torch.nn.functional.linear": Differentiable(torch.nn.functional.linear, (x, w)),
    }
    if device.type == "cuda":
        calls["torch._scaled_mm"] = lambda: torch._scaled_mm(
            a, a.t(), scale, scale, out_dtype=torch.bfloat16
        )
    return calls
