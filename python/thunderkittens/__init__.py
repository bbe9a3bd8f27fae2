"""Fast GPU kernels for PyTorch, and the tile library that they are written on.

`attention`, `attention_varlen` (of packed sequences), `based`, `lolcats`, `linear_attention` (with
decay), `ssd` (Mamba-2), `gated_delta_rule`, `causal_conv1d`, `rms_norm`, `layer_norm`, `rotary`,
`gemm`, `grouped_gemm` and `fp8_linear` are differentiable; ops in `_decode` and `_update` go on by
a token or a few. `fp8_gemm`, `mxfp8_gemm` and `nvfp4_gemm` multiply operands of 8 and 4 bits, the
latter two as they are or as `mxfp8_prepare` and `nvfp4_prepare` have prepared them; `fp8_quantize`,
`mxfp8_quantize`, `nvfp4_quantize` and the inverses of the latter two convert to scaled formats and
back, and `rms_norm_quantize` and `layer_norm_quantize` normalise into them. `nn` holds modules for
models; `sdpa` has existing ones run `attention`, by what they call already, PyTorch's
`scaled_dot_product_attention`, `convert` puts their linear layers on these products, and `compat`
has the functions of flash-attn. All ops work under torch.compile, and take CPU tensors too, where
they run the reference formula, or, inside `with emulate():`, the GPU's kernels on an emulator.
`reference` holds every op in plain PyTorch. `get_include()` is the folder of the tile library's
headers, for kernels of one's own, and `get_cmake_dir()` that of its CMake package. On the command
line: `python -m thunderkittens` with `info`, `demo`, `bench` or `cmake-dir`.
"""

from __future__ import annotations

from pathlib import Path as _Path

from . import _build, _load

#: The version of the package, as pyproject.toml has it.
__version__: str = _build.record()["version"]

try:
    _load.load()
    from . import _log, compat, nn, reference
    from .emulation import DeadlockError, EmulatorError, emulate
    from .integrations.sdpa_hook import disable_sdpa, enable_sdpa, sdpa, sdpa_report
    from .nn.conversion import convert
    from .ops._fp8_linear import Fp8Linear, fp8_linear
    from .ops.append_kv import append_kv
    from .ops.attention import attention
    from .ops.attention_paged import attention_decode, attention_paged
    from .ops.attention_schedule import attention_schedule
    from .ops.attention_varlen import attention_varlen
    from .ops.based import based, based_linear_prefill
    from .ops.based_decode import based_decode
    from .ops.causal_conv1d import causal_conv1d
    from .ops.causal_conv1d_update import causal_conv1d_update
    from .ops.fp8_gemm import fp8_gemm
    from .ops.fp8_quantize import fp8_quantize
    from .ops.gated_delta_rule import gated_delta_rule
    from .ops.gated_delta_rule_decode import gated_delta_rule_decode
    from .ops.gemm import gemm
    from .ops.grouped_gemm import grouped_gemm
    from .ops.layer_norm import layer_norm
    from .ops.layer_norm_quantize import layer_norm_quantize
    from .ops.linear_attention import linear_attention
    from .ops.linear_attention_decode import linear_attention_decode
    from .ops.lolcats import hedgehog, lolcats
    from .ops.lolcats_decode import lolcats_decode
    from .ops.merge_attention import merge_attention
    from .ops.mxfp8_dequantize import mxfp8_dequantize
    from .ops.mxfp8_gemm import mxfp8_gemm
    from .ops.mxfp8_prepare import mxfp8_prepare
    from .ops.mxfp8_quantize import mxfp8_quantize
    from .ops.nvfp4_dequantize import nvfp4_dequantize
    from .ops.nvfp4_gemm import nvfp4_gemm
    from .ops.nvfp4_prepare import nvfp4_prepare
    from .ops.nvfp4_quantize import nvfp4_quantize
    from .ops.rms_norm import rms_norm
    from .ops.rms_norm_quantize import rms_norm_quantize
    from .ops.rotary import rotary
    from .ops.ssd import ssd
    from .ops.ssd_decode import ssd_decode
    from .reference.based import BasedState
    from .reference.lolcats import LolcatsState
    from .reference.mxfp8_prepare import Mxfp8Operand
    from .reference.nvfp4_prepare import Nvfp4Weight
    from .support import is_supported

    _load.explain_missing_kernels()
    _log.begin_if_asked()
except ImportError as _error:
    if not _load.running_as_command():
        raise
    _load.import_problem = str(_error)

__all__ = [
    "BasedState",
    "DeadlockError",
    "EmulatorError",
    "Fp8Linear",
    "LolcatsState",
    "Mxfp8Operand",
    "Nvfp4Weight",
    "__version__",
    "append_kv",
    "attention",
    "attention_decode",
    "attention_paged",
    "attention_schedule",
    "attention_varlen",
    "based",
    "based_decode",
    "based_linear_prefill",
    "causal_conv1d",
    "causal_conv1d_update",
    "compat",
    "convert",
    "disable_sdpa",
    "emulate",
    "enable_sdpa",
    "fp8_gemm",
    "fp8_linear",
    "fp8_quantize",
    "gated_delta_rule",
    "gated_delta_rule_decode",
    "gemm",
    "get_cmake_dir",
    "get_include",
    "grouped_gemm",
    "hedgehog",
    "is_supported",
    "layer_norm",
    "layer_norm_quantize",
    "linear_attention",
    "linear_attention_decode",
    "lolcats",
    "lolcats_decode",
    "merge_attention",
    "mxfp8_dequantize",
    "mxfp8_gemm",
    "mxfp8_prepare",
    "mxfp8_quantize",
    "nn",
    "nvfp4_dequantize",
    "nvfp4_gemm",
    "nvfp4_prepare",
    "nvfp4_quantize",
    "reference",
    "rms_norm",
    "rms_norm_quantize",
    "rotary",
    "sdpa",
    "sdpa_report",
    "ssd",
    "ssd_decode",
]


def get_include() -> str:
    """The folder to give a compiler as include path: it holds `kittens/kittens.cuh`.

    Raises:
        FileNotFoundError: the installation has no headers.
    """
    return _folder("include", "../../kittens/kittens.cuh", 1)


def get_cmake_dir() -> str:
    """The folder of the CMake package, `cmake -Dkittens_DIR=...`: it holds `kittensConfig.cmake`.

    Raises:
        FileNotFoundError: the installation has none.
    """
    return _folder("share/cmake/kittens", "../../cmake/kittens/kittensConfig.cmake", 0)


def _folder(installed: str, source: str, parents: int) -> str:
    """A folder of the package, or, of an editable installation, the one of the sources that a file
    tells."""
    path = _build.find(installed)
    if path is not None:
        return str(path)
    path = _build.find(source)
    if path is not None:
        return str(_Path(path).parents[parents].resolve())
    raise FileNotFoundError(
        f"this installation of thunderkittens {__version__} is damaged: the folder {installed} is "
        f"missing; run {_load.REINSTALL}"
    )
