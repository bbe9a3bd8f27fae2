"""Kernels that are forced: what else than its choice an op could run, and how to make it run that.

For measurements of a choice alone. `_C.candidates` says what could run; an exported function of the
CUDA library makes the op overwrite fields of its choice, for the whole process.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from .. import _build, _load, info
from .cases import Case, Implementation, Prepared, bind

# Of a choice, but given by the problem.
GIVEN = ("kernel", "dtype", "a_m_major", "b_n_major", "a_dtype", "b_dtype")
Fields = dict[str, Any]


def gpu_record() -> dict[str, Any]:
    """The properties of the first GPU that choose() asks for; those of an H200 without one."""
    with contextlib.suppress(Exception):  # no torch with CUDA, or no GPU: each raises its own type
        return {key: info._gpus()[0][key] for key in info.EXAMPLE_GPU}
    return dict(info.EXAMPLE_GPU)


def kernel_of(op: str, case: Case, gpu: Mapping[str, Any]) -> str:
    """The kernel that the op chooses for a case whose parameters name the problem; else ""."""
    problem = case.parameters.get("problem")
    if problem is None:
        return ""
    try:
        kernel = info.kernel_for(op, dict(problem), dict(gpu))
    except (ImportError, RuntimeError, ValueError):  # a build without the op or without _C
        return ""
    return "" if kernel.startswith("none: ") else kernel


def candidates(op: str, problem: Mapping[str, Any], gpu: Mapping[str, Any]) -> list[Fields]:
    """The fields of the choice, and of what else could run; empty where the op does not say."""
    module = _load.compiled_module()
    properties = {key: int(gpu[key]) for key in info.EXAMPLE_GPU}
    device = module.DeviceProperties(**properties).restricted()
    if op not in module.ops() or module.unsupported(op, dict(problem), device):
        return []
    return [dict(fields) for fields in module.candidates(op, dict(problem), device)]


def _word(value: Any) -> str:
    """The name of a kernel, or a number."""
    return value if isinstance(value, str) else str(int(value))


def labels(found: Sequence[Fields]) -> list[str]:
    """A name for each candidate: its kernel, and where several are of one kernel the fields in
    which these differ."""
    result = []
    for fields in found:
        alike = [other for other in found if other["kernel"] == fields["kernel"]]
        differing = [
            f"{key} {_word(fields[key])}"
            for key in fields
            if key not in GIVEN and any(other[key] != fields[key] for other in alike)
        ]
        text = ", ".join(differing)
        result.append(f"{fields['kernel']} ({text})" if text else str(fields["kernel"]))
    return result


def text_of(fields: Mapping[str, Any]) -> str:
    """The fields to force as the library takes them."""
    return " ".join(f"{key}={_word(x)}" for key, x in fields.items() if key not in GIVEN)


def library_function() -> Callable[[bytes, bytes], bool]:
    """thunderkittens_force of the CUDA library, which torch has loaded already."""
    path = _build.find("_cuda.so")
    if path is None:
        raise ValueError("kernels cannot be forced: this build has no CUDA kernels")
    function = ctypes.CDLL(str(path)).thunderkittens_force
    function.argtypes, function.restype = [ctypes.c_char_p, ctypes.c_char_p], ctypes.c_bool
    result: Callable[[bytes, bytes], bool] = function
    return result


@contextlib.contextmanager
def forced(force: Callable[[bytes, bytes], bool], op: str, text: str) -> Iterator[None]:
    """The op runs what `text` says, in every thread, until the end of the block."""
    if not force(op.encode(), text.encode()):
        raise ValueError(f"{op}: the fields {text!r} cannot be forced")
    try:
        yield
    finally:
        force(b"", b"")


def forcing(
    implementation: Implementation, op: str, fields: Mapping[str, Any], force: Any
) -> Prepared:
    """An implementation of the op whose calls run a candidate."""
    text = text_of(fields)

    def prepare(**inputs: Any) -> Callable[[], Any]:
        call = bind(implementation, inputs)

        def run() -> Any:
            with forced(force, op, text):
                return call()

        return run

    return Prepared(prepare)
