from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

Value = bool | int | float | str

class EmulatorError(RuntimeError): ...
class DeadlockError(EmulatorError): ...

def ops() -> list[str]: ...
def unsupported(op: str, problem: Mapping[str, Value]) -> str: ...
def run(
    op: str,
    arrays: Mapping[str, npt.NDArray[np.generic]],
    scalars: Mapping[str, Value] = ...,
    *,
    config: Mapping[str, Value] = ...,
    device: Mapping[str, Value] = ...,
    policy: str = ...,
    seed: int = ...,
    host_threads: int = ...,
    check_order: bool = ...,
    replay: bool = ...,
) -> tuple[dict[str, npt.NDArray[np.generic]], dict[str, Value]]: ...
