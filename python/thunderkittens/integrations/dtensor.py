"""How the ops are sharded where their operands are `torch.distributed.tensor.DTensor`s.

    import thunderkittens.integrations.dtensor as integration

    integration.register()
    out = tk.attention(q, k, v, causal=True)  # DTensors, sharded alike over batch or heads

Over a dimension of the mesh, the operands are
- of `attention` replicated, sharded alike over the batch, or over the heads, where the ranks divide
  those of q and those of k;
- of `gemm` replicated, or sharded by rows (a), by columns (b), over a batch, or along K of both:
  the result is then a partial sum;
- of the other ops replicated.

Gradients follow. A sharded operand beside a replicated one takes its part of it, which costs
nothing.
Whatever would need communication that the caller has not asked for is refused, in words. Products
with a bias, an activation, a residual or factors have no partial sums, and those with a gate no
sharded columns. Sharding is that of `torch.distributed.tensor.experimental.register_sharding`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch

_registered = False


class _Row(NamedTuple):
    """One way to shard an op over a dimension of the mesh: placements of the results, and those of
    the operands by their names."""

    results: list[Any]
    operands: dict[str, Any]


def register() -> None:
    """Makes DTensor know the ops. It is enough to do so once.

    Raises:
        ImportError: this build of torch has no torch.distributed.
    """
    global _registered
    if _registered:
        return
    from torch.distributed.tensor.experimental import register_sharding

    rules: dict[str, tuple[Callable[..., list[_Row]], str]] = {
        "attention": (_attention, _ATTENTION),
        "attention_forward": (_attention, _ATTENTION),
        "attention_backward": (_attention_backward, ""),
        "gemm": (_gemm, _GEMM),
        "gemm_forward": (_gemm, _GEMM),
        "gemm.fused": (_gemm, _FUSED),
        "gemm_forward.fused": (_gemm, _FUSED),
        "gemm_backward": (_gate_backward, ""),
    }
    for op in _overloads():
        name = op._schema.name.partition("::")[2]
        if op._schema.overload_name:
            name += f".{op._schema.overload_name}"
        rule, supported = rules.get(name, (_replicated, "replicated"))
        register_sharding(op)(_checked(op, rule, supported))
    _registered = True


def _overloads() -> Iterator[Any]:
    """All ops of the package that make their results."""
    for schema in torch._C._jit_get_all_schemas():
        namespace, _, name = schema.name.partition("::")
        if namespace == "thunderkittens" and not schema.is_mutable:
            yield getattr(
                getattr(torch.ops.thunderkittens, name), schema.overload_name or "default"
            )


def _checked(op: Any, rule: Callable[..., list[_Row]], supported: str) -> Callable[..., Any]:
    """`rule` as `register_sharding` wants it, with a refusal of what is not among its rows."""
    names = [argument.name for argument in op._schema.arguments]
    public = op._schema.name.partition("::")[2].removesuffix("_forward")

    def sharding(*args: Any, **kwargs: Any) -> list[tuple[list[Any], list[Any]]]:
        values = {**dict(zip(names, args, strict=False)), **kwargs}
        specs = {name: value for name, value in values.items() if hasattr(value, "placements")}
        mesh = next(iter(specs.values())).mesh
        rows = rule(op, values, mesh)
        for dim in range(mesh.ndim):
            placements = {name: spec.placements[dim] for name, spec in specs.items()}
            if supported and not any(_fits(placements, row) for row in rows):
                raise ValueError(
                    f"tk.{public}: over dimension {dim} of the mesh, of {mesh.size(dim)} ranks, "
                    + ", ".join(f"{name} is {_text(p)}" for name, p in placements.items())
                    + f"; supported are operands that are {supported}"
                )
        return [
            (row.results, [row.operands[name] if name in specs else None for name in values])
            for row in rows
        ]

    return sharding


def _fits(placements: dict[str, Any], row: _Row) -> bool:
    """Whether operands are placed as a row wants them, without communication."""
    return all(
        placement == row.operands[name]
        or (placement.is_replicate() and row.operands[name].is_shard())
        for name, placement in placements.items()
    )


def _text(placement: Any) -> str:
    if placement.is_shard():
        return f"Shard({placement.dim})"
    return "Partial()" if placement.is_partial() else "Replicate()"


def _whole(op: Any, values: dict[str, Any]) -> _Row:
    from torch.distributed.tensor import Replicate

    return _Row([Replicate()] * len(op._schema.returns), dict.fromkeys(values, Replicate()))


def _replicated(op: Any, values: dict[str, Any], mesh: Any) -> list[_Row]:
    return [_whole(op, values)]


# ---- attention ----

_ATTENTION = (
    "replicated, sharded alike over the batch (q, k and v are Shard(0)), or over the heads "
    "(Shard(1)) where the ranks divide those of q and those of k"
)


def _attention_rows(values: dict[str, Any], mesh: Any) -> list[dict[str, Any]]:
    """Placements of the operands, and of what has their shape."""
    from torch.distributed.tensor import Replicate, Shard

    whole, batch, heads = Replicate(), Shard(0), Shard(1)
    slopes = values.get("alibi_slopes")
    per_sequence = slopes is not None and len(slopes.shape) == 2
    rows = [
        {
            **dict.fromkeys(values, batch),
            "alibi_slopes": batch if per_sequence else whole,
            "sink": whole,
        }
    ]
    counts = {values[name].shape[1] for name in ("q", "k")}
    if all(count % mesh.size(dim) == 0 for count in counts for dim in range(mesh.ndim)):
        rows.append(
            {
                **dict.fromkeys(values, heads),
                "alibi_slopes": heads if per_sequence else Shard(0),
                "sink": Shard(0),
            }
        )
    return rows


def _attention(op: Any, values: dict[str, Any], mesh: Any) -> list[_Row]:
    results = len(op._schema.returns)
    rows = _attention_rows(values, mesh)
    return [_whole(op, values), *(_Row([row["q"]] * results, row) for row in rows)]


def _attention_backward(op: Any, values: dict[str, Any], mesh: Any) -> list[_Row]:
    """Gradients that are not needed have no elements. Each rank has a part of a sink's gradient
    where the batch is sharded."""
    from torch.distributed.tensor import Partial, Replicate

    needs = values.get("needs") or [True] * 4
    has_sink = values.get("sink") is not None and needs[3]
    rows = [_whole(op, values)]
    for row in _attention_rows(values, mesh):
        of_sink = Partial() if row["q"].dim == 0 else row["sink"]
        results = [row["q"] if needed else Replicate() for needed in needs[:3]]
        rows.append(_Row([*results, of_sink if has_sink else Replicate()], row))
    return rows


# ---- gemm ----

_GEMM = (
    "replicated, a sharded by rows, b by columns, or both along K, the latter without a bias: the "
    "result is then a partial sum"
)
_FUSED = (
    "replicated, a sharded by rows or, without a gate, b by columns, the residual as the result; "
    "partial sums have no epilogue"
)


def _gemm(op: Any, values: dict[str, Any], mesh: Any) -> list[_Row]:
    from torch.distributed.tensor import Partial, Replicate, Shard

    whole = Replicate()
    ranks_a, ranks_b = (len(values[name].shape) for name in ("a", "b"))
    fused = "activation" in {argument.name for argument in op._schema.arguments}
    # What the activation was applied to, where it is kept.
    kept = bool(values.get("activation") or values.get("gate"))

    def row(result: Any, a: Any, b: Any, bias: Any = whole) -> _Row:
        results = [result, result if kept else whole][: len(op._schema.returns)]
        return _Row(results, {"a": a, "b": b, "bias": bias, "residual": result})

    rows = [_whole(op, values), row(Shard(ranks_a - 2), Shard(ranks_a - 2), whole)]
    if ranks_a == 3:
        rows.append(row(Shard(0), Shard(0), Shard(0) if ranks_b == 3 else whole))
    if not values.get("gate"):
        rows.append(row(Shard(ranks_a - 1), whole, Shard(ranks_b - 1), Shard(0)))
    if not fused and values.get("bias") is None:
        rows.append(row(Partial(), Shard(ranks_a - 1), Shard(ranks_b - 2)))
        # The product is linear in each operand.
        rows.append(row(Partial(), Partial(), whole))
        rows.append(row(Partial(), whole, Partial()))
    return rows


def _gate_backward(op: Any, values: dict[str, Any], mesh: Any) -> list[_Row]:
    from torch.distributed.tensor import Shard

    dims: Sequence[int] = range(len(values["grad"].shape) - 1)
    rows = [_Row([Shard(dim)], dict.fromkeys(values, Shard(dim))) for dim in dims]
    return [_whole(op, values), *rows]
