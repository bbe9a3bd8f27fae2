from collections.abc import Mapping
from typing import Literal, TypedDict

import numpy as np
import numpy.typing as npt

Value = bool | int | float | str

class Kernel(TypedDict):
    op: str
    family: str
    name: str
    config: str
    source: str
    symbol: str
    arch: int
    threads: int
    shared_bytes: int
    fields: dict[str, Value]

class DeviceProperties:
    def __init__(
        self,
        *,
        sm_count: int,
        shared_bytes_per_block: int,
        l2_bytes: int,
        major: int,
        minor: int,
        portable_only: bool = False,
    ) -> None: ...
    @property
    def sm_count(self) -> int: ...
    @property
    def shared_bytes_per_block(self) -> int: ...
    @property
    def l2_bytes(self) -> int: ...
    @property
    def major(self) -> int: ...
    @property
    def minor(self) -> int: ...
    @property
    def portable_only(self) -> bool: ...
    def restricted(self) -> DeviceProperties: ...

def ops() -> list[str]: ...
def kernels() -> list[Kernel]: ...
def architectures() -> str: ...
def no_code_for(device: DeviceProperties, op: str = "") -> str: ...
def holds_code_for(device: DeviceProperties, native: bool, architectures: str) -> bool: ...
def holds_machine_code_for(device: DeviceProperties, architectures: str = ...) -> bool: ...
def runs_native(device: DeviceProperties) -> bool: ...
def problem_fields(op: str) -> list[str]: ...
def unsupported(op: str, problem: Mapping[str, Value], device: DeviceProperties) -> str: ...
def choose(op: str, problem: Mapping[str, Value], device: DeviceProperties) -> dict[str, Value]: ...
def candidates(
    op: str, problem: Mapping[str, Value], device: DeviceProperties
) -> list[dict[str, Value]]: ...
def cost_inputs(
    op: str,
    problem: Mapping[str, Value],
    choice: Mapping[str, Value],
    device: DeviceProperties,
) -> list[float]: ...
def register_tile_positions(
    rows: int, cols: int, layout: Literal["row", "col"] = "row", element_bytes: int = 2
) -> npt.NDArray[np.int32]: ...
def shared_tile_offsets(
    rows: int, cols: int, element_bytes: int = 2, swizzle_bytes: int | None = None
) -> npt.NDArray[np.uint32]: ...
def tile_schedule(
    rows: int,
    cols: int,
    batch: int = 1,
    order: Literal["row_major", "grouped_raster", "grouped_raster_columns"] = "row_major",
    group: int = 8,
) -> npt.NDArray[np.int32]: ...
def gemm_tile_order(
    problem: Mapping[str, Value], device: DeviceProperties
) -> npt.NDArray[np.uint32]: ...
