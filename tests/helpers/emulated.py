"""Programs that run kernels on the emulator."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest

from thunderkittens import emulation


def compile_program(*sources: Path, output: Path, flags: Sequence[str] = ()) -> Path:
    """The program that the C++ compiler makes of the sources and of the emulator, which is compiled
    once for all tests."""
    if emulation.cuda_headers() is None:
        pytest.skip(emulation.NO_HEADERS)
    apart = [emulation._APART, str(emulation._machine())]
    # -Og takes half the compiler's time of -O1, and kernels that run for a second not much longer.
    flags = ["-Og", "-g0", *flags, *apart]
    command = emulation.compile_command(*sources, output=output, flags=flags)
    subprocess.run(command, check=True)
    return output
