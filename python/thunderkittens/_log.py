"""The log of calls: with THUNDERKITTENS_LOG=1 in the environment, each call of an op prints a line
to stderr, with its tensors, its options, and the kernels that ran, with their configuration.

The ops' kernels are registered anew, wrapped, so that lines are the same for eager and for compiled
code, and without the variable nothing is there that could cost. Nothing waits for a GPU. Which
kernels ran is noted where they are launched: by the CUDA library (csrc/common/launch_log.h), and by
the emulation.
"""

from __future__ import annotations

import ctypes
import os
import sys
import warnings
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from . import _build, _load, emulation

_NAMESPACE = "thunderkittens"


class Log:
    """Every call of an op on a GPU or a CPU writes a line, until `remove`."""

    def __init__(self, write: Callable[[str], Any]) -> None:
        self._write = write
        self._noted = _noted_launches()
        self._library = torch.library.Library(_NAMESPACE, "IMPL")
        for name in torch._C._dispatch_get_all_op_names():
            if not name.startswith(f"{_NAMESPACE}::"):
                continue
            for key in ("CUDA", "CPU"):
                if torch._C._dispatch_has_kernel_for_dispatch_key(name, key):
                    self._wrap(name.removeprefix(f"{_NAMESPACE}::"), key)

    def _wrap(self, name: str, key: str) -> None:
        packet, _, overload = name.partition(".")
        op = getattr(getattr(torch.ops.thunderkittens, packet), overload or "default")
        names = [a.name for a in op._schema.arguments]
        defaults = {a.name: a.default_value for a in op._schema.arguments if a.has_default_value()}
        keys = torch._C.DispatchKeySet(torch._C.DispatchKey.__members__[key])
        call = partial(torch.library.get_kernel(op, key).call_boxed, keys)

        def logged(*args: Any, **kwargs: Any) -> Any:
            running = emulation.current() if key == "CPU" else None
            before = self._noted() if running is None else len(running.kernels)
            result = call(*args, **kwargs)
            if running is not None:
                kernels = [_kernel_text(x) for x in running.kernels[before:]]
            elif key == "CUDA":
                kernels = self._noted()
            else:
                kernels = ["the formula, in PyTorch"]
            given = dict(zip(names, args, strict=False)) | kwargs
            shown = _arguments_text(given, defaults)
            self._write(f"thunderkittens: {name}({shown}): {'; '.join(kernels) or 'no kernel'}")
            return result

        with warnings.catch_warnings():
            # That a kernel is registered over another one.
            warnings.simplefilter("ignore")
            self._library.impl(name, logged, key, allow_override=True)

    def remove(self) -> None:
        self._library._destroy()


def _noted_launches() -> Callable[[], Any]:
    """What returns the launches of this thread on a GPU since the last time; it has begun to note
    them."""
    path = None if _load.cuda_problem else _build.find("_cuda.so")
    if path is None:
        return list
    function = ctypes.CDLL(str(path)).thunderkittens_launches
    function.argtypes, function.restype = [], ctypes.c_char_p

    def noted() -> list[str]:
        return [_with_brackets(*line.partition("\t")) for line in function().decode().splitlines()]

    noted()
    return noted


def _with_brackets(kernel: str, _: str, fields: str) -> str:
    return f"{kernel} [{fields}]" if fields else kernel


def _kernel_text(choice: Mapping[str, Any]) -> str:
    """A launch on the emulator, as the CUDA library notes it."""
    fields = (f"{key}={_value_text(x)}" for key, x in choice.items() if key != "kernel")
    return _with_brackets(str(choice["kernel"]), "", " ".join(fields))


def _arguments_text(given: Mapping[str, Any], defaults: Mapping[str, Any]) -> str:
    """Tensors, and options that do not have their default value."""
    return ", ".join(
        f"{name} {_tensor_text(x)}" if isinstance(x, Tensor) else f"{name}={_value_text(x)}"
        for name, x in given.items()
        if isinstance(x, Tensor) or name not in defaults or x != defaults[name]
    )


def _tensor_text(x: Tensor) -> str:
    """Such as "bfloat16 (2, 16, 1000, 128)", with strides where it is not contiguous."""
    text = f"{str(x.dtype).removeprefix('torch.')} {tuple(x.shape)}"
    return text if x.is_contiguous() else f"{text} strides {x.stride()}"


def _value_text(x: Any) -> str:
    return str(int(x)) if isinstance(x, bool) else str(x)


def begin_if_asked() -> None:
    """Begins the log where the environment asks for it, when all ops are registered."""
    if os.environ.get("THUNDERKITTENS_LOG", "0") in ("", "0"):
        return
    _load.keep(Log(partial(print, file=sys.stderr, flush=True)))
