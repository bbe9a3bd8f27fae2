"""Cases that two ranks run: a test file as a program, which imports torch once and forks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

RANKS = 2
Cases = Mapping[str, Callable[[Any], None]]


def run_rank(rank: int, cases: Cases, folder: Path) -> None:
    from torch.distributed.tensor import init_device_mesh

    dist.init_process_group(
        "gloo", init_method=f"file://{folder / 'store'}", rank=rank, world_size=RANKS
    )
    mesh = init_device_mesh("cpu", (RANKS,))
    faults = {}
    for name, function in cases.items():
        torch.manual_seed(0)
        try:
            function(mesh)
        except Exception:
            faults[name] = traceback.format_exc()
    (folder / f"faults{rank}.json").write_text(json.dumps(faults))
    dist.destroy_process_group()


def main(cases: Cases) -> None:
    """The program: both ranks run all cases, and leave what failed in the folder that it names."""
    folder = Path(sys.argv[1])
    torch.set_num_threads(1)
    child = os.fork()
    run_rank(int(child == 0), cases, folder)
    if child == 0:
        os._exit(0)
    os.waitpid(child, 0)


def faults_of(program: str, folder: Path) -> list[dict[str, str]]:
    """Runs the program; of each rank the cases that failed."""
    if not dist.is_available() or not dist.is_gloo_available():
        pytest.skip("this torch has no gloo")
    command = [sys.executable, program, str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    files = [folder / f"faults{rank}.json" for rank in range(RANKS)]
    assert done.returncode == 0, done.stderr
    assert all(file.exists() for file in files), done.stderr
    return [json.loads(file.read_text()) for file in files]
