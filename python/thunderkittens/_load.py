"""Loads the package's libraries into torch, and words what can go wrong.

Each failure is one sentence: what the package was built for, what is there, the command that mends
it. A torch that is too old, or a missing file, stops the import. Anything that concerns CUDA alone
does not: the package then works on the CPU, and an op called on a CUDA tensor raises the sentence.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import platform
import re
import sys
import sysconfig
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

from . import _build

REINSTALL = "`pip install --force-reinstall --no-deps .` in a clone of the repository"

#: Why the CUDA implementations are not loaded, or None when they are.
cuda_problem: str | None = None

#: Whether autograd has the ops' nodes in C++.
has_nodes = False

#: Whether Python calls the ops by the module _call.
has_calls = False

#: Why the import failed, kept only for `python -m thunderkittens`.
import_problem: str | None = None

#: Dispatch keys of ops that are made of others.
_COMPOSITE = ("CompositeExplicitAutograd", "CompositeImplicitAutograd")

_libraries: list[object] = []


def running_as_command() -> bool:
    """Whether the package is being imported for `python -m thunderkittens`, or its script.

    The command `info` is for broken installations too, so the import itself must not fail then.
    """
    if sys.argv[:1] == ["-m"]:
        return "thunderkittens" in sys.orig_argv
    return bool(sys.argv) and Path(sys.argv[0]).name == "thunderkittens"


def version_tuple(version: str) -> tuple[int, int]:
    """(2, 11) of "2.11.0+cu130"; (0, 0) where there is no version."""
    match = re.match(r"(\d+)\.(\d+)", version)
    return (int(match[1]), int(match[2])) if match else (0, 0)


def check_torch(version: str) -> None:
    """Raises ImportError when this torch is older than the package's minimum."""
    record = _build.record()
    minimum = record["torch_minimum"]
    if version_tuple(version) < version_tuple(minimum):
        raise ImportError(
            f"thunderkittens {record['version']} was built for torch >= {minimum}, but torch "
            f"{version} is installed; run: pip install 'torch>={minimum}'"
        )


def _damaged(what: str) -> NoReturn:
    version = _build.record()["version"]
    raise ImportError(
        f"this installation of thunderkittens {version} is damaged: {what}; run {REINSTALL}"
    ) from None


def _problem_of(name: str) -> str | None:
    """What is wrong with a library's file, or None.

    The loader maps a file into memory as its headers say, and the process dies where the file is
    shorter; hence the look at the end of the section table, which is the last thing in it.
    """
    path = _build.find(name)
    if path is None:
        return f"the file {name} is missing"
    with path.open("rb") as file:
        header = file.read(64)
    if len(header) < 64 or not header.startswith(b"\x7fELF"):
        return f"the file {name} is no library"
    table_at, entry_bytes, entries = (
        int.from_bytes(header[start:end], "little") for start, end in ((40, 48), (58, 60), (60, 62))
    )
    if path.stat().st_size < table_at + entry_bytes * entries:
        return f"the file {name} is cut off"
    return None


def _library_path(name: str) -> Path:
    if problem := _problem_of(name):
        _damaged(problem)
    path = _build.find(name)
    assert path is not None
    return path


def _cuda_problem(torch_cuda: str | None) -> str | None:
    """Why _cuda.so cannot be loaded with a torch built for this CUDA version, or None."""
    record = _build.record()
    built = f"thunderkittens {record['version']} was built for CUDA 13"
    if not record["cuda_archs"] or not record["families"]:
        return (
            f"thunderkittens {record['version']} was built without CUDA kernels; to have them, run "
            f"{REINSTALL} with THUNDERKITTENS_CUDA=ON in the environment"
        )
    if torch_cuda is None:
        return (
            f"{built}, but this torch is built without CUDA; "
            "run: pip install --force-reinstall torch"
        )
    if version_tuple(torch_cuda)[0] != 13:
        return (
            f"{built}, but this torch is built for CUDA {torch_cuda}; install a torch for CUDA 13: "
            "pip install --force-reinstall torch"
        )
    if problem := _problem_of("_cuda.so"):
        return (
            f"this installation of thunderkittens {record['version']} is damaged: {problem}; "
            f"run {REINSTALL}"
        )
    return None


def _load_nodes(version: str) -> None:
    """Loads _autograd.so where it fits, into the version of torch that it was built with, unless
    THUNDERKITTENS_AUTOGRAD_NODES=0 is in the environment."""
    global has_nodes
    path = _build.find("_autograd.so")
    if os.environ.get("THUNDERKITTENS_AUTOGRAD_NODES") == "0":
        return
    built = version_tuple(_build.record()["torch_headers"])
    if path is None or built != version_tuple(version) or _problem_of(path.name):
        return
    import torch

    with contextlib.suppress(OSError):  # a torch of another build; Python's functions serve
        torch.ops.load_library(str(path))
        has_nodes = True
    if has_nodes:
        _shorten_calls()


def _shorten_calls() -> None:
    """Puts calls of less work in the place of torch's, where the module _call is there."""
    global has_calls
    if _problem_of(name := f"_call{sysconfig.get_config_var('EXT_SUFFIX')}"):
        return
    try:
        module = importlib.import_module("thunderkittens._call")
    except ImportError:  # of another build; torch's own calls serve
        return
    import torch

    for name in torch._C._dispatch_get_all_op_names():
        if name.startswith("thunderkittens::"):
            packet, _, overload = name.removeprefix("thunderkittens::").partition(".")
            op = getattr(getattr(torch.ops.thunderkittens, packet), overload or "default")
            # What the op calls when it is called.
            op._op = module.call(f"thunderkittens::{packet}", overload, op._op)
    has_calls = True


def plain(
    call: object, failed: Callable[..., object], recorded: object = None
) -> Callable[..., Any]:
    """Of what an op calls, a call that returns NotImplemented where a public function has more to
    do than to call the op, and everywhere without the module _call. `failed` gets the arguments and
    the error of a call that fails, and gives its result. `recorded` is what another op calls, which
    is called where a gradient is wanted."""
    if not has_calls:
        return lambda *args: NotImplemented
    plainly: Callable[..., Any] = importlib.import_module("thunderkittens._call").plain(
        call, failed, recorded
    )
    return plainly


def load() -> None:
    """Loads the schemas, and the CUDA implementations where torch can run them.

    Raises:
        ImportError: torch is missing or too old, or the installation is damaged.
    """
    global cuda_problem
    try:
        import torch
    except ImportError as error:
        minimum = _build.record()["torch_minimum"]
        raise ImportError(
            f"thunderkittens needs torch >= {minimum}, and importing torch failed ({error}); "
            f"run: pip install 'torch>={minimum}'"
        ) from None
    check_torch(torch.__version__)
    path = _library_path("_schemas.so")
    try:
        torch.ops.load_library(str(path))
    except OSError as error:
        _damaged(f"_schemas.so does not load with torch {torch.__version__} ({error})")
    _load_nodes(torch.__version__)
    cuda_problem = _cuda_problem(torch.version.cuda)
    if cuda_problem is None:
        try:
            torch.ops.load_library(str(_library_path("_cuda.so")))
        except OSError as error:
            cuda_problem = (
                f"the CUDA library of thunderkittens {_build.record()['version']} does not load "
                f"with torch {torch.__version__} ({error}); run {REINSTALL}"
            )


def compiled_module() -> ModuleType:
    """The module _C, or ImportError with the reason why it cannot be had."""
    _library_path(f"_C{sysconfig.get_config_var('EXT_SUFFIX')}")
    try:
        return importlib.import_module("thunderkittens._C")
    except ImportError as error:
        _damaged(
            f"the module _C, built for Python {_build.record()['python']}, does not load with "
            f"Python {platform.python_version()} ({error})"
        )


def keep(library: object) -> None:
    """Keeps what registers kernels as long as the process lives."""
    _libraries.append(library)


def explain_missing_kernels() -> None:
    """Gives every op that has no CUDA implementation one that raises the reason.

    To be called when everything else is registered. Ops that are made of others have none of their
    own and need none.
    """
    import torch

    fallbacks = torch.library.Library("thunderkittens", "IMPL")
    for name in torch._C._dispatch_get_all_op_names():
        if not name.startswith("thunderkittens::"):
            continue
        has_kernel = partial(torch._C._dispatch_has_kernel_for_dispatch_key, name)
        if any(map(has_kernel, ("CUDA", *_COMPOSITE))):
            continue
        short = name.removeprefix("thunderkittens::")
        reason = cuda_problem or (
            f"this build of thunderkittens has no CUDA kernel for {short}; it was built for: "
            f"{', '.join(_build.record()['families']) or 'no op'}"
        )
        fallbacks.impl(short, _raiser(short, reason), "CUDA")
    keep(fallbacks)


def _raiser(op: str, reason: str) -> Callable[..., NoReturn]:
    def no_kernel(*args: object, **kwargs: object) -> NoReturn:
        raise RuntimeError(f"tk.{op.removesuffix('_forward')}: {reason}")

    return no_kernel
