"""The installed package: what it holds and what it must not, how it fails, what the build reports.

Works on a wheel's installation and on a development build alike.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import struct
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

import pytest
import torch

import thunderkittens as tk
from thunderkittens import _build, _load, emulation, info
from thunderkittens.__main__ import main

ROOT = Path(__file__).resolve().parents[1]
MEGABYTE = 2**20
NOTICES = "THIRD_PARTY_NOTICES.txt"


def installed_files() -> list[Path]:
    """Every file of the package, as shipped: without byte code, which the installer adds."""
    return sorted(
        path
        for folder in tk.__path__
        for path in Path(folder).rglob("*")
        if path.is_file() and path.suffix != ".pyc"
    )


def compiled(name: str) -> Path:
    path = _build.find(name)
    assert path is not None, f"{name} is not installed"
    return path


C_MODULE = f"_C{sysconfig.get_config_var('EXT_SUFFIX')}"
CALL_MODULE = C_MODULE.replace("_C", "_call", 1)
HAS_CUDA_LIBRARY = bool(_build.record()["cuda_archs"] and _build.record()["families"])
EMULATOR = f"_emulator{sysconfig.get_config_var('EXT_SUFFIX')}"
LIBRARIES = [
    "_schemas.so",
    *(["_cuda.so"] if HAS_CUDA_LIBRARY else []),
    *([EMULATOR] if emulation.problem is None else []),
    *(["_autograd.so"] if _build.find("_autograd.so") else []),
    *([CALL_MODULE] if _build.find(CALL_MODULE) else []),
    C_MODULE,
]


class Elf:
    """The dynamic section of a shared library: needed libraries, run path, undefined symbols."""

    def __init__(self, path: Path) -> None:
        self.data = path.read_bytes()
        assert self.data[:6] == b"\x7fELF\x02\x01", (
            f"{path.name} is no 64-bit little-endian ELF file"
        )
        table, entry_bytes, count = (
            struct.unpack_from("<Q", self.data, 40)[0],
            *struct.unpack_from("<HH", self.data, 58),
        )
        # name, type, flags, address, offset, size, link
        self.sections = [
            struct.unpack_from("<IIQQQQI", self.data, table + i * entry_bytes) for i in range(count)
        ]
        self.needed, self.run_paths = [], []
        for section in self.sections:
            if section[1] == 6:  # SHT_DYNAMIC
                self._read_dynamic(section)

    def _string(self, table: int, at: int) -> str:
        start = self.sections[table][4] + at
        return self.data[start : self.data.index(b"\0", start)].decode()

    def _read_dynamic(self, section: tuple[int, ...]) -> None:
        for at in range(section[4], section[4] + section[5], 16):
            tag, value = struct.unpack_from("<QQ", self.data, at)
            if tag == 1:
                self.needed.append(self._string(section[6], value))
            elif tag in (15, 29):
                self.run_paths.append(self._string(section[6], value))

    def symbols(self, *, defined: bool) -> list[str]:
        """Names of the dynamic symbols that the library defines, or takes from others."""
        names = []
        for section in self.sections:
            if section[1] == 11:  # SHT_DYNSYM
                for at in range(section[4] + 24, section[4] + section[5], 24):
                    name, _, _, index = struct.unpack_from("<IBBH", self.data, at)
                    if (index != 0) == defined:
                        names.append(self._string(section[6], name))
        return names


def run_python(code: str, path: Path | None = None, *, check: bool = True) -> str:
    """Runs Python code in a process of its own, outside the source tree; returns all its output."""
    return run([sys.executable, "-c", code], path, check=check)


def run(command: list[str], path: Path | None = None, *, check: bool = True) -> str:
    environment = dict(os.environ)
    paths = [str(path)] if path else environment.get("PYTHONPATH", "").split(os.pathsep)
    environment["PYTHONPATH"] = os.pathsep.join(str(Path(p).resolve()) for p in paths if p)
    done = subprocess.run(
        command,
        env=environment,
        cwd=tempfile.gettempdir(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=120,
    )
    assert not check or done.returncode == 0, done.stdout
    return done.stdout


# ---- contents ----


def test_version_is_the_project_s():
    declared = re.search(r'^version = "(.+)"', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    assert declared is not None
    assert tk.__version__ == declared[1]


@pytest.mark.parametrize(
    "name", [*LIBRARIES, "_build.json", "kernels.json", "py.typed", "_C.pyi", "_emulator.pyi"]
)
def test_package_holds(name):
    assert compiled(name).is_file()


def test_package_holds_the_tile_library_s_headers():
    include = Path(tk.get_include())
    sources = [p for p in (ROOT / "kittens").rglob("*") if p.suffix in (".h", ".cuh")]
    assert sources
    for source in sources:
        shipped = include / source.relative_to(ROOT)
        assert shipped.read_bytes() == source.read_bytes(), shipped


def test_package_holds_no_library_of_others():
    for path in installed_files():
        assert not re.search(r"lib(torch|c10|cu|nv)|\.a$|\.o$", path.name), path
    libraries = {path.name for path in installed_files() if ".so" in path.suffixes}
    assert libraries == set(LIBRARIES)


def test_package_is_small():
    total = sum(path.stat().st_size for path in installed_files())
    assert total < 52 * MEGABYTE, f"{total / MEGABYTE:.1f} MB"


def test_package_names_no_path_of_the_building_machine():
    places = {str(ROOT), str(Path.home()), sys.prefix, sys.base_prefix, tempfile.gettempdir()}
    places |= {str(Path(torch.__file__).parents[1]), "/usr/local/cuda", "pip-build-env", "/tmp"}
    places -= {"/", "/usr", "/usr/local"}  # every machine has them
    pattern = re.compile(b"|".join(re.escape(p.encode()) + rb"(?![\w.])" for p in sorted(places)))
    for path in installed_files():
        found = pattern.search(path.read_bytes())
        assert not found, f"{path.name} holds {found[0].decode()!r}"


def test_licences_are_in_the_metadata():
    """Of an installation. A development build has none; there the declaration is checked."""
    project = (ROOT / "pyproject.toml").read_text()
    declared = re.search(r"^license-files = (\[.+\])", project, re.MULTILINE)
    assert declared is not None
    names = json.loads(declared[1])
    assert set(names) == {"LICENSE", NOTICES}
    for folder in tk.__path__:
        for metadata in Path(folder).parent.glob("thunderkittens-*.dist-info"):
            for name in names:
                shipped = metadata / "licenses" / name
                assert shipped.read_bytes() == (ROOT / name).read_bytes(), shipped


def test_notices_hold_the_licences_of_what_is_compiled_in():
    notices = (ROOT / NOTICES).read_text()
    parts = {part.split("\n", 1)[0].split(":")[0]: part for part in notices.split("-" * 79 + "\n")}
    owners = {
        "pybind11": "Copyright (c) 2016 Wenzel Jakob",
        "PyTorch": "Copyright (c) 2016-     Facebook, Inc",
        "CUDA's device math library": "Copyright (c) 2015-2017, Norbert Juffa",
    }
    for name, owner in owners.items():
        assert owner in parts[name]
        assert "2. Redistributions in binary form must reproduce the above copyright" in parts[name]
        assert "IN NO EVENT SHALL THE COPYRIGHT" in parts[name]


# ---- linking ----


@pytest.mark.parametrize("library", LIBRARIES)
def test_library_needs_only_what_is_expected(library):
    expected = {
        "_schemas.so": {"libtorch_cpu.so"},
        "_cuda.so": {"libtorch_cpu.so", "libtorch_cuda.so", "libcudart.so.13"},
        "_autograd.so": {"libtorch_cpu.so", "libc10.so"},
        CALL_MODULE: {"libtorch_python.so", "libtorch_cpu.so", "libc10.so"},
        C_MODULE: set(),
        EMULATOR: set(),
    }[library]
    elf = Elf(compiled(library))
    system = re.compile(r"lib(stdc\+\+|m|gcc_s|c|dl|rt|pthread)\.so\.\d+|ld-linux.*")
    assert {name for name in elf.needed if not system.fullmatch(name)} == expected
    assert not elf.run_paths


@pytest.mark.parametrize(
    "library", [x for x in LIBRARIES if x not in ("_autograd.so", CALL_MODULE)]
)
def test_library_uses_the_stable_abi_alone(library):
    """Of torch only the C interface, of which torch promises that it stays."""
    for symbol in Elf(compiled(library)).symbols(defined=False):
        assert not re.match(r"_Z(T[VIS])?N?K?(2at|3c10|5torch|6caffe2)", symbol), symbol
        assert not symbol.startswith("cu") or symbol.startswith("cuda"), f"libcuda: {symbol}"


@pytest.mark.parametrize("library", LIBRARIES)
def test_library_hides_its_symbols(library):
    defined = Elf(compiled(library)).symbols(defined=True)
    ours = {s for s in defined if "kittens" in s}
    # What forces a choice, for measurements (csrc/common/forced.h).
    exported = {"thunderkittens_force", "thunderkittens_launches"}
    assert ours == (exported if library == "_cuda.so" else set())


def test_compiled_module_works_without_torch():
    code = f"""
import importlib.util, sys
spec = importlib.util.spec_from_file_location("_C", {str(compiled(C_MODULE))!r})
module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
print(module.ops(), len(module.kernels()), "torch" in sys.modules)
"""
    output = run_python(code)
    assert output.strip().endswith("False"), output


# ---- kernels ----

KERNELS = _build.kernel_table()


def test_table_of_kernels_covers_the_registry():
    from thunderkittens import _C

    kernels = _C.kernels()
    assert len({(k["op"], k["name"]) for k in kernels}) == len(kernels), "names are not unique"
    if HAS_CUDA_LIBRARY:
        # A portable kernel has a row for each architecture that it is compiled for.
        rows = [(row.get("op"), row.get("name"), row["arch"]) for row in info.kernels()]
        assert len(set(rows)) == len(rows)
        assert {row[:2] for row in rows} == {(k["op"], k["name"]) for k in kernels}
    else:
        assert not KERNELS


def kernels_with(fault):
    return [f"{row['source']}: {row['symbol']}" for row in KERNELS if fault(row)]


def test_kernels_do_not_spill():
    assert not kernels_with(
        lambda row: row["spill_store_bytes"] != 0 or row["spill_load_bytes"] != 0
    )


def test_kernels_have_registers_and_code():
    assert not kernels_with(lambda row: not 0 < row["registers"] <= 255 or row["code_bytes"] <= 0)


# ---- failures are one sentence ----


def test_old_torch_is_refused():
    with pytest.raises(
        ImportError, match=r"built for torch >= 2\.11, but torch 2\.9\.1\+cu128 is"
    ) as e:
        _load.check_torch("2.9.1+cu128")
    assert "pip install 'torch>=2.11'" in str(e.value)
    for version in ("2.11.0", "2.11.0a0+git1234", "2.12.1+cpu", "3.0"):
        _load.check_torch(version)


def test_torch_without_cuda_is_explained(monkeypatch):
    monkeypatch.setattr(
        _build, "record", lambda: {"version": "1", "cuda_archs": ["90a"], "families": ["gemm"]}
    )
    assert "this torch is built without CUDA; run: pip" in str(_load._cuda_problem(None))
    assert "this torch is built for CUDA 12.8" in str(_load._cuda_problem("12.8"))


def test_build_without_cuda_is_explained(monkeypatch):
    monkeypatch.setattr(
        _build, "record", lambda: {"version": "1", "cuda_archs": [], "families": ["gemm"]}
    )
    assert "was built without CUDA kernels" in str(_load._cuda_problem("13.0"))


def test_gpu_without_a_kernel_is_explained():
    from thunderkittens import _C

    turing = {**info.EXAMPLE_GPU, "major": 7, "minor": 5}
    reason = _C.no_code_for(_C.DeviceProperties(**turing))
    assert "holds" in reason
    for op in _C.ops():
        assert info.kernel_for(op, {}, turing) == f"none: {reason}"
    if HAS_CUDA_LIBRARY:
        assert "sm_90a, this GPU is sm_75" in reason
        assert _C.no_code_for(_C.DeviceProperties(**info.EXAMPLE_GPU)) == ""


def test_op_without_a_kernel_raises_the_reason():
    with pytest.raises(RuntimeError, match=r"tk\.gemm: no kernel"):
        _load._raiser("gemm_forward", "no kernel")(1, b=2)


@pytest.fixture
def copy(tmp_path):
    """A copy of the package, to be damaged; its folder goes on PYTHONPATH."""
    target = tmp_path / "thunderkittens"
    for folder in tk.__path__:
        shutil.copytree(folder, target, dirs_exist_ok=True)
    shutil.rmtree(target / "include", ignore_errors=True)
    return target


DAMAGES = {
    "_schemas.so": "the file _schemas.so is missing",
    "truncated _schemas.so": "the file _schemas.so is cut off",
    "_build.json": "",
    "kernels.json": "",
    C_MODULE: "",
    f"truncated {C_MODULE}": "",
}
if "_autograd.so" in LIBRARIES:
    DAMAGES |= {"_autograd.so": "", "truncated _autograd.so": ""}
if CALL_MODULE in LIBRARIES:
    DAMAGES |= {CALL_MODULE: "", f"truncated {CALL_MODULE}": ""}
if HAS_CUDA_LIBRARY:
    DAMAGES |= {"_cuda.so": "", "truncated _cuda.so": ""}


# At the lowest intensity those of which it is told, and a module that is missing.
@pytest.mark.parametrize(
    "damage",
    [
        pytest.param(d, marks=pytest.mark.intensity(1 if told or d == C_MODULE else 2))
        for d, told in DAMAGES.items()
    ],
)
def test_damaged_installation(copy, damage):
    """The import fails with the sentence, or works; `info` always works and shows it."""
    what = damage.split()[-1]
    if damage.startswith("truncated"):
        (copy / what).write_bytes((copy / what).read_bytes()[:1000])
    else:
        (copy / what).unlink()
    sentence = DAMAGES[damage]
    command = ["-m", "thunderkittens", "info"]
    if not sentence:
        # The import and what -m runs, in one process.
        code = "import runpy, sys, thunderkittens\nsys.argv[1:] = ['info']\n"
        command = ["-c", code + "runpy.run_module('thunderkittens.__main__', run_name='__main__')"]
    report = run([sys.executable, *command], copy.parent)
    assert "Traceback" not in report
    if sentence:
        output = run_python("import thunderkittens", copy.parent, check=False)
        assert f"is damaged: {sentence}" in output.split("\n")[-2]
        assert "pip install" in output
        assert sentence in report


def test_damaged_installation_stops_the_other_commands(copy):
    (copy / "_schemas.so").unlink()
    output = run([sys.executable, "-m", "thunderkittens", "demo"], copy.parent, check=False)
    assert "is damaged" in output
    assert "Traceback" not in output


def test_missing_torch_is_explained(copy):
    block = "import sys; sys.modules['torch'] = None; import thunderkittens"
    output = run_python(block, copy.parent, check=False)
    assert "thunderkittens needs torch >= 2.11" in output.split("\n")[-2]


def test_package_works_with_a_torch_without_cuda(copy):
    code = """
import torch
torch.version.cuda = None
import thunderkittens as tk
x = torch.ones(2, 4, dtype=torch.bfloat16)
print(tk.gemm(x, x.t()).tolist(), tk._load.cuda_problem)
"""
    output = run_python(code, copy.parent)
    assert "[[4.0, 4.0], [4.0, 4.0]]" in output


def test_products_are_not_serialised():
    assert not kernels_with(lambda row: row["warnings"]), "ptxas serialised wgmma"


# ---- the commands ----


def test_info_shows_every_op():
    output = run([sys.executable, "-m", "thunderkittens", "info"])
    for text in (tk.__version__, torch.__version__, *info.EXAMPLES):
        assert text in output
    assert "unavailable" not in output


def test_info_says_once_why_there_are_no_kernels(capsys):
    reason = "none: not for this GPU"
    ops = {op: dict.fromkeys(examples, reason) for op, examples in info.EXAMPLES.items()}
    info.print_report(info.collect() | {"ops": ops})
    output = capsys.readouterr().out
    assert output.count(reason) == 1
    assert all(op in output for op in ops)


def test_info_json_is_the_same_report(capsys):
    assert main(["info", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["thunderkittens"]["version"] == tk.__version__
    assert set(report["ops"]) == set(info.EXAMPLES)


def test_info_table_of_kernels(capsys):
    assert main(["info", "--kernels"]) == 0
    output = capsys.readouterr().out
    kernels = info.kernels()
    assert len(kernels) == len(KERNELS)
    for kernel in kernels:
        assert kernel["name"] in output


def test_info_does_not_fail_when_everything_does(monkeypatch, capsys):
    def broken(*_: object) -> None:
        raise RuntimeError("broken driver")

    monkeypatch.setattr(torch.cuda, "is_available", broken)
    monkeypatch.setattr(_load, "compiled_module", broken)
    info.print_report(info.collect())
    assert "unavailable (RuntimeError: broken driver)" in capsys.readouterr().out


@pytest.mark.parametrize("arguments", [["--help"], ["info", "--help"], ["--version"]])
def test_command_line_explains_itself(arguments, capsys):
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 0
    assert "thunderkittens" in capsys.readouterr().out


def test_editable_install_is_found(tmp_path, monkeypatch):
    """Files are looked up in every folder of the package, as an editable install has two."""
    (tmp_path / "kernels.json").write_text('{"kernels": [{"family": "x"}]}')
    monkeypatch.setattr(tk, "__path__", [str(tmp_path / "none"), str(tmp_path)])
    assert _build.kernel_table() == [{"family": "x"}]
    (tmp_path / "kernels.json").write_text("no JSON")
    assert _build.kernel_table() == []


def test_stub_names_what_the_module_has():
    from thunderkittens import _C

    stub = compiled("_C.pyi").read_text()
    declared = set(re.findall(r"^(?:def|class) (\w+)", stub, re.MULTILINE)) - {"Kernel"}
    assert declared == {name for name in dir(_C) if not name.startswith("_")}
