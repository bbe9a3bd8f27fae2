"""Which kernels of the registry the emulator has run in this session of pytest.

A call records what was chosen. What is launched beside the chosen kernel, as sums of segments or a
gradient's statistics, follows from the call: the functions below say how. At the end of a session
of the whole suite, `conftest.py` lists the kernels of the registry that have not run.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

Launch = tuple[str, str]  # op and name, as the registry has them

TESTS = Path(__file__).resolve().parents[1]
FEW_SPLITS = 16  # of the keys: to so many a warp combines them
TENSOR, ROW = 0, 1  # granularities of fp8_quantize


def _portable(name: str) -> str:
    """How the names of kernels end that run beside one of this name."""
    return "_portable" if name.endswith("_portable") else ""


def _attention(name: str, choice: Mapping, call: Mapping) -> Iterator[Launch]:
    yield "attention", name
    if choice["splits"] > 1:
        few = "few_" if choice["splits"] <= FEW_SPLITS else ""
        yield "attention", f"combine_{few}{choice['dtype']}"


def _attention_backward(name: str, choice: Mapping, call: Mapping) -> Iterator[Launch]:
    if name.startswith("portable"):
        yield from _portable_backward(name, choice, call)
        return
    dim = choice["head_dim"]
    suffix = (
        "_no_dq" if not call["needs_q"] else "_deterministic" if call.get("deterministic") else ""
    )
    yield "attention_backward", name + (suffix if dim <= 128 else "")
    columns = next(n for n in (64, 128, 256) if call["v"].shape[-1] <= n)
    beside = [f"preprocess_{columns}_{choice['dtype']}"]
    if call["needs_q"]:
        sums = (128, 64) if choice["block_m"] == 128 else (64, dim // 2)
        beside.append(f"postprocess_{sums[0]}x2x{sums[1]}_{choice['dtype']}")
    if choice["head_splits"] > 1 and not call.get("deterministic") and call.get("needs_k"):
        beside.append(f"postprocess_64x2x{dim // 2}_{choice['dtype']}")
    if call.get("sink") is not None and call.get("needs_sink"):
        beside.append("sink")
    yield from (("attention_backward", f"backward_{x}") for x in beside)


def _portable_backward(name: str, choice: Mapping, call: Mapping) -> Iterator[Launch]:
    columns = next(n for n in (64, 128, 256) if call["v"].shape[-1] <= n)
    beside = [f"statistics_{columns}"]
    if call["needs_q"]:
        beside.append("sums")
    if call.get("sink") is not None and call.get("needs_sink"):
        beside.append("sinks")
    yield "attention_backward", name
    yield from (("attention_backward", f"portable_{x}_{choice['dtype']}") for x in beside)


def _attention_paged(name: str, choice: Mapping, call: Mapping) -> Iterator[Launch]:
    if name.startswith(("forward_", "portable_")):
        yield "attention", name
        return
    portable = "portable_" if choice["portable"] else ""
    yield "attention_paged", name
    yield "attention_paged", f"combine_{portable}{choice['dtype']}"
    if call.get("schedule") is None:
        yield "attention_paged", "schedule_portable" if portable else "schedule"


def _wanted(call: Mapping, *names: str) -> bool:
    return any(call.get(f"needs_{name}", True) for name in names)


def _based(name: str, choice: Mapping, call: Mapping) -> Iterator[Launch]:
    suffix = "_portable" * choice["portable"]
    yield "based", name
    if choice["segments"] > 1:
        yield "based", name.replace("forward", "segment_states")
        yield "based", f"scan{suffix}"
        if "_denominator" in name:
            yield "based", f"scan_denominator{suffix}"


def _gated_delta_rule(name: str, choice: Mapping, call: Mapping) -> Iterator[Launch]:
    portable = choice["portable"]
    yield "gated_delta_rule", name
    if portable:
        yield "gated_delta_rule", name.replace("forward", "prepare")
        if choice["segments"] > 1:
            yield "gated_delta_rule", "scan_portable"
        return
    walk, kind = choice["preparers"] == 0, f"{choice['dtype']}_k{choice['key_dim']}"
    if walk:
        yield "gated_delta_rule", f"prepass_{kind}"
    if choice["segments"] > 1:
        yield "gated_delta_rule", f"{'walk_' * walk}segments_{kind}"
        yield "gated_delta_rule", "scan"


def _based_backward(name: str, choice: Mapping, call: Mapping) -> Iterator[Launch]:
    keys = _wanted(call, "k", "v", "state")
    if keys:
        yield "based_backward", name
    if _wanted(call, "q"):
        yield "based_backward", name.replace("key", "query")
    dtype, denominator = choice["dtype"], "_denominator" in name
    suffix = "_portable" * choice["portable"]
    if denominator:
        yield "based_backward", f"preprocess_{dtype}{suffix}"
    if call["v"].shape[-1] > 64:
        yield "based_backward", f"reduce_partials_{dtype}{suffix}"
    if choice["segments"] > 1 and keys:
        yield "based", f"segment_states_{dtype}{'_weighted' * denominator}{suffix}"


def _conv_backward(name: str, choice: Mapping, call: Mapping) -> Iterator[Launch]:
    yield "causal_conv1d_backward", name
    bias = call.get("bias") is not None and call.get("needs_bias")
    if call.get("needs_weight") or bias:
        yield "causal_conv1d_backward", f"sums_{choice['dtype']}{_portable(name)}"


def _lolcats(name: str, choice: Mapping, call: Mapping) -> Iterator[Launch]:
    portable, split = choice["portable"], choice["segments"] > 1
    suffix = "_portable" * portable
    yield "lolcats", name
    if portable:
        yield "lolcats", name.replace("forward", "features")
    if split:
        yield "lolcats", name.replace("forward", "segment_states")
    if split and portable:
        yield "lolcats_backward", "scan_portable"
    elif choice["segments"] > 4:
        yield "lolcats", "scan"
    if call.get("return_state") or call.get("lengths") is not None:
        yield "lolcats", f"kv_cache{suffix}"


def _lolcats_backward(name: str, choice: Mapping, call: Mapping) -> Iterator[Launch]:
    portable, split = choice["portable"], choice["segments"] > 1
    kinds = ["query_gradient"] + ["rows", "linear_queries"] * portable
    if _wanted(call, "k", "v", "k_map"):
        kinds += ["key_gradient"] * (not portable or _wanted(call, "k", "v"))
        kinds += ["linear_keys"] * portable + ["segment_state_gradients"] * split
    if _wanted(call, "q_map", "k_map"):
        kinds.append("feature_map_gradient")
    if split and not portable:
        yield "lolcats_backward", "scan"
    yield from (("lolcats_backward", name.replace("key_gradient", kind)) for kind in kinds)
    yield "lolcats_backward", f"reduce_partials_{choice['dtype']}{'_portable' * portable}"


def _lolcats_decode(name: str, choice: Mapping, call: Mapping) -> Iterator[Launch]:
    yield "lolcats_decode", name
    suffix = "_portable" * choice["portable"]
    yield "lolcats_decode", f"lengths_{choice['dtype']}{suffix}"
    if call.get("sliding"):
        yield "lolcats_decode", name.replace("decode", "slide")


def _recurrent_backward(name: str, choice: Mapping, call: Mapping) -> Iterator[Launch]:
    op, dtype = "ssd_backward", choice["dtype"]
    yield op, name
    yield op, name.replace("chunks", "states")
    of_heads = {"A": 2, "D": 5, "dt_bias": 7, "decay": 3}
    shares = any(call.get(x) is not None and _wanted(call, str(i)) for x, i in of_heads.items())
    beside = ["gates", "finish"] + ["shares"] * shares + ["scan"] * (choice["segments"] > 1)
    if choice["splits"] > 1:
        beside.append(f"sum_keys_{dtype}")
    if call.get("z") is not None:
        beside.append(f"gate_{dtype}")
    yield from ((op, kernel + _portable(name)) for kernel in beside)


def _gated_delta_rule_backward(name: str, choice: Mapping, call: Mapping) -> Iterator[Launch]:
    kinds = f"{choice['dtype']}_k{choice['key_dim']}"
    sums = any(call.get(x) is not None and _wanted(call, x) for x in ("A_log", "dt_bias"))
    if choice["portable"]:
        for kernel in ("prepare", "forward"):
            yield "gated_delta_rule", f"{kernel}_{kinds}_portable"
        names = [name, f"states_{kinds}_portable"] + ["gate_sums_portable"] * sums
        yield from (("gated_delta_rule_backward", x) for x in names)
        return
    if choice["segments"] > 2:
        yield "gated_delta_rule", "scan"
    names = [name, f"prepare_{kinds}", f"states_{kinds}"] + ["gate_sums"] * sums
    yield from (("gated_delta_rule_backward", x) for x in names)


def _fp8_quantize(name: str, choice: Mapping, call: Mapping) -> Iterator[Launch]:
    yield "fp8_quantize", name
    if call["granularity"] == TENSOR and call.get("scale") is None:
        yield "fp8_quantize", f"{choice['dtype']}_amax{_portable(name)}"
    if call["granularity"] == ROW and call.get("transposed"):
        yield "fp8_quantize", f"{choice['dtype']}_amax_lines{_portable(name)}"


def _nvfp4_quantize(name: str, choice: Mapping, call: Mapping) -> Iterator[Launch]:
    yield "nvfp4_quantize", name
    if call.get("global_scale") is None:
        yield "nvfp4_quantize", f"maxima_{choice['dtype']}{_portable(name)}"


def _mxfp8_gemm(name: str, choice: Mapping, call: Mapping) -> Iterator[Launch]:
    yield "mxfp8_gemm", name
    if name.partition("_")[2].startswith("swap_ab"):
        yield "mxfp8_gemm", "dequantize"
    if call.get("rebased") and name == "dequantize":
        yield "gemm", "bf16_nt_128x128_fused_masked"


def rescales(device: str) -> bool:
    """Whether the path "rebased" is not exact: the reference's is, and that of portable kernels."""
    from thunderkittens import emulation

    if device == "cuda":
        return os.environ.get("THUNDERKITTENS_PORTABLE") != "1"
    return emulation.active() and not emulation.portable()


def _rows_are_read(x: Any) -> bool:
    """Whether TMA reads a matrix of 16-bit elements as it lies."""
    if x.numel() == 0:
        return True
    for rows in (x, x.mT):
        strides = [s for n, s in zip(rows.shape[:-1], rows.stride()[:-1], strict=True) if n > 1]
        adjacent = rows.shape[-1] == 1 or rows.stride(-1) == 1
        if adjacent and x.data_ptr() % 16 == 0 and all(s % 8 == 0 for s in strides):
            return True
    return False


def _gemm(name: str, choice: Mapping, call: Mapping) -> Iterator[Launch]:
    yield "gemm", name
    if not name.endswith("_short_k") and not all(_rows_are_read(call[x]) for x in "ab"):
        yield "gemm", "align_rows_portable" if name.endswith("_portable") else "align_rows"


def _fp8_gemm(name: str, choice: Mapping, call: Mapping) -> Iterator[Launch]:
    yield "fp8_gemm", name
    a, b = call["a"], call["b"]
    # Operands whose rows are not along k are transposed, if they are columns of whole rows.
    if a.stride(-2) == 1 < min(a.shape) or b.stride(-1) == 1 < min(b.shape):
        yield "fp8_quantize", f"transpose{_portable(name)}"


def _norm(name: str, choice: Mapping, call: Mapping) -> Iterator[Launch]:
    yield "rms_norm", name


def _norm_backward(name: str, choice: Mapping, call: Mapping) -> Iterator[Launch]:
    yield "rms_norm_backward", name
    last = call.get("needs_last") and choice["layer"]
    if call.get("weight") is not None and (call.get("needs_weight") or last):
        yield "rms_norm_backward", f"reduce{_portable(name)}"


BESIDE: dict[str, Callable[[str, Mapping, Mapping], Iterator[Launch]]] = {
    "attention": _attention,
    "attention_backward": _attention_backward,
    "attention_paged": _attention_paged,
    "based": _based,
    "based_backward": _based_backward,
    "causal_conv1d_backward": _conv_backward,
    "fp8_gemm": _fp8_gemm,
    "gated_delta_rule": _gated_delta_rule,
    "gated_delta_rule_backward": _gated_delta_rule_backward,
    "gemm": _gemm,
    "layer_norm": _norm,
    "layer_norm_backward": _norm_backward,
    "fp8_quantize": _fp8_quantize,
    "linear_attention_backward": _recurrent_backward,
    "lolcats": _lolcats,
    "lolcats_backward": _lolcats_backward,
    "linear_attention": lambda name, choice, call: iter([("ssd", name)]),
    "linear_attention_decode": lambda name, choice, call: iter([("ssd_decode", name)]),
    "lolcats_decode": _lolcats_decode,
    "mxfp8_gemm": _mxfp8_gemm,
    "nvfp4_quantize": _nvfp4_quantize,
    "ssd_backward": _recurrent_backward,
    "rms_norm": _norm,
    "layer_norm_quantize": lambda name, choice, call: iter([("rms_norm_quantize", name)]),
    "rms_norm_backward": _norm_backward,
}

# Ops whose kernel needs no choice.
ALWAYS: dict[str, Launch] = {
    "nvfp4_prepare": ("nvfp4_prepare", "prepare"),
    "nvfp4_dequantize.prepared": ("nvfp4_prepare", "restore"),
}


class Record:
    """Of this process; those of several processes are added up."""

    def __init__(self) -> None:
        self.launched: set[Launch] = set()
        self._run: Callable[..., Any] | None = None

    def install(self) -> None:
        """From now on whatever `tk.emulate` runs is recorded."""
        from thunderkittens import emulation

        self._run = run = emulation.run

        def recorded(op: str, arrays: Mapping[str, Any], **scalars: Any) -> Any:
            emulated = emulation._active.get()
            before = len(emulated.kernels) if emulated else 0
            results = run(op, arrays, **scalars)
            if op in ALWAYS and all(x.numel() for x in results.values()):
                kernel_op, name = ALWAYS[op]
                portable = emulated is not None and emulated.portable
                self.launched.add((kernel_op, name + "_portable" * portable))
            for choice in emulated.kernels[before:] if emulated else ():
                self.launched |= set(launches(op, choice, {**scalars, **arrays}))
            return results

        emulation.run = recorded

    def remove(self) -> None:
        from thunderkittens import emulation

        if self._run is not None:
            emulation.run = self._run


def launches(op: str, choice: Mapping[str, Any], call: Mapping[str, Any]) -> Iterator[Launch]:
    """What a call has launched, from the choice and from its arrays and numbers."""
    name = choice["kernel"]
    yield from BESIDE[op](name, choice, call) if op in BESIDE else [(op, name)]


def is_whole_suite(config: pytest.Config) -> bool:
    """Whether a session runs all tests, of which none is left out."""
    names = ("keyword", "markexpr", "deselect", "ignore", "ignore_glob", "lf", "stepwise")
    chosen = any(config.getoption(name, None) for name in (*names, "collectonly"))
    paths = {Path(config.invocation_params.dir, x).resolve() for x in config.args}
    return not chosen and bool(paths & {TESTS, TESTS.parent})


def _registry() -> set[Launch]:
    from thunderkittens import _C

    return {(kernel["op"], kernel["name"]) for kernel in _C.kernels()}


def missing(launched: set[Launch]) -> list[str]:
    """Kernels of the registry that have not run."""
    return sorted(map(" ".join, _registry() - launched))


def unknown(launched: set[Launch]) -> list[str]:
    """What has run by names that the registry does not have: what is said above is wrong."""
    return sorted(map(" ".join, launched - _registry()))
