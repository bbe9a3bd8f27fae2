"""What the ops `attention` and `attention_varlen` share: their options and the checks of them.

Both ops take q, k and v, then (packed sequences alone) cu_seqlens_q, cu_seqlens_k, max_seqlen_q and
max_seqlen_k, then `Options`.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple, NoReturn

import torch
from torch import Tensor

from .. import _load, emulation
from ._registration import require_device

Causal = bool | Literal["upper_left", "lower_right"]

# Indexed by the integer that the ops take as `causal`.
ALIGNMENTS: tuple[Causal, ...] = (False, "lower_right", "upper_left")
UNBOUNDED = (-1, -1)
MAX_DIM = 256
FLOAT_MAX = torch.finfo(torch.float32).max
# Where the kernels compute a softcap as accurately as the weights: a score of float16 errs by 2^-22
# of it.
SOFTCAPS = {torch.bfloat16: (2.0**-30, 2.0**100), torch.float16: (2.0**-30, 2.0**11)}
# A multiple of the scores that tells masked ones from others where there are slopes.
LEAST_SCALE = 2.0**-50
NUMBERS = (int, float, torch.SymInt, torch.SymFloat)
INTEGERS = (int, torch.SymInt)
_LARGEST = (1 << 63) - 1  # that the ops take


class Options(NamedTuple):
    """The arguments of the ops after their operands."""

    causal: int = 0
    scale: float | None = None
    window_left: int = -1
    window_right: int = -1
    softcap: float = 0.0
    alibi_slopes: Tensor | None = None
    sink: Tensor | None = None
    deterministic: bool | None = None

    def of_reference(self) -> dict[str, Any]:
        """As the functions of `tk.reference` take them."""
        return {
            "causal": ALIGNMENTS[self.causal],
            "scale": self.scale,
            "window_size": (self.window_left, self.window_right),
            "softcap": self.softcap,
            "alibi_slopes": self.alibi_slopes,
            "sink": self.sink,
        }

    def arrays(self) -> dict[str, Tensor | None]:
        """Those that are tensors, as the emulator takes them."""
        return {"alibi_slopes": self.alibi_slopes, "sink": self.sink}

    def scalars(self) -> dict[str, Any]:
        """The others."""
        names = ("causal", "scale", "window_left", "window_right", "softcap", "deterministic")
        return {name: getattr(self, name) for name in names}


DEFAULTS = tuple(Options._field_defaults.values())


def split(args: Sequence[Any], operands: int, varlen: bool) -> tuple[list[Any], list[Any], Options]:
    """Operands, packing and options of an op's arguments, of which the dispatcher drops trailing
    ones that have their default value."""
    first = operands + 4 * varlen
    return list(args[:operands]), list(args[operands:first]), Options(*args[first:])


def split_backward(
    args: Sequence[Any], varlen: bool
) -> tuple[list[Any], list[Any], Options, Sequence[bool]]:
    """The same of a gradient's arguments, and which gradients are needed."""
    count = 7 + 4 * varlen + len(Options._fields)
    needs = args[count] if len(args) > count else (True,) * 4
    return (*split(args[:count], 7, varlen), needs)


# The checks of a call.

_SDPA = "torch.nn.functional.scaled_dot_product_attention"
_FLEX = "torch.nn.attention.flex_attention.flex_attention"
_MASKS = f"{_FLEX} takes masks and changes of the scores as functions"
_ALTERNATIVES = {
    "attn_mask": f"arbitrary masks are not supported: {_SDPA} takes them as tensors, and {_FLEX} "
    "as functions (causal masks, windows, ALiBi and packed sequences are options here)",
    "dropout_p": f"dropout is not supported; {_SDPA} has it",
    "is_causal": "causal='upper_left' is what is_causal=True means there; causal=True aligns the "
    "mask to the lower right corner",
    "enable_gqa": "it is not needed: k and v may have fewer heads than q",
    "softmax_scale": "it is called scale here",
    "return_attn_probs": "return_lse=True returns the LSE",
    "score_mod": _MASKS,
    "mask_mod": _MASKS,
    "block_mask": _MASKS,
}


def refuse_keywords(op: str, names: Sequence[str]) -> NoReturn:
    """Raises TypeError for keywords that the function does not have, with the alternative."""
    name = next((name for name in names if name in _ALTERNATIVES), next(iter(names)))
    hint = f"; {_ALTERNATIVES[name]}" if name in _ALTERNATIVES else ""
    raise TypeError(f"tk.{op}: got an unexpected keyword argument {name!r}{hint}")


def hide_catch_all(function: Any) -> None:
    """Leaves the parameter that catches unknown keywords out of the function's signature."""
    signature = inspect.signature(function)
    shown = [p for p in signature.parameters.values() if p.kind is not p.VAR_KEYWORD]
    function.__signature__ = signature.replace(parameters=shown)


def causal_mode(op: str, causal: Any) -> int:
    """The integer for `causal`."""
    if causal is False or causal is True:
        return int(causal)
    if not isinstance(causal, str):
        raise TypeError(
            f"tk.{op}: causal must be False, True, 'lower_right' or 'upper_left', got "
            f"{type(causal).__name__}"
        )
    if causal not in ALIGNMENTS:
        raise ValueError(
            f"tk.{op}: causal is {causal!r}; it must be False, True, 'lower_right' or 'upper_left'"
        )
    return ALIGNMENTS.index(causal)


def require_dims(op: str, dim: int, dim_k: int, dim_v: int) -> None:
    """Raises ValueError for head dimensions that do not fit."""
    if dim % 8 != 0 or dim < 8 or dim > MAX_DIM:
        raise ValueError(
            f"tk.{op}: q has head dim {dim}; it must be a multiple of 8 from 8 to {MAX_DIM}"
        )
    if dim_k != dim:
        raise ValueError(f"tk.{op}: q has head dim {dim}, k has {dim_k}; they must be equal")
    if dim_v != dim and (dim_v % 8 != 0 or dim_v < 8 or dim_v > MAX_DIM):
        raise ValueError(
            f"tk.{op}: v has head dim {dim_v}; it must be a multiple of 8 from 8 to {MAX_DIM}"
        )


def require_heads(op: str, heads: int, heads_k: int) -> None:
    """Raises ValueError unless q's heads divide into groups."""
    if heads_k == 0 or heads % heads_k != 0:
        raise ValueError(
            f"tk.{op}: k has {heads_k} heads, q has {heads}; q's heads must be a multiple of k's"
        )


def require_mask(op: str, causal: int, scale: float | None) -> None:
    """Raises for a causal mode or a scale that there is not."""
    if causal not in (0, 1, 2):
        raise ValueError(
            f"thunderkittens::{op}: causal is {causal}; it must be 0 (none), 1 (lower right) or 2 "
            "(upper left)"
        )
    if scale is not None:
        if not isinstance(scale, NUMBERS):
            raise TypeError(f"tk.{op}: scale must be a number or None, got {type(scale).__name__}")
        if not -FLOAT_MAX <= scale <= FLOAT_MAX:
            raise ValueError(f"tk.{op}: scale is {scale}; it must be finite in float32")


def require_options(
    op: str,
    q: Tensor,
    batch: int,
    scale: float | None,
    softcap: float,
    alibi_slopes: Tensor | None,
    sink: Tensor | None,
) -> None:
    """Raises for options that do not fit the operands; the op needs tensors in float32."""
    if not isinstance(softcap, NUMBERS):
        raise TypeError(f"tk.{op}: softcap must be a number, got {type(softcap).__name__}")
    if softcap - softcap != 0 or softcap < 0:
        raise ValueError(
            f"tk.{op}: softcap is {softcap}; it must be finite and at least 0 (0 is none)"
        )
    if softcap != 0:
        least, most = SOFTCAPS.get(q.dtype, (0.0, FLOAT_MAX))
        if not least <= softcap <= most:
            raise ValueError(
                f"tk.{op}: softcap is {softcap}; in {q.dtype} it must be 0 (none) or from "
                f"{least:g} to {most:g}"
            )
    heads = q.shape[1]
    if alibi_slopes is not None:
        _require_vector(op, "alibi_slopes", alibi_slopes, q)
        if scale is not None and scale != 0 and -LEAST_SCALE < scale < LEAST_SCALE:
            raise ValueError(
                f"tk.{op}: scale is {scale}; with alibi_slopes it must be 0, or at least "
                f"{LEAST_SCALE:g} in magnitude"
            )
        shape = alibi_slopes.shape
        if (
            not 1 <= len(shape) <= 2
            or shape[-1] != heads
            or (len(shape) == 2 and shape[0] != batch)
        ):
            raise ValueError(
                f"tk.{op}: alibi_slopes has shape {tuple(shape)}; it must be ({heads},) or "
                f"({batch}, {heads}), a slope per head of q"
            )
    if sink is not None:
        _require_vector(op, "sink", sink, q)
        if len(sink.shape) != 1 or sink.shape[0] != heads:
            raise ValueError(
                f"tk.{op}: sink has shape {tuple(sink.shape)}; it must be ({heads},), a logit per "
                "head of q"
            )


def _require_vector(op: str, name: str, x: Any, q: Tensor) -> None:
    if not isinstance(x, Tensor):
        raise TypeError(f"tk.{op}: {name} must be a torch.Tensor or None, got {type(x).__name__}")
    if x.layout is not torch.strided:
        raise TypeError(f"tk.{op}: {name} must be a dense tensor (torch.strided), got {x.layout}")
    require_device(op, name, x, "q", q)
    if x.dtype is not torch.float32:
        also = f" or {q.dtype}" if name == "sink" else ""
        raise TypeError(f"tk.{op}: {name} is {x.dtype}; it must be torch.float32{also}")


def call_options(
    op: str,
    q: Tensor,
    batch: int,
    scale: Any,
    window_size: Any,
    softcap: Any,
    alibi_slopes: Any,
    sink: Any,
    deterministic: Any,
) -> tuple[Any, ...]:
    """The options of a public function as the op takes them, from `window_left` on."""
    if (
        not isinstance(window_size, tuple | list)
        or len(window_size) != 2
        or not all(isinstance(x, INTEGERS) and not isinstance(x, bool) for x in window_size)
    ):
        raise TypeError(
            f"tk.{op}: window_size must be a pair of integers (left, right), got {window_size!r}"
        )
    left, right = window_size
    if left < -1 or right < -1:
        raise ValueError(
            f"tk.{op}: window_size is ({left}, {right}); left and right must be at least 0, or -1 "
            "(unbounded)"
        )
    left, right = (min(x, _LARGEST) if isinstance(x, int) else x for x in (left, right))
    if deterministic is not None and not isinstance(deterministic, bool):
        raise TypeError(
            f"tk.{op}: deterministic must be True, False or None, got "
            f"{type(deterministic).__name__}"
        )
    if isinstance(sink, Tensor) and sink.dtype is q.dtype:
        sink = sink.float()
    require_options(op, q, batch, scale, softcap, alibi_slopes, sink)
    if alibi_slopes is not None:
        if torch.is_grad_enabled() and alibi_slopes.requires_grad:
            raise ValueError(
                f"tk.{op}: alibi_slopes requires a gradient, which is not computed; pass "
                f"alibi_slopes.detach(), or use tk.reference.{op}"
            )
        alibi_slopes = alibi_slopes.contiguous()
    if sink is not None:
        sink = sink.contiguous()
    return left, right, softcap, alibi_slopes, sink, deterministic


def require_op_options(op: str, q: Tensor, batch: int, options: Options) -> None:
    """`require_options` for the ops, whose kernels read adjacent elements."""
    slopes, sink = options.alibi_slopes, options.sink
    require_options(op, q, batch, options.scale, options.softcap, slopes, sink)
    for name, x in options.arrays().items():
        if x is not None and x.numel() > 0 and x.shape[-1] > 1 and x.stride(-1) != 1:
            raise ValueError(f"thunderkittens::{op}: {name} must have adjacent elements")


def require_shapes(op: str, shapes: Sequence[tuple[str, Tensor, Sequence[int]]]) -> None:
    """Raises ValueError unless the tensors have these shapes."""
    for name, x, expected in shapes:
        if tuple(x.shape) != tuple(expected):
            raise ValueError(
                f"thunderkittens::{op}: {name} has shape {tuple(x.shape)}; it must be "
                f"{tuple(expected)}"
            )


# Which implementation of the gradient.


@functools.cache
def _device_properties(index: int) -> Any:
    properties: Any = torch.cuda.get_device_properties(index)
    device = _load.compiled_module().DeviceProperties(
        sm_count=properties.multi_processor_count,
        shared_bytes_per_block=properties.shared_memory_per_block_optin,
        l2_bytes=properties.L2_cache_size,
        major=properties.major,
        minor=properties.minor,
    )
    return device.restricted()


_PROBLEM = (
    *("dtype", "head_dim", "value_dim", "causal", "window_left", "window_right"),
    *("softcap", "alibi", "sink", "varlen"),
)


@functools.cache
def _supported(index: int | None, portable: bool, dtype: torch.dtype, *values: Any) -> bool:
    """Whether the gradient has a kernel for a problem, whatever its lengths: on a GPU, or with
    index None on the emulator, which may have portable kernels alone."""
    problem = dict(zip(_PROBLEM, (emulation.NAMES[dtype], *values), strict=True))
    problem |= dict.fromkeys(("batch", "q_heads", "kv_heads", "q_length", "k_length"), 1)
    if index is None:
        return emulation.supports("attention_backward", problem)
    module = _load.compiled_module()
    if "attention_backward" not in module.ops() or not torch.cuda.is_available():
        return True  # what is registered for CUDA takes everything; or the tensors are fake
    return not module.unsupported("attention_backward", problem, _device_properties(index))


def has_kernel(q: Tensor, v: Tensor, options: Sequence[Any], varlen: bool) -> bool:
    """Whether the gradient of a call has a kernel, on CUDA tensors or emulated on a CPU's; trailing
    options may be missing, and others follow."""
    causal, _, left, right, softcap, slopes, sink = (*options, *DEFAULTS[len(options) :])[:7]
    # int(): head dimensions are fixed in compiled code, lengths are not.
    return _supported(
        q.device.index if q.is_cuda else None,
        not q.is_cuda and emulation.portable(),
        q.dtype,
        int(q.shape[-1]),
        int(v.shape[-1]),
        int(causal),
        min(int(left), 0),
        min(int(right), 0),
        softcap != 0,
        slopes is not None,
        sink is not None,
        varlen,
    )


def empty_gradients(
    operands: Sequence[Tensor], sink: Tensor | None, needs: Sequence[bool]
) -> tuple[Tensor, ...]:
    """Memory for the gradients of q, k, v and the sink; none for those that are not needed."""
    grads = (
        torch.empty_like(x) if needed else x.new_empty(0)
        for x, needed in zip(operands, needs, strict=False)
    )
    rows = 0 if sink is None or not needs[3] else sink.shape[0]
    return (*grads, operands[0].new_empty(rows, dtype=torch.float32))


def filled_gradients(grads: Sequence[Tensor | None], q: Tensor) -> tuple[Tensor, ...]:
    """The gradients with empty tensors for those that are missing."""
    dtypes = (q.dtype, q.dtype, q.dtype, torch.float32)
    return tuple(
        q.new_empty(0, dtype=dtype) if x is None else x
        for x, dtype in zip(grads, dtypes, strict=True)
    )


def emulated_backward(
    arrays: dict[str, Tensor | None], options: Options, needs: Sequence[bool], **scalars: Any
) -> tuple[Tensor, ...]:
    """The gradient by its kernel on the emulator."""
    names = ("q", "k", "v", "sink")
    wanted = {f"needs_{name}": bool(n) for name, n in zip(names, needs, strict=True)}
    result = emulation.run(
        "attention_backward",
        {**arrays, **options.arrays()},
        **options.scalars(),
        **scalars,
        **wanted,
    )
    operands = [x for x in map(arrays.get, names[:3]) if x is not None]
    grads = empty_gradients(operands, options.sink, needs)
    for grad, name in zip(grads, names, strict=True):
        if grad.numel():
            grad.copy_(result[f"d{name}"])
    return grads


def flops_backward(dim: int, dim_v: int, needs: Sequence[bool]) -> int:
    """Per score: the score again, and one product each for dP (for dQ or dK), dQ, dK and dV."""
    needs_q, needs_k, needs_v = needs[:3]
    return 2 * (dim * (1 + needs_q + needs_k) + dim_v * ((needs_q or needs_k) + needs_v))
