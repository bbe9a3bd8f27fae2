"""The GPU kernels on the CPU: `with tk.emulate(): tk.gemm(a, b)` runs, on CPU tensors, the very
kernel that a Hopper GPU would run, or with `portable` the one that other GPUs would.

The emulator executes the kernel's source, compiled for the CPU, with the hardware's asynchrony made
adversarial, and checks every access: a missing wait, a wrong phase, memory that is reused too
early, a missing fence, an access out of bounds raise `EmulatorError` with a message that names the
kernel, block, warp and barrier or address; a deadlock raises `DeadlockError` with what each warp
waits for.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import importlib
import importlib.util
import os
import shlex
import subprocess
import sysconfig
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from . import _build

POLICIES = ("on_wait", "late_mma", "eager", "random")

#: Why there is no emulator, or None when there is one.
problem: str | None = None


def _load_module() -> ModuleType | None:
    global problem
    if _build.find(f"_emulator{sysconfig.get_config_var('EXT_SUFFIX')}") is None:
        problem = (
            "this build of thunderkittens has no emulator: it was built without CUDA's headers"
        )
        return None
    return importlib.import_module("thunderkittens._emulator")


_module = _load_module()


class _NoEmulatorError(RuntimeError):
    """Stands for the emulator's exceptions in a build without it."""


#: What the emulator raises for a mistake of a kernel. The message names the kernel, the block, the
#: warp, and the barrier or the address.
EmulatorError: type[RuntimeError] = _module.EmulatorError if _module else _NoEmulatorError
#: The `EmulatorError` of a kernel in which no thread can go on. The message lists what each warp
#: waits for.
DeadlockError: type[RuntimeError] = _module.DeadlockError if _module else _NoEmulatorError


@dataclass
class Emulation:
    """How kernels are emulated, and which have run: `kernels` grows by a dictionary per launch, the
    chosen configuration and the kernel's name."""

    policy: str
    seed: int
    config: Mapping[str, Any]
    sm_count: int
    host_threads: int
    check_order: bool
    replay: bool = False
    portable: bool = False
    kernels: list[dict[str, Any]] = field(default_factory=list)


_active: ContextVar[Emulation | None] = ContextVar("thunderkittens_emulation", default=None)


def current() -> Emulation | None:
    """The emulation that CPU tensors go to here, if any."""
    return _active.get()


def active() -> bool:
    """Whether CPU tensors go to the emulated kernels here."""
    return _active.get() is not None


def portable() -> bool:
    """Whether these are portable kernels alone."""
    emulation = _active.get()
    return emulation is not None and emulation.portable


@contextlib.contextmanager
def emulate(
    policy: str = "on_wait",
    seed: int = 0,
    *,
    config: Mapping[str, Any] | None = None,
    sm_count: int = 132,
    host_threads: int = 1,
    check_order: bool = True,
    replay: bool = False,
    portable: bool = False,
) -> Iterator[Emulation]:
    """Ops on CPU tensors run their GPU kernels, on the emulator, until the end of the `with` block.

    Args:
        policy: when asynchronous operations complete. "on_wait": as late as possible, which shows
            missing waits; "late_mma": copies at issue and products as late as possible, which
            shows memory that is reused too early; "eager": all at issue; "random": in an order
            drawn from the seed, in which threads run too.
        seed: of the random choices.
        config: fields of the kernel's configuration to be forced, as `kernels` shows them, e.g.
            {"block_m": 64, "block_n": 128, "stages": 8, "consumers": 1}. Which kernel runs follows
            from them, unless "strategy" names it.
        sm_count: multiprocessors of the emulated device (an H200 has 132). Fewer make persistent
            kernels process several tiles per block.
        host_threads: CPU threads that clusters of blocks are spread over.
        check_order: whether accesses to memory are checked for barriers, flags and fences in
            between; without, emulation takes about half the time.
        replay: calls whose kernels have a workspace run twice on the same memory, as a replayed
            CUDA graph does; results are those of the second run.
        portable: the emulated device runs the kernels for every GPU of compute capability 8.0 and
            later alone, not those for a Hopper GPU.

    Returns:
        The `Emulation`; its `kernels` lists what has run.

    Raises:
        ValueError: the policy is none of the above.
        RuntimeError: this build has no emulator.

    Example:
        >>> with tk.emulate("random", seed=7) as run:
        ...     y = tk.gemm(a, b)  # bf16 or fp16 CPU tensors
        >>> run.kernels[0]["kernel"]
        'bf16_nn_64x64_cluster'
    """
    if _module is None:
        raise RuntimeError(f"tk.emulate: {problem}")
    if policy not in POLICIES:
        raise ValueError(f"tk.emulate: policy is {policy!r}; it must be one of {POLICIES}")
    forced = dict(config or {})
    options = (host_threads, check_order, replay, portable)
    emulation = Emulation(policy, seed, forced, sm_count, *options)
    token = _active.set(emulation)
    try:
        yield emulation
    finally:
        _active.reset(token)


def has(op: str) -> bool:
    """Whether the emulator has kernels of an op."""
    return _module is not None and op in _module.ops()


def _device(emulation: Emulation) -> dict[str, Any]:
    """What is said of the emulated device."""
    return {"sm_count": emulation.sm_count, "portable_only": emulation.portable}


def supports(op: str, problem: Mapping[str, Any]) -> bool:
    """Whether the emulator has a kernel of an op for a problem."""
    if _module is None or op not in _module.ops():
        return False
    emulation = _active.get()
    device = {} if emulation is None else _device(emulation)
    return not _module.unsupported(op, problem, device)


def run(op: str, arrays: Mapping[str, Tensor | None], **scalars: Any) -> dict[str, Tensor]:
    """Runs an op's kernel under the active emulation; results by their names."""
    emulation = _active.get()
    assert emulation is not None
    assert _module is not None
    values = {name: value for name, value in scalars.items() if value is not None}
    results, choice = _module.run(
        op,
        {name: _to_numpy(x) for name, x in arrays.items() if x is not None},
        values,
        config=emulation.config,
        device=_device(emulation),
        policy=emulation.policy,
        seed=emulation.seed,
        host_threads=emulation.host_threads,
        check_order=emulation.check_order,
        replay=emulation.replay,
    )
    if choice:
        emulation.kernels.append(choice)
    return {name: _to_torch(x) for name, x in results.items()}


def _to_numpy(x: Tensor) -> Any:
    x = x.detach().resolve_neg()
    # NumPy has no bfloat16 and no fp8; their bits travel as integers.
    return (x.view(_BITS[x.dtype]) if x.dtype in _BITS else x).numpy()


def _to_torch(x: Any) -> Tensor:
    if x.dtype == "uint16":
        return torch.from_numpy(x.view("int16")).view(torch.bfloat16)
    if x.dtype == "uint8":
        return torch.from_numpy(x).view(torch.float8_e4m3fn)
    if x.dtype == "int8":
        return torch.from_numpy(x).view(torch.float8_e5m2)
    return torch.from_numpy(x)


NAMES = {
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.float32: "fp32",
    torch.float8_e4m3fn: "e4m3",
    torch.float8_e5m2: "e5m2",
}
_BITS = {
    torch.bfloat16: torch.int16,
    torch.float8_e4m3fn: torch.uint8,
    torch.float8_e5m2: torch.int8,
}


NO_HEADERS = (
    "kernels for the emulator are compiled with CUDA 13's headers (no CUDA compiler is needed), "
    "which are not here: pip install 'cuda-toolkit[cccl,crt,cudart]==13.0.*', or set CUDA_HOME"
)


def cuda_headers() -> Path | None:
    """The folder of CUDA 13's headers, which sources for the emulator include: of the toolkit that
    the environment names (THUNDERKITTENS_CUDA_HOME, CUDA_HOME), of pip, or of the system."""
    folders = [
        Path(os.environ[name]) / "include"
        for name in ("THUNDERKITTENS_CUDA_HOME", "CUDA_HOME")
        if name in os.environ
    ]
    if spec := importlib.util.find_spec("nvidia"):
        for root in spec.submodule_search_locations or []:
            folders += sorted(Path(root).glob("cu13*/include"))
    folders.append(Path("/usr/local", "cuda", "include"))
    needed = ("cuda_fp8.h", "crt/host_config.h", "nv/target")
    return next((f for f in folders if all((f / name).is_file() for name in needed)), None)


def compile_command(
    *sources: str | Path, output: str | Path, shared: bool = False, flags: Sequence[str] = ()
) -> list[str]:
    """The command that compiles kernels of one's own for the emulator, by the C++ compiler.

    Args:
        sources: C++ files that include `kittens.cuh`; `.cu` files are taken as C++ too.
        output: the program, or with `shared` the library, to be made.
        flags: further flags for the compiler.

    Raises:
        FileNotFoundError: there are no CUDA headers; the message says how to get them.
    """
    kind = ("-shared", "-fPIC") if shared else ("-rdynamic",)
    own = ("-x", "c++", *map(str, sources), "-x", "none")
    return [*_compiler(), *kind, *flags, *own, "-o", str(output), "-ldl", "-pthread"]


def _compiler() -> list[str]:
    """The compiler, the flags of all that it compiles, and where the headers are."""
    from . import get_include

    headers = cuda_headers()
    if headers is None:
        raise FileNotFoundError(NO_HEADERS)
    return [
        *shlex.split(os.environ.get("CXX", "c++")),
        *("-std=c++20", "-O2", "-g1", "-fno-strict-aliasing", "-Wno-psabi"),
        *(f"-I{get_include()}/kittens", f"-I{get_include()}", "-isystem", str(headers)),
    ]


def _compile(command: Sequence[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"{shlex.join(command)} failed:\n{done.stderr}")


_APART = "-DKITTENS_EMULATOR_APART"


def _machine(flags: Sequence[str] = ()) -> Path:
    """The emulator itself, which takes most of the time of a compilation, as an object file for
    sources that are compiled with KITTENS_EMULATOR_APART: of the cache, or compiled into it.

    Its name stands for all that it is made of: the compiler, the flags and the headers.

    Raises:
        OSError: the cache's folder cannot be written.
    """
    from . import get_include

    command = [*_compiler(), "-fPIC", "-fvisibility=hidden", _APART, *flags, "-x", "c++"]
    # What the compiler calls itself, and what it makes of flags such as -march=native.
    dry_run = [*command, "-###", "-S", os.devnull, "-o", os.devnull]
    made_of = hashlib.sha256(subprocess.run(dry_run, capture_output=True, check=False).stderr)
    include = Path(get_include(), "kittens")
    for header in sorted(include.rglob("*.*h")):
        made_of.update(f"{header.relative_to(include)}\n".encode() + header.read_bytes())
    for header in sorted(Path(str(cuda_headers())).glob("*.h*")):
        state = header.stat()
        made_of.update(f"{header} {state.st_size} {state.st_mtime_ns}\n".encode())
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    folder = Path(os.environ.get("THUNDERKITTENS_CACHE") or Path(cache, "thunderkittens"))
    folder.mkdir(parents=True, exist_ok=True)
    machine = folder / f"machine-{made_of.hexdigest()[:32]}.o"
    # One process compiles, others wait for it; a file of this name is whole.
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not machine.exists():
            part = machine.with_suffix(".part")
            source = include / "arch/emulated/machine/machine.h"
            _compile([*command, "-include", str(source), "-c", os.devnull, "-o", str(part)])
            part.replace(machine)
    return machine


def load(
    name: str, *sources: str | Path, flags: Sequence[str] = (), output: str | Path | None = None
) -> ModuleType:
    """Compiles kernels of one's own for the emulator and imports them as the module `name`.

    The sources end with `KITTENS_PYTHON_MODULE(TORCH_EXTENSION_NAME, m)` (kittens/python.cuh); the
    functions of the module take CPU tensors and run, inside `with tk.emulate(...)`, by its policy,
    elsewhere by that of the environment. `torch.utils.cpp_extension.load` does the same for a GPU.

    Args:
        name: the module's name, of which TORCH_EXTENSION_NAME is made.
        sources, flags: as `compile_command` takes them.
        output: where the library stays; by default nothing does.

    The emulator itself is compiled once for all modules, and kept in the folder
    THUNDERKITTENS_CACHE, by default `thunderkittens` in the user's cache.

    Raises:
        FileNotFoundError: there are no CUDA headers, or none of Python.
        RuntimeError: the compiler fails; the message is its own.
    """
    python = Path(sysconfig.get_path("include"))
    if not (python / "Python.h").is_file():
        raise FileNotFoundError(
            f"{python / 'Python.h'} is missing: install the headers of this Python (python3-dev)"
        )
    own = [f"-I{python}", f"-DTORCH_EXTENSION_NAME={name}", "-fvisibility=hidden"]
    own += ["-Wno-unknown-pragmas"]
    _compiler()  # without headers, the error is this one's
    if _APART not in flags:
        # Where nothing can be cached, the emulator is compiled with the sources; where it cannot be
        # compiled, the error is that of the whole.
        with contextlib.suppress(OSError, RuntimeError):
            own += [_APART, str(_machine(flags))]
    with tempfile.TemporaryDirectory() as folder:
        library = Path(output) if output is not None else Path(folder, f"{name}.so")
        _compile(compile_command(*sources, output=library, shared=True, flags=[*own, *flags]))
        spec = importlib.util.spec_from_file_location(name, library.resolve())
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    return module
