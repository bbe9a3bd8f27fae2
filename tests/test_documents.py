"""Every block of code of the README and of the documents: Python runs, page by page in one session;
C++ is compiled against the emulated tile library; the lines of a shell are commands that exist,
with files and options that exist. And every name of the package that a document says is there."""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import inspect
import itertools
import re
import shlex
import subprocess
import sys
import sysconfig
from functools import cache
from pathlib import Path

import pytest
import torch

import thunderkittens as tk
from helpers.documents import BLOCK, DOCUMENTS, ROOT, all_blocks
from thunderkittens import emulation
from thunderkittens.__main__ import COMMANDS

sys.path.insert(0, str(ROOT / "tools"))
import make_site
import reference_pages as reference

PYTHON = {path: [b for b in all_blocks("python") if b.path == path] for path in DOCUMENTS}
PYTHON = {path: found for path, found in PYTHON.items() if found}
CUDA = all_blocks("cuda", "cpp")
SHELL = all_blocks("bash")
CMAKE = all_blocks("cmake")
CHECKED = {"python", "cuda", "cpp", "bash", "cmake"}
PICTURES = {"mermaid"}


def name(path):
    return path.relative_to(ROOT).as_posix()


def test_every_block_is_of_a_language_that_is_checked():
    """Blocks without a language are output, diagrams of characters and layouts."""
    languages = {
        match["language"] for path in DOCUMENTS for match in BLOCK.finditer(path.read_text())
    }
    assert {"python", "cuda", "bash"} <= languages <= CHECKED | PICTURES | {""}
    fences = sum(len(re.findall(r"^[ ]*```", path.read_text(), re.M)) for path in DOCUMENTS)
    assert fences == 2 * sum(len(BLOCK.findall(path.read_text())) for path in DOCUMENTS)


# ---- Python ----


@pytest.mark.parametrize("path", PYTHON, ids=name)
def test_python_runs(path):
    """One block after the other, as in one session, in a namespace of the page's own."""
    names = {"__name__": name(path)}
    for block in PYTHON[path]:
        if "transformers" in block.code and not importlib.util.find_spec("transformers"):
            continue
        if "tk.emulate" in block.code and emulation.problem is not None:
            continue
        # The line numbers of an error are those of the document.
        above = block.around.split("<block>")[0].count("\n")
        code = "\n" * (block.line - 1 - above) + block.whole
        exec(compile(code, str(path), "exec"), names)
    gradients = [x.grad for x in names.values() if isinstance(x, torch.Tensor) and x.is_leaf]
    assert all(bool(g.isfinite().all()) for g in gradients if g is not None)


def test_pages_with_python_are_found():
    assert {"README.md", "docs/quickstart.md", "docs/tour.md"} <= {name(path) for path in PYTHON}


# ---- C++ ----


def prepared(code):
    """What a C++ compiler takes of a block: launches without nvcc's syntax, nothing for "..."."""
    code = re.sub(r"^\s*#include .*$", "", code, flags=re.MULTILINE)
    code = re.sub(r"\{ \.\.\. \}", "{}", code)
    code = re.sub(r"^\s*\.\.\.\s*$", "", code, flags=re.MULTILINE)
    return re.sub(
        r"^([\w:<>]+)<<<(.+), (.+), (.+)>>>\((.+)\);",
        r"kittens::launch(\1, \2, \3, 1, \4, nullptr, \5);",
        code,
        flags=re.MULTILINE,
    )


def test_cuda_compiles(tmp_path):
    """All in one file, each block in a namespace of its own, behind what all of them include.
    "#line" has errors name the page."""
    assert len(CUDA) > 10
    if emulation.cuda_headers() is None:
        pytest.skip(emulation.NO_HEADERS)
    source = tmp_path / "blocks.cu"
    included = ['#include "kittens/kittens.cuh"', '#include "kittens/prototype.cuh"']
    for block in CUDA:
        included += re.findall(r"^#include [\"<].*[\">]$", block.code, re.MULTILINE)
    parts = ["\n".join(dict.fromkeys(included)) + "\n"]
    for number, block in enumerate(CUDA):
        start = f'\n#line {block.line} "{block.name.split(":")[0]}"\n'
        inside = [
            start + prepared(block.code) if line.strip() == "<block>" else line
            for line in block.around.split("\n")
        ]
        parts.append(f"namespace block_{number} {{\nusing namespace kittens;\n")
        parts.append("\n".join(inside) + f"\n}}  // namespace block_{number}\n")
    source.write_text("".join(parts))
    flags = ["-fsyntax-only", "-O0", "-Wno-unknown-pragmas", "-DTORCH_EXTENSION_NAME=blocks"]
    flags += ["-isystem", sysconfig.get_path("include")]
    command = emulation.compile_command(source, output=tmp_path / "none", flags=flags)
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr


# ---- the shell ----


def exists(path):
    assert (ROOT / path).exists(), f"{path} does not exist"


@cache
def parser_of(command):
    parser = argparse.ArgumentParser(exit_on_error=False)
    importlib.import_module(f"thunderkittens.{command}").add_arguments(parser)
    return parser


def package_command(words):
    """python -m thunderkittens ..."""
    assert words[0] in COMMANDS
    try:
        parser_of(words[0]).parse_args(words[1:])
    except (SystemExit, argparse.ArgumentError) as error:
        raise AssertionError(f"no options of {words[0]}: {shlex.join(words[1:])}") from error


def pytest_command(words):
    known = (ROOT / "tests/conftest.py").read_text() + "-n -k"
    for word in words:
        if word.startswith("-"):
            assert word.split("=")[0] in known, word
        elif word.endswith(".py"):
            exists(word)


def script(words):
    """A program of this repository: the options are in its source."""
    exists(words[0])
    text = (ROOT / words[0]).read_text()
    for word in words[1:]:
        assert not word.startswith("--") or f'"{word.split("=")[0]}"' in text, word


def cmake_command(words):
    lists = [ROOT / "CMakeLists.txt", ROOT / "tests/kittens/CMakeLists.txt"]
    text = "".join(path.read_text() for path in lists)
    for word in words:
        option = re.match(r"-D(\w+)=", word)
        known = "CMAKE_", "Python_"
        assert (
            not option
            or option[1] in text
            or option[1].startswith(known)
            or (
                option[1].endswith("_DIR")  # where find_package looks
            )
        ), word


def pip_command(words):
    assert words[0] == "install"
    for flag, value in itertools.pairwise(words):
        if flag == "-r":
            exists(value)


#: Programs of others, and of builds: what is known of a command line is its first words.
OTHERS = ("python3 -m venv", ". .venv/bin/activate", "rm -rf .coverage.counts", "clang-format -i")
OTHERS += ("git ls-files", "ruff format .", "ruff check .", "mypy", "build/unit/unit_tests --")
OTHERS += ("nvcc -std=c++20", "c++ -std=c++20", "./my_kernel", "zensical", "compute-sanitizer")


def check_command(text):
    words = shlex.split(text, comments=True)
    while words and re.match(r"[A-Z_]+=", words[0]):
        words.pop(0)
    if words[0] == "compute-sanitizer":
        words = words[words.index("python") :]
    line = shlex.join(words)
    if words[:3] == ["python", "-m", "thunderkittens"]:
        package_command(words[3:])
    elif words[:3] == ["python", "-m", "pytest"] or words[0] == "pytest":
        pytest_command(words[words.index("pytest") + 1 :])
    elif words[0] == "python" and words[1].endswith(".py"):
        script(words[1:])
    elif words[0] == "cmake":
        cmake_command(words[1:])
    elif words[0] == "pip":
        pip_command(words[1:])
    elif words[0] == "xargs":
        check_command(shlex.join(words[1:]))
    else:
        assert line.startswith(tuple(shlex.join(x.split()) for x in OTHERS)), line


@pytest.mark.parametrize("block", SHELL, ids=lambda block: block.name)
def test_commands_exist(block):
    for line in block.code.replace("\\\n", " ").splitlines():
        code = re.sub(r"(^|\s)#.*|\s*>\s*/dev/null", "", line).strip()
        for command in re.split(r"&&|(?<!\|)\|(?!\|)", code):
            if command.strip():
                check_command(re.sub(r"<[^>]*>", "x", command.strip()))


# ---- CMake ----

OF_CMAKE = {"add_executable", "add_library", "cmake_minimum_required", "enable_language"}
OF_CMAKE |= {"find_package", "project", "set", "target_link_libraries"}


def test_functions_of_cmake_exist():
    ours = "".join(path.read_text() for path in (ROOT / "cmake").rglob("*cmake*") if path.is_file())
    defined = set(re.findall(r"^(?:function|macro)\((\w+)", ours, re.MULTILINE))
    for block in CMAKE:
        called = set(re.findall(r"^(\w+)\(", block.code, re.MULTILINE))
        assert called <= OF_CMAKE | defined, block.name


# ---- names ----


def public_names(text):
    """tk.name and tk.name.name that a document says, in code or in text."""
    found = re.findall(r"(?<![\w.])tk\.([a-z_A-Z]\w*(?:\.[a-zA-Z_]\w*)*)", text)
    return {path.rstrip(".") for path in found}


@pytest.mark.parametrize("path", DOCUMENTS, ids=name)
def test_names_exist(path):
    missing = []
    for dotted in sorted(public_names(path.read_text())):
        thing = tk
        for part in dotted.split("."):
            if not hasattr(thing, part):
                missing.append(f"tk.{dotted}")
                break
            thing = getattr(thing, part)
            if not isinstance(thing, type(sys)):
                break  # attributes of objects, such as a returned tensor's, are not looked at
    assert not missing


def test_every_public_name_is_documented():
    """On a page of the reference, which its signature and docstring make."""
    written = {name: reference.page(name) for name in reference.pages()}
    on_pages = [name for names in reference.pages().values() for name in names]
    assert set(tk.__all__) <= set(on_pages)
    assert len(on_pages) == len(set(on_pages))
    for page, names in reference.pages().items():
        for dotted in names:
            entry = reference.entry(dotted, 2)
            assert len(entry.split()) > 10, dotted
            assert entry in written[page]


@pytest.mark.parametrize("op", reference.ops())
def test_page_of_an_op_is_whole(op):
    text = reference.page(op)
    parts = ("**Arguments**", "**Returns**", "**Errors**")
    parts += ("## Formula", "## Support", "## Accuracy", "## Measured speed")
    assert all(part in text for part in parts)
    assert f"def {op}(" in text, "the definition"
    assert "See [ops]" not in text, f"docs/ops.md has no table of {op}, and no paragraph"
    parameters = inspect.signature(getattr(tk, op)).parameters
    for name, parameter in parameters.items():
        if parameter.kind is not parameter.VAR_KEYWORD:
            assert f"- **`{name}`**: " in text, name


def test_site_has_every_page(tmp_path):
    """The tree that tools/make_site.py gives to Zensical, which checks the links (.ci/run)."""
    make_site.assemble(tmp_path)
    assert all((tmp_path / make_site.place(path.relative_to(ROOT))).exists() for path in DOCUMENTS)
    pages = [page for _, part in make_site.nav() for page in make_site.part_pages(part)]
    assert len(pages) == len(set(pages)) >= len(DOCUMENTS) + len(reference.pages())
    assert all((tmp_path / make_site.place(Path(page))).exists() for page in pages)
    assert (tmp_path / "examples/gemm/01_one_warp_cu.md").exists()


def test_text_of_the_site_is_what_its_markdown_takes():
    text = "<!-- for a test\n-->\nItems:\n- one\n  more\n- two\n\n1. first\n\n   below\n"
    code = "\n```\n- x\n   y\n```\n"
    expected = "Items:\n\n- one\n  more\n- two\n\n1. first\n\n    below\n"
    assert make_site.dialect(text + code) == expected + code
