"""The files of the source tree, and what they include and say."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
CPP = ("*.h", "*.cuh", "*.cu", "*.cpp")


def files(folders: tuple[str, ...], patterns: tuple[str, ...]) -> list[Path]:
    return sorted(
        path
        for folder in folders
        for pattern in patterns
        for path in (ROOT / folder).rglob(pattern)
        if "__pycache__" not in path.parts
    )


CPP_FILES = files(("kittens", "csrc", "tests"), CPP)
DOCUMENTS = [*sorted(ROOT.glob("*.md")), *files(("csrc", "docs", "examples"), ("*.md",))]
PYTHON_FILES = files(("python", "tests", "benchmarks", "tools", "examples"), ("*.py", "*.pyi"))
LIBRARY_FILES = [p for p in CPP_FILES if "tests" not in p.relative_to(ROOT).parts[:1]]


def name(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def code_of(path: Path) -> str:
    """A C++ file without comments and string literals, the lines kept."""
    text = path.read_text()
    pattern = re.compile(r'//[^\n]*|/\*.*?\*/|"(?:\\.|[^"\\\n])*"', re.DOTALL)

    def blank(match: re.Match[str]) -> str:
        return "\n" * match[0].count("\n") if match[0].startswith("/") else '""'

    return pattern.sub(blank, text)


def includes(path: Path) -> list[tuple[str, bool]]:
    """(what, whether in quotes) for every #include of a file."""
    found = re.findall(r'^\s*#\s*include\s*(["<])([^">]+)[">]', path.read_text(), re.MULTILINE)
    return [(what, quote == '"') for quote, what in found]


def hits(pattern: str, paths: list[Path]) -> list[str]:
    """file:line of every match in the code, comments and strings aside."""
    regex = re.compile(pattern)
    return [
        f"{name(path)}:{number}: {line.strip()}"
        for path in paths
        for number, line in enumerate(code_of(path).split("\n"), 1)
        if regex.search(line)
    ]
