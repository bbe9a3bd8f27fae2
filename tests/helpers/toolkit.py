"""The programs of a CUDA toolkit."""

from __future__ import annotations

import importlib.util
import os
import shutil
from functools import cache
from pathlib import Path


@cache
def find_tool(name: str) -> str | None:
    """One that the environment names, on the path, the system's, or one that pip installed."""
    candidates = [os.environ.get("CUDACXX")] if name == "nvcc" else []
    for variable in ("THUNDERKITTENS_CUDA_HOME", "CUDA_HOME"):
        if home := os.environ.get(variable):
            candidates.append(f"{home}/bin/{name}")
    candidates += [shutil.which(name), f"/usr/local/cuda/bin/{name}"]
    for package, folder in (("nvidia", "cu13*/bin/"), ("triton", "backends/nvidia/bin/")):
        if spec := importlib.util.find_spec(package):
            for root in spec.submodule_search_locations or []:
                candidates += sorted(str(p) for p in Path(root).glob(folder + name))
    return next((c for c in candidates if c and Path(c).is_file()), None)
