"""The record of how this package was built, and where its files are."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

_DEFAULTS: dict[str, Any] = {
    "version": "unknown",
    "commit": "unknown",
    "torch_minimum": "2.11",
    "torch_headers": "unknown",
    "cuda_archs": [],
    "families": [],
    "nvcc": None,
    "python": "unknown",
}


def find(name: str) -> Path | None:
    """The path of a file of the installed package, or None.

    An editable install spreads the package over two folders: the sources, and what was built.
    """
    import thunderkittens

    for folder in thunderkittens.__path__:
        path = Path(folder) / name
        if path.exists():
            return path
    return None


def _read(name: str) -> dict[str, Any]:
    path = find(name)
    if path is None:
        return {}
    try:
        content = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def record() -> dict[str, Any]:
    """Versions, architectures, flags and commit of the build; defaults where it is missing."""
    return {**_DEFAULTS, **_read("_build.json")}


def kernel_table() -> list[dict[str, Any]]:
    """Resource use of every kernel, as the compiler reported it: one dictionary per kernel."""
    return list(_read("kernels.json").get("kernels", []))
