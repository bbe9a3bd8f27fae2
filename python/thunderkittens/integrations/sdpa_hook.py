"""Unmodified models on `tk.attention`: what PyTorch's `scaled_dot_product_attention` calls.

PyTorch's function chooses among a few ops of aten. `enable_sdpa` registers kernels for these with
PyTorch's dispatcher, over PyTorch's own, which take what ours do not; `disable_sdpa` removes them.
As it is the dispatcher that knows, nothing else has to: autograd, autocast, checkpointing, FSDP and
DTensor are above it, and a compiled or exported graph, which calls the same ops, follows at its
next run, without a recompilation. Which op runs is still PyTorch's choice, and so is `sdpa_kernel`.

The name "TK" of `torch.nn.attention.activate_flash_attention_impl` does the same.
"""

from __future__ import annotations

import contextlib
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from types import CodeType
from typing import Any, NoReturn

import torch
import torch.nn.attention

from .. import _load
from . import _sdpa_ops
from ._sdpa_ops import Kernel, SdpaCall, SdpaReport

__all__ = ["SdpaCall", "SdpaReport", "disable_sdpa", "enable_sdpa", "sdpa", "sdpa_report"]

#: Of `torch.nn.attention.activate_flash_attention_impl`.
NAME = "TK"


def _has_kernel(op: str, key: str) -> bool:
    return torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{op}", key)


def _kernel_of_torch(op: str, key: str) -> Kernel:
    """What is registered now for an op, also when it is registered over."""
    if not _has_kernel(op, key):
        return partial(_no_kernel, op, key)
    kernel = torch.library.get_kernel(f"aten::{op}", key)
    keys = torch._C.DispatchKeySet(torch._C.DispatchKey.__members__[key])
    return partial(kernel.call_boxed, keys)


def _no_kernel(op: str, key: str, *args: Any, **kwargs: Any) -> NoReturn:
    raise NotImplementedError(f"aten::{op} has no kernel for {key} but that of tk.sdpa")


class Override:
    """Kernels over PyTorch's, until `remove`.

    Args:
        key: the dispatch key.
        ops: for the name of each forward op of aten, what makes the kernels of the forward and of
            its backward from those that are there.
    """

    def __init__(
        self, key: str, ops: Mapping[str, Callable[[Kernel, Kernel], tuple[Kernel, Kernel]]]
    ) -> None:
        self._library = torch.library.Library("aten", "IMPL")
        for name, make in ops.items():
            names = (name, f"{name}_backward")
            kernels = make(*(_kernel_of_torch(op, key) for op in names))
            for op, kernel in zip(names, kernels, strict=True):
                _hide_from_dynamo(kernel)
                with warnings.catch_warnings():
                    # That a kernel is registered over another one.
                    warnings.simplefilter("ignore")
                    self._library.impl(op, kernel, key, allow_override=True)
        self._key_in_cpp = key if _load.has_nodes and set(_sdpa_ops.IN_CPP) & set(ops) else None
        if self._key_in_cpp is not None:
            torch.ops.thunderkittens_sdpa.install(self._key_in_cpp)

    def remove(self) -> None:
        if self._key_in_cpp is not None:
            torch.ops.thunderkittens_sdpa.remove(self._key_in_cpp)
        self._library._destroy()


def _hide_from_dynamo(kernel: Kernel) -> None:
    """Where a function that is being compiled breaks its graph, Dynamo compiles the frames that it
    meets later; those of a kernel and of what it calls, which the dispatcher has called, are none
    of its business."""
    code: CodeType = kernel.__code__
    with contextlib.suppress(ImportError, AttributeError):
        from torch._C._dynamo import eval_frame

        skip = eval_frame._FrameAction.SKIP
        eval_frame.set_code_exec_strategy(code, eval_frame._FrameExecStrategy(skip, skip))


_lock = threading.RLock()
_overrides: list[Override] = []
_enabled = False  # by `enable_sdpa`
_holders = 0  # blocks of `sdpa`, and the activation of "TK"


def _update(enabled: bool | None = None, holders: int = 0) -> None:
    """Registers the kernels when they are first wanted, and removes them when they are not."""
    global _enabled, _holders
    with _lock:
        _enabled = _enabled if enabled is None else enabled
        _holders += holders
        wanted = _enabled or _holders > 0
        if wanted and not _overrides:
            for key, ops in _sdpa_ops.OPS.items():
                present = {name: make for name, make in ops.items() if _has_kernel(name, key)}
                _overrides.append(Override(key, present))
        elif not wanted:
            while _overrides:
                _overrides.pop().remove()


def enable_sdpa() -> None:
    """`torch.nn.functional.scaled_dot_product_attention` runs `tk.attention`'s kernels from now on.

    It concerns the whole process, all models in it and every way to run them: eager mode, autograd,
    autocast, `torch.compile`, also of graphs compiled before, `torch.export`, checkpointing, DDP
    and FSDP. The kernels take the place of three of PyTorch's, its flash attention, that of cuDNN
    and the memory-efficient one; which of these a call goes to, and whether to the plain formula
    instead, PyTorch decides as before (`torch.nn.attention.sdpa_kernel`).

    Taken are calls in bfloat16 or float16 without dropout and without a mask tensor, with head
    dimensions that are multiples of 8 up to 256, on a GPU that the kernels are built for.
    `is_causal` and the causal masks of `torch.nn.attention.bias` are no mask tensors. Everything
    else goes to PyTorch's kernels; `sdpa_report` says what and why. On CPU tensors, calls are taken
    inside `with tk.emulate():` alone.

    A backward that runs after a change takes what its forward has left, whoever's that was. Calling
    the function again changes nothing. Where another library registers kernels for the same ops,
    what was enabled last is to be disabled first.
    """
    _update(enabled=True)


def disable_sdpa() -> None:
    """Ends what `enable_sdpa` began: PyTorch is as it was.

    Blocks of `with tk.sdpa():` last until their end.
    """
    _update(enabled=False)


@contextlib.contextmanager
def sdpa() -> Iterator[None]:
    """Within a `with` block, `scaled_dot_product_attention` runs `tk.attention`'s kernels.

    See `enable_sdpa`. Blocks may be nested, and other threads see their effect.

    Example:
        >>> with tk.sdpa():
        ...     loss = model(batch).loss
        ...     loss.backward()
    """
    _update(holders=1)
    try:
        yield
    finally:
        _update(holders=-1)


def sdpa_report(*, reset: bool = False) -> SdpaReport:
    """Which calls of `scaled_dot_product_attention` went where, how often, and why.

    Counted are the calls that came by while `tk.sdpa` or `enable_sdpa` was in effect, each forward
    and each backward. What PyTorch computes by its plain formula, as with float32, does not come
    by.

    Args:
        reset: begin to count anew after this report.

    Returns:
        A tuple of `SdpaCall(op, taken, reason, calls)`: the op of aten that PyTorch has chosen,
        whether the kernels of this package took it, if not why, and how often that was. As text
        (`print`) it is a table.
    """
    return _sdpa_ops.report(reset)


class _Activation:
    """What `activate_flash_attention_impl` keeps."""

    def __init__(self) -> None:
        self._active = True
        _update(holders=1)

    def remove(self) -> None:
        if self._active:
            self._active = False
            _update(holders=-1)


def _register_implementation() -> None:
    register = getattr(torch.nn.attention, "register_flash_attention_impl", None)
    if register is not None:
        register(NAME, register_fn=_Activation)


_register_implementation()
