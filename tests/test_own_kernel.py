"""A kernel of one's own: found by CMake, made a Python function (kittens/python.cuh), called.

`tests/own_kernel` is a project as a user has one, built against the package under test.
"""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
import torch

import thunderkittens as tk
from helpers.toolkit import find_tool
from thunderkittens import emulation
from thunderkittens.__main__ import main

PROJECT = Path(__file__).with_name("own_kernel")


def run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def build(folder: Path, target: str, *options: str) -> Path:
    """Without optimisation: the compiler takes most of the time."""
    cmake = shutil.which("cmake")
    if cmake is None:
        pytest.skip("there is no cmake")
    if emulation.cuda_headers() is None:
        pytest.skip(emulation.NO_HEADERS)
    options += (f"-DPython_EXECUTABLE={sys.executable}", f"-Dkittens_DIR={tk.get_cmake_dir()}")
    options += (f"-DKITTENS_CUDA_INCLUDE={emulation.cuda_headers()}",)
    if shutil.which("ninja"):
        options += ("-GNinja",)
    run(cmake, "-S", str(PROJECT), "-B", str(folder), *options)
    run(cmake, "--build", str(folder), "--target", target)
    return folder / f"{target}.abi3.so"


def load(library: Path):
    spec = importlib.util.spec_from_file_location(library.name.partition(".")[0], library)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def own(tmp_path_factory):
    folder = tmp_path_factory.mktemp("own_kernel")
    return load(build(folder, "own_kernel"))


def operands(heads=2, length=20, device="cpu"):
    x = torch.arange(heads * length * 64, device=device).reshape(heads, length, 64) % 97 - 48
    return x.to(torch.bfloat16), torch.ones(heads, length, 64, device=device)


def test_package_is_found_by_its_prefix(tmp_path, capsys):
    """CMAKE_PREFIX_PATH with the package's folder, too; and a version that is not there is not."""
    cmake = shutil.which("cmake")
    if cmake is None:
        pytest.skip("there is no cmake")
    assert main(["cmake-dir"]) == 0
    folder = Path(capsys.readouterr().out.strip())
    assert folder == Path(tk.get_cmake_dir())
    assert (folder / "kittensConfig.cmake").is_file()
    script = tmp_path / "find.cmake"
    if folder.parent.name == "cmake" and folder.parent.parent.name == "share":
        script.write_text(
            f"set(CMAKE_PREFIX_PATH {folder.parents[2]})\n"
            f"set(KITTENS_CUDA_INCLUDE {tmp_path})\nset(CMAKE_SIZEOF_VOID_P 8)\n"
            'find_package(kittens 9.0 QUIET)\nmessage(STATUS "${kittens_CONSIDERED_CONFIGS}")\n'
            'message(STATUS "${kittens_CONSIDERED_VERSIONS} ${kittens_FOUND}")\n'
        )
        output = run(cmake, "-P", str(script))
        assert str(folder / "kittensConfig.cmake") in output
        assert f"{tk.__version__} 0" in output


@pytest.mark.skipif(emulation.problem is not None, reason="no emulator")
def test_call(own):
    x, total = operands()
    version = total._version
    with tk.emulate("late_mma") as emulated:
        y = own.scale(x, total, 0.5, twice=True)
    assert emulated.kernels == [{"kernel": "scale"}]
    assert y.dtype is torch.bfloat16
    assert torch.equal(y, x)
    assert torch.equal(total, 1 + x.float())
    assert total._version == version + 1  # autograd knows that it has changed
    given = torch.empty_like(x)
    assert own.scale(x=x, total=total, factor=2, rows=3, y=given) is given
    assert torch.equal(given[:, :3], 2 * x[:, :3])
    assert not given[:, 3:].any()


def test_strides_are_those_of_the_tensor(own):
    x, total = operands(3, 40)
    sliced = x.transpose(0, 1).contiguous().transpose(0, 1)[::2, 4:-1]
    y = own.scale(sliced, total[:2, :35], 1.0)
    assert torch.equal(y, sliced)
    assert torch.equal(total[:2, :35], 1 + sliced.float())
    assert (total[2] == 1).all()


WRONG = {
    "missing": (lambda x, t: (x, t), TypeError, "scale: factor is missing"),
    "kind": (lambda x, t: (x, 3, 1.0), TypeError, "total must be a torch.Tensor, got int"),
    "dtype": (
        lambda x, t: (x.half(), t, 1.0),
        TypeError,
        "x is torch.float16, expected torch.bfloat16",
    ),
    "device": (
        lambda x, t: (x.to("meta"), t, 1.0),
        TypeError,
        "x is on meta; this module is built for the emulator and takes CPU tensors",
    ),
    "layout": (lambda x, t: (x.to_sparse(), t, 1.0), TypeError, "x must be a dense tensor"),
    "dimensions": (
        lambda x, t: (x[0], t, 1.0),
        ValueError,
        r"x has shape (20, 64), expected 3 dimensions (heads, length, 64)",
    ),
    "size": (
        lambda x, t: (x, t[:, 1:], 1.0),
        ValueError,
        "total has shape (2, 19, 64), expected (heads, length, _) with length = 20, that of x",
    ),
    "of the layout": (
        lambda x, t: (x, t[..., :32], 1.0),
        ValueError,
        "total has shape (2, 20, 32), expected (heads, length, _) with _ = 64",
    ),
    "fixed": (
        lambda x, t: (x[..., :32], t, 1.0),
        ValueError,
        "x has shape (2, 20, 32), expected (heads, length, 64)",
    ),
    "empty": (
        lambda x, t: (x[:0], t, 1.0),
        ValueError,
        "x has shape (0, 20, 64), expected (heads, length, 64) with an element at least",
    ),
    "columns": (
        lambda x, t: (x.mT.contiguous().mT, t, 1.0),
        ValueError,
        "x has strides (1280, 1, 20), expected adjacent elements",
    ),
    "shared memory": (
        lambda x, t: (x, t[:1].expand(2, 20, 64), 1.0),
        ValueError,
        "total has strides (0, 64, 1), so elements to be written share memory",
    ),
    "negated": (
        lambda x, t: (x, torch.complex(t, t).conj().imag, 1.0),
        TypeError,
        "total is a negated view",
    ),
    "gradient": (
        lambda x, t: (x.clone().requires_grad_(), t, 1.0),
        TypeError,
        "x requires a gradient, which this function does not have",
    ),
    "tensor for a number": (
        lambda x, t: (x, t, torch.tensor(1.0)),
        TypeError,
        "factor must be a float, got Tensor",
    ),
    "float for an int": (
        lambda x, t: (x, t, 1.0, 2.0),
        TypeError,
        "rows must be an int, got float",
    ),
    "int out of range": (
        lambda x, t: (x, t, 1.0, 2**40),
        ValueError,
        "rows is 1099511627776, expected -2147483648 to 2147483647",
    ),
    "int for a bool": (lambda x, t: (x, t, 1.0, 2, 1), TypeError, "twice must be a bool, got int"),
    "the launch's own": (
        lambda x, t: (x, t, 1.0, -1),
        ValueError,
        "scale: rows must not be negative",
    ),
    "too many": (
        lambda x, t: (x, t, 1.0, 2, True, x, x),
        TypeError,
        "takes 6 arguments by position, got 7",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_calls(own, case):
    make, error, sentence = WRONG[case]
    with pytest.raises(error) as raised:
        own.scale(*make(*operands()))
    assert sentence in str(raised.value)


def test_wrong_keywords(own):
    x, total = operands()
    with pytest.raises(TypeError, match="scale: has no argument z; it has x, total, factor, rows"):
        own.scale(x, total, 1.0, z=1)
    with pytest.raises(TypeError, match="scale: x is given twice"):
        own.scale(x, total, 1.0, x=x)


def test_gradients_are_refused_only_where_they_are_recorded(own):
    x, total = operands()
    with torch.no_grad():
        assert torch.equal(own.scale(x.clone().requires_grad_(), total, 1.0), x)


def test_what_a_kernel_may_not_write(own):
    """An output whose size no input has must be given; an input must not be written."""
    x = torch.zeros(16, 64)
    with pytest.raises(TypeError, match="wrong: y is missing"):
        own.wrong(x)
    with pytest.raises(tk.EmulatorError, match=r"wrong: .*\bx\b"):
        own.wrong(x, x.clone())


def test_documentation(own):
    assert own.scale.__text_signature__ == ("(x, total, factor, rows=None, twice=None, y=None)")
    for line in (
        "x: torch.bfloat16 (heads, length, 64)",
        "total: torch.float32 (heads, length, _), updated in place",
        "rows: int",
        "y: torch.bfloat16 (heads, length, 64), written",
    ):
        assert line in own.scale.__doc__


def test_no_reference_is_lost(own):
    x, total = operands()

    def counts():
        return [sys.getrefcount(o) for o in (x, total, torch.bfloat16, torch.float32)]

    def calls():
        own.scale(x, total, 1.0)
        with pytest.raises(ValueError, match="with length"):
            own.scale(x, total[:, 1:], 1.0)

    calls()
    before = counts()
    for _ in range(10):
        calls()
    assert counts() == before


def test_operator_of_torch(own):
    """As an operator a function goes through torch.compile, as a node of the graph."""

    @torch.library.custom_op("own_kernel::scale", mutates_args=("total",))
    def scale(x: torch.Tensor, total: torch.Tensor, factor: float) -> torch.Tensor:
        return own.scale(x, total, factor)

    @scale.register_fake
    def _(x, total, factor):
        return torch.empty_like(x)

    x, total = operands()
    compiled = torch.compile(
        lambda x, total: scale(x, total, 2.0) + 1, backend="aot_eager", fullgraph=True
    )
    assert torch.equal(compiled(x, total), 2 * x + 1)


@pytest.mark.timeout(600)
def test_compiles_for_a_gpu(tmp_path):
    """By CMake, for sm_90a."""
    nvcc = find_tool("nvcc")
    if nvcc is None:
        pytest.skip("there is no nvcc")
    options = ("-DGPU=ON", f"-DCMAKE_CUDA_COMPILER={nvcc}")
    module = load(build(tmp_path, "own_kernel_gpu", *options))
    with pytest.raises(TypeError, match="x is on cpu; this module is built for GPUs"):
        module.scale(*operands(), 1.0)


@pytest.mark.gpu
@pytest.mark.timeout(600)
def test_extension_of_torch(tmp_path):
    """Through torch.utils.cpp_extension.load, on a stream and in a graph, on a second GPU."""
    from torch.utils import cpp_extension

    if cpp_extension.CUDA_HOME is None or not shutil.which("ninja"):
        pytest.skip("there is no nvcc, or no ninja")
    own = cpp_extension.load(
        "own_kernel_extension",
        [str(PROJECT / "scale.cu")],
        build_directory=str(tmp_path),
        extra_include_paths=[tk.get_include()],
        extra_cuda_cflags=["-std=c++20", "-O3", "-gencode=arch=compute_90a,code=sm_90a"],
    )
    x, total = operands(device="cuda")
    assert torch.equal(own.scale(x, total, 2.0), 2 * x)

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    graph, y = torch.cuda.CUDAGraph(), torch.zeros_like(x)
    with torch.cuda.graph(graph, stream=stream):  # a wait, or another stream, would be an error
        own.scale(x, total, 3.0, y=y)
    assert not y.any()
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(y, 3 * x)

    last = torch.cuda.device_count() - 1
    if last > 0:
        x, total = operands(device=f"cuda:{last}")
        assert torch.equal(own.scale(x, total, 2.0), 2 * x)
        assert torch.cuda.current_device() == 0
        with pytest.raises(TypeError, match="total is on cuda:0, x is on cuda:"):
            own.scale(x, total.to("cuda:0"), 2.0)


def test_python_headers_that_are_missing(monkeypatch, tmp_path):
    monkeypatch.setattr(sysconfig, "get_path", lambda _: str(tmp_path))
    with pytest.raises(FileNotFoundError, match=r"Python\.h is missing: install the headers"):
        emulation.load("anything", PROJECT / "scale.cu")


def test_the_emulator_is_compiled_once(monkeypatch, tmp_path):
    """For each compiler, flags and headers; a compilation that fails leaves nothing behind."""
    if emulation.cuda_headers() is None:
        pytest.skip(emulation.NO_HEADERS)
    commands = []

    def compile_nothing(command):
        commands.append(command)
        if "-DWRONG" in command:
            raise RuntimeError("failed")
        Path(command[-1]).touch()

    monkeypatch.setattr(emulation, "_compile", compile_nothing)
    monkeypatch.setenv("THUNDERKITTENS_CACHE", str(tmp_path / "cache"))
    first = emulation._machine()
    assert first.is_file()
    assert emulation._machine() == first
    assert len(commands) == 1
    assert emulation._machine(["-O0"]) != first
    assert emulation._machine(["-march=x86-64"]) != first
    with pytest.raises(RuntimeError, match="failed"):
        emulation._machine(["-DWRONG"])
    assert len(list((tmp_path / "cache").glob("*.o"))) == 3

    (tmp_path / "file").touch()
    monkeypatch.setenv("THUNDERKITTENS_CACHE", str(tmp_path / "file"))
    with pytest.raises(OSError, match="file"):
        emulation._machine()
