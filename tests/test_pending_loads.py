"""tools/pending_loads.py on machine code put together by hand."""

from __future__ import annotations

import importlib.util
import struct
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
LOAD, MATRIX, SHUFFLE, ARRIVE, ADD, EXIT = 0x984, 0x83B, 0xF89, 0x9A7, 0x221, 0x94D


@pytest.fixture(scope="module")
def tool():
    sys.path.insert(0, str(ROOT / "tools"))
    spec = importlib.util.spec_from_file_location("pending_loads", ROOT / "tools/pending_loads.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    sys.path.remove(str(ROOT / "tools"))
    return module


def instruction(kind: int, result: int = 7, waits: tuple[int, ...] = (), predicate: int = 7):
    """`result` and `waits` are scoreboards, 7 none."""
    control = result << 5 | 7 << 8 | sum(1 << s for s in waits) << 11
    return struct.pack("<QQ", predicate << 12 | kind, control << 41)


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ([(LOAD, 3), (ARRIVE,)], [(16, 0, 0)]),
        ([(LOAD, 3), (ADD, 7, (3,)), (ARRIVE,)], []),
        ([(LOAD, 3), (ADD, 7, (2,)), (ARRIVE,)], [(32, 0, 0)]),
        ([(LOAD,), (MATRIX, 0), (ADD, 7, (0,)), (LOAD, 1), (ARRIVE,)], [(64, 48, 48)]),
        ([(LOAD,), (SHUFFLE, 0), (ADD, 7, (0,)), (ARRIVE,)], []),
        ([(LOAD, 0), (LOAD, 1), (ARRIVE, 7, (0,)), (ARRIVE, 7, (1,))], [(32, 16, 16)]),
        ([(LOAD, 3, (), 15), (ARRIVE,)], []),
        ([(LOAD, 3), (EXIT,), (ARRIVE,)], []),
    ],
)
def test_arrivals_with_loads_on_their_way(tool, code, expected):
    found = tool.arrivals(b"".join(instruction(*fields) for fields in code))
    assert [tuple(arrival) for arrival in found] == expected
