"""Grouped products beside PyTorch's (`torch.nn.functional.grouped_mm`).

As a mixture of experts has them: tokens, sorted by expert, times each expert's weight (N, K), and
in training the gradients of both. `forward` is 2D x 3D with the weights stored transposed, `input`
the gradient of the tokens (2D x 3D), `weight` that of the weights (2D x 2D, K grouped), `columns`
the forward with tokens as columns (3D x 2D).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

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
from ..choices import Names, cases_of, parameters_of
from ..drawn import Draw, within
from ..host import Differentiable

FORMS = ("forward", "input", "weight", "columns")
#: Experts, tokens of all of them, N, K, and whether the tokens are spread evenly.
SHAPES: dict[str, list[tuple[int, int, int, int, bool]]] = {
    "default": [
        (8, 32768, 4096, 7168, True),
        (64, 32768, 4096, 2048, False),
        (64, 8192, 4096, 2048, False),
    ],
    "rated": [
        (8, 32768, 4096, 7168, True),
        (64, 32768, 4096, 2048, False),
    ],
    "few": [(64, tokens, 4096, 2048, False) for tokens in (64, 512, 2048)],
    "tiny": [(3, 96, 64, 48, True), (5, 100, 40, 64, False)],
}


DRAWN_FORMS = FORMS
DRAWN_PEERS = ("PyTorch",)
OF_MODEL = models.experts


CHOICES = (Names(FORMS, name="forms"),)


def group_ends(experts: int, tokens: int, even: bool) -> list[int]:
    """Ends of the groups of tokens. Uneven ones are multiples of 8, which the peer needs, and their
    sizes fall from the first expert to the last like 1 / (1 + i / 4)."""
    weights = [1.0 if even else 1 / (1 + i / 4) for i in range(experts)]
    ends, total = [], 0.0
    for weight in weights:
        total += weight
        ends.append(int(tokens * total / sum(weights)) // 8 * 8)
    return [*ends[:-1], tokens]


def oracle(a: Tensor, b: Tensor, offs: Tensor) -> Iterator[Expected]:
    import thunderkittens as tk

    exact = tk.reference.grouped_gemm(a.float(), b.float(), offs)
    # What the formula of plain PyTorch gives, which rounds a sum in float32.
    yield Expected(0, slice(None), exact, exact.to(a.dtype))


def make_case(
    experts: int,
    tokens: int,
    n: int,
    k: int,
    even: bool,
    form: str,
    dtype: torch.dtype,
    given_ends: Sequence[int] = (),
) -> Case:
    """tokens x k times an n x k weight for each expert; the groups may be given."""

    def make_inputs(device: torch.device, generator: torch.Generator) -> Inputs:
        def normal(*shape: int) -> Tensor:
            return random_normal(*shape, dtype=dtype, generator=generator)

        ends = list(given_ends) or group_ends(experts, tokens, even)
        offs = torch.tensor(ends, dtype=torch.int32, device=device)
        if form == "forward":
            a, b = normal(tokens, k), normal(experts, n, k).mT
        elif form == "input":
            a, b = normal(tokens, n), normal(experts, n, k)
        elif form == "weight":
            a, b = normal(tokens, n).t(), normal(tokens, k)
        else:
            a, b = normal(experts, n, k), normal(tokens, k).t()
        return {"a": a, "b": b, "offs": offs}

    spread = "even" if even else "uneven"
    parameters = parameters_of(
        f"{experts}x{tokens}\n{n}x{k}", dtype, experts=experts, tokens=tokens, n=n, k=k, even=even,
        form=form,
    )  # fmt: skip
    return Case(
        name=f"{form} {experts} experts, {tokens} tokens ({spread}), {n} x {k}",
        make_inputs=make_inputs,
        flops=2.0 * tokens * n * k,
        bytes=dtype.itemsize * float(tokens * k + experts * n * k + tokens * n),
        groups=(form, f"{experts} experts"),
        parameters=parameters,
        oracle=oracle,
    )


cases = cases_of(SHAPES, make_case, *CHOICES)


def drawn(draw: Draw) -> Case:
    """Groups of any sizes, some of them empty; in class `aligned` all sizes are multiples of 8."""
    unit = 8 if draw.aligned else 1
    experts, tokens, n, k = within(
        draw,
        lambda: (
            draw.size(2, 128),
            draw.size(64, 65536, unit),
            draw.size(64, 8192, 8),
            draw.size(64, 8192, 8),
        ),
        lambda s: s[0] * s[2] * s[3] <= 1 << 30 and s[1] * s[2] * s[3] <= 1 << 39,
    )
    total, ends = 0, []
    for size in draw.split(tokens // unit, experts):
        total += size * unit
        ends.append(total)
    case = make_case(experts, tokens, n, k, False, draw.form, draw.dtype, ends)
    # Of each form: m, n and k, which of them is divided, and the orders in memory.
    sizes, divided, m_major, n_major = {
        "forward": ((tokens, n, k), 0, False, False),
        "input": ((tokens, k, n), 0, False, True),
        "weight": ((n, k, tokens), 2, True, True),
        "columns": ((n, tokens, k), 1, False, False),
    }[draw.form]
    problem = {
        **dict(zip("mnk", sizes, strict=True)),
        "groups": experts,
        "grouped": divided,
        "dtype": draw.code,
        "a_m_major": m_major and tokens > 0,
        "b_n_major": n_major,
    }
    text = f"{draw.form} {experts} groups of {tokens}, {n} x {k}, {draw.code}"
    return draw.case(case, text, problem=problem, ends=ends)


def _pytorch(a: Tensor, b: Tensor, offs: Tensor) -> Callable[[], Tensor]:
    """PyTorch's, whose kernel ends the process's use of the GPU by a failed assertion where groups
    of columns or of k do not begin at multiples of 16 bytes."""
    divides_rows = a.dim() == 2 and b.dim() == 3
    if not divides_rows and any(end * a.itemsize % 16 for end in offs.tolist()):
        raise NotApplicableError("groups that begin at no multiple of 16 bytes")
    return lambda: torch.nn.functional.grouped_mm(a, b, offs=offs)


def implementations(device: torch.device) -> dict[str, Implementation]:
    """This package's op first, then the peer."""
    import thunderkittens as tk

    return {
        "thunderkittens": lambda a, b, offs: tk.grouped_gemm(a, b, offs),
        "PyTorch": Prepared(_pytorch),
    }


def host_calls(device: torch.device) -> dict[str, Differentiable]:
    """Calls on four groups of 32 rows, 128 x 128, bf16."""
    import thunderkittens as tk

    a = torch.randn(128, 128, dtype=torch.bfloat16, device=device)
    b = torch.randn(4, 128, 128, dtype=torch.bfloat16, device=device)
    offs = torch.tensor([32, 64, 96, 128], dtype=torch.int32, device=device)
    grouped_mm = torch.nn.functional.grouped_mm
    return {
        "thunderkittens.grouped_gemm": Differentiable(
            lambda a, b: tk.grouped_gemm(a, b, offs), (a, b)
        ),
        "torch.nn.functional.grouped_mm": Differentiable(
            lambda a, b: grouped_mm(a, b, offs=offs), (a, b)
        ),
    }
