"""What a release is made of: the version and its entry in CHANGELOG.md, the sdist's files, and what
tools/release.py lets a wheel be. The wheel itself is what the other tests run on."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
SPEC = importlib.util.spec_from_file_location("release", ROOT / "tools/release.py")
release = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(release)


def test_version_stands_in_one_place_and_has_its_changes():
    version = release.version()
    assert release.changes(version)
    assert not release.changes("99.0")
    sources = [
        *(ROOT / "python").rglob("*.py"),
        *(ROOT / "cmake").rglob("*.cmake*"),
        ROOT / "setup.cfg",
    ]
    sources += [ROOT / "CMakeLists.txt", *(ROOT / "csrc").rglob("*.cpp"), *ROOT.glob("docs/*.md")]
    assert not [p.name for p in sources if f'"{version}"' in p.read_text()]


def test_pythons_begin_with_the_oldest_that_is_supported():
    oldest = release.PYTHONS[0].removeprefix("python")
    assert f'requires-python = ">={oldest}"' in (ROOT / "pyproject.toml").read_text()


def test_sdist_holds_the_sources(tmp_path):
    """Made as a build front end makes it. What git knows is in it, and nothing else, but for the
    checks of the repository."""
    code = f"from scikit_build_core.build import build_sdist; build_sdist({str(tmp_path)!r})"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, capture_output=True)
    (archive,) = tmp_path.glob("*.tar.gz")
    assert archive.name == f"thunderkittens-{release.version()}.tar.gz"
    with tarfile.open(archive) as tar:
        names = {name.partition("/")[2] for name in tar.getnames()}
    needed = {"CMakeLists.txt", "pyproject.toml", "LICENSE", "CHANGELOG.md", "tools/instances.py"}
    assert needed | {"csrc/library.cpp", "kittens/kittens.cuh", "tests/conftest.py"} <= names
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode == 0:  # a repository
        known = {name for name in listed.stdout.splitlines() if (ROOT / name).exists()}
        assert {name for name in known if not name.startswith(".ci/")} <= names
        others = ["git", "ls-files", "--others", "--exclude-standard"]
        new = subprocess.run(others, cwd=ROOT, capture_output=True, text=True).stdout.splitlines()
        assert names - known - set(new) == {"PKG-INFO"}


def wheel(folder, *names, tag="cp312"):
    path = folder / f"thunderkittens-1.0-{tag}-{tag}-manylinux_2_34_x86_64.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for name in names:
            archive.writestr(f"thunderkittens/{name}", "")
    return path


MODULES = ("_C.cpython-312-x86_64-linux-gnu.so", "_emulator.cpython-312-x86_64-linux-gnu.so")


def test_check_of_a_wheel(tmp_path):
    release.check(wheel(tmp_path, "_schemas.so", *MODULES))
    release.check(wheel(tmp_path, *(m.replace("312", "310") for m in MODULES), tag="cp310"))
    with pytest.raises(SystemExit, match="of others"):
        release.check(wheel(tmp_path, "libcudart.so.13", *MODULES))
    with pytest.raises(SystemExit, match="holds _C"):
        release.check(wheel(tmp_path, *MODULES, tag="cp311"))
    with pytest.raises(SystemExit, match="holds _schemas"):
        release.check(wheel(tmp_path, "_schemas.so"))


def test_a_python_that_is_not_there_is_named(capsys):
    assert release.main(["--python", "python3.99"]) == 1
    assert "python3.99" in capsys.readouterr().err
