"""The machine's record in every result file, and the data-sheet peaks that shares are taken of."""

from __future__ import annotations

import contextlib
import datetime
import platform
import re
from pathlib import Path
from typing import Any

import torch

# Dense bf16 and fp16 tensor-core TFLOP/s of the data sheets, which assume the boost clock.
# The first pattern that matches counts.
PEAK_TFLOPS = (
    (r"H[12]00 NVL", 835.5),
    (r"H100 PCIe", 756.5),
    (r"H20\b", 148.0),
    (r"GH200|H[128]00", 989.4),
    (r"GB[23]00", 2500.0),
    (r"B[23]00", 2250.0),
    (r"A[18]00", 312.0),
)


def peak_tflops(gpu: str) -> float | None:
    """Dense bf16 peak of the GPU with this name, or None for one that the table does not have."""
    return next((peak for pattern, peak in PEAK_TFLOPS if re.search(pattern, gpu)), None)


def slug(gpu: str) -> str:
    """The GPU's name as a folder name: 'NVIDIA H100 80GB HBM3' gives 'h100_80gb_hbm3'."""
    return re.sub(r"[^a-z0-9]+", "_", gpu.lower().replace("nvidia", "")).strip("_")


def driver_version() -> str | None:
    """Version of the NVIDIA kernel driver, or None where there is none."""
    with contextlib.suppress(OSError):
        match = re.search(r"\b\d+\.\d+(\.\d+)?\b", Path("/proc/driver/nvidia/version").read_text())
        return match.group() if match else None
    return None


def package_record() -> dict[str, Any]:
    """Version and build record of this package; empty when it runs from a bare source tree."""
    with contextlib.suppress(ImportError):
        from .. import _build

        return dict(_build.record())
    return {}


def processor() -> str:
    """The CPU's model name."""
    with contextlib.suppress(OSError):
        match = re.search(r"model name\s*:\s*(.+)", Path("/proc/cpuinfo").read_text())
        if match:
            return match.group(1)
    return platform.machine()


def record(device: torch.device) -> dict[str, Any]:
    """What a reader needs to judge or repeat the figures. It holds no host name and no path."""
    cudnn: Any = torch.backends.cudnn  # untyped in PyTorch
    entries: dict[str, Any] = {
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "processor": processor(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "cudnn": cudnn.version(),
        "driver": driver_version(),
        "thunderkittens": package_record(),
    }
    if device.type != "cuda":
        return {"device": "CPU", "peak_tflops": None, **entries}
    properties = torch.cuda.get_device_properties(device)
    return {
        "device": properties.name,
        "compute_capability": f"{properties.major}.{properties.minor}",
        "multiprocessors": properties.multi_processor_count,
        "memory_bytes": properties.total_memory,
        "l2_bytes": properties.L2_cache_size,
        "peak_tflops": peak_tflops(properties.name),
        **entries,
    }
