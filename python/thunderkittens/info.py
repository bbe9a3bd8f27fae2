"""`python -m thunderkittens info`: versions, GPU, and which kernel each op would use, or why none.

Made to be pasted into a bug report. It never fails: what cannot be found out is shown with the
reason, also where torch is missing or the installation is damaged. Only the standard library is
needed."""

from __future__ import annotations

import argparse
import functools
import importlib
import json
import platform
import re
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from . import _build, _load

# Of caches of keys and values.
CACHE_BITS = ((16, ""), (8, ", a cache of 8 bits"), (4, ", a cache of NVFP4"))

#: A problem of each op to ask the choosing function about. Fields that are not named keep their
#: defaults.
EXAMPLES: dict[str, dict[str, dict[str, Any]]] = {
    "gemm": {
        "bf16 4096 x 4096 x 4096": {"m": 4096, "n": 4096, "k": 4096},
        "bf16 128 x 4096 x 4096": {"m": 128, "n": 4096, "k": 4096},
        "bf16 16 x 4096 x 4096": {"m": 16, "n": 4096, "k": 4096, "b_n_major": False},
    },
    "gemm_backward": {"bf16 4096 x 14336, swiglu": {"rows": 4096, "columns": 14336}},
    "grouped_gemm": {
        "bf16, 8 groups of 4096 x 7168 x 4096": {"m": 32768, "n": 4096, "k": 7168, "groups": 8},
        "bf16, 64 groups, 512 x 7168 x 4096 in all": {"m": 512, "n": 4096, "k": 7168, "groups": 64},
    },
    "fp8_gemm": {
        "4096 x 4096 x 4096, accurate": {"m": 4096, "n": 4096, "k": 4096},
        "4096 x 4096 x 4096, fast": {"m": 4096, "n": 4096, "k": 4096, "accurate": False},
        "4096 x 4096 x 4096, 1 x 128 by 128 x 128": {
            "m": 4096,
            "n": 4096,
            "k": 4096,
            "blockwise": True,
        },
    },
    "fp8_quantize": {
        "bf16 4096 x 4096, rows": {"m": 4096, "k": 4096},
        "bf16 4096 x 4096, 1 x 128, transposed too": {
            "m": 4096,
            "k": 4096,
            "granularity": 2,
            "transposed": True,
        },
    },
    "mxfp8_gemm": {
        f"4096 x 4096 x 4096, {path}": {"m": 4096, "n": 4096, "k": 4096, "rescaled": rescaled}
        for path, rescaled in (("exact", False), ("rebased", True))
    },
    "mxfp8_prepare": {"e4m3 8192 x 8192": {"rows": 8192, "columns": 8192}},
    **{
        op: {"bf16 8192 x 8192": {"rows": 8192, "columns": 8192}}
        for op in ("mxfp8_quantize", "mxfp8_dequantize", "nvfp4_quantize", "nvfp4_dequantize")
    },
    "nvfp4_gemm": {
        f"bf16 {m} x 8192 x 8192": {"m": m, "n": 8192, "k": 8192} for m in (1, 64, 256, 4096)
    },
    "nvfp4_prepare": {"8192 x 8192": {"n": 8192, "k": 8192}},
    **{
        op: {
            f"bf16 ({batch}, {heads}, {length}, 64)": {
                "batch": batch,
                "heads": heads,
                "length": length,
                "value_dim": 64,
            }
            for batch, heads, length in ((16, 16, 4096), (1, 32, 8192))
        }
        for op in ("based", "based_backward")
    },
    **{
        op: {
            f"bf16 ({batch}, {heads}, {length}, 128)": {
                "batch": batch,
                "heads": heads,
                "kv_heads": heads,
                "length": length,
            }
            for batch, heads, length in ((16, 16, 4096), (1, 32, 8192))
        }
        for op in ("lolcats", "lolcats_backward")
    },
    **{
        op: {
            f"bf16 ({batch}, {heads}, {length}, 64), N 128": {
                "batch": batch,
                "heads": heads,
                "length": length,
                "key_dim": 128,
                "value_dim": 64,
            }
            for batch, heads, length in ((1, 128, 8192), (16, 80, 4096))
        }
        for op in ("ssd", "ssd_backward")
    },
    "ssd_decode": {
        f"bf16 ({batch}, 128, 1, 64), N 128": {"batch": batch, "heads": 128} for batch in (1, 64)
    },
    **{
        op: {
            f"bf16 {rows} x {width}{text}": {"rows": rows, "width": width, **fields}
            for rows, width, text, fields in (
                (4096, 4096, "", {}),
                (4096, 4096, ", layer norm", {"layer": True}),
                (4096, 32768, "", {}),
                (4096, 4095, "", {"aligned": False}),
            )
        }
        for op in ("rms_norm", "rms_norm_backward")
    },
    "rms_norm_quantize": {
        f"bf16 4096 x {width} to {text}": {"rows": 4096, "width": width, "output": output}
        for width, output, text in (
            (4096, 1, "fp8, by rows"),
            (4096, 3, "NVFP4"),
            (128, 2, "fp8, by 128 neighbours"),
        )
    },
    "rotary": {
        "bf16 (4, 32, 4096, 128)": {
            "batch": 4,
            "heads": 32,
            "length": 4096,
            "dim": 128,
            "rotated": 128,
        }
    },
    "lolcats_decode": {"bf16 (64, 32, 1, 128)": {"batch": 64, "heads": 32, "kv_heads": 8}},
    **{
        op: {
            f"bf16 ({batch}, {channels}, {length}), {layout}": {
                "batch": batch,
                "channels": channels,
                "length": length,
                "layout": layout,
            }
            for batch, channels, length in ((1, 8192, 8192), (16, 2560, 2048))
            for layout in ("channels", "tokens", "any")
        }
        for op in ("causal_conv1d", "causal_conv1d_backward")
    },
    "causal_conv1d_update": {"bf16 (256, 8192)": {"batch": 256, "channels": 8192}},
    **{
        op: {
            f"bf16 ({sequences}, {heads}, {length}, 128)": {
                "sequences": sequences,
                "heads": heads // 2,
                "value_heads": heads,
                "length": length,
            }
            for sequences, heads, length in ((1, 32, 8192), (4, 64, 8192))
        }
        for op in ("gated_delta_rule", "gated_delta_rule_backward")
    },
    "gated_delta_rule_decode": {
        "bf16 (64, 32, 1, 128)": {"batch": 64, "heads": 16, "value_heads": 32}
    },
    "based_decode": {
        f"bf16 ({batch}, 32, 1, 64)": {"batch": batch, "heads": 32, "value_dim": 64}
        for batch in (1, 64)
    },
    **{
        op: {
            f"bf16 (4, 16, 4096, {dim}), {text}": {
                "batch": 4,
                "q_heads": 16,
                "kv_heads": 16,
                "q_length": 4096,
                "k_length": 4096,
                "head_dim": dim,
                "value_dim": dim,
                "causal": causal,
            }
            for dim in dims
            for causal, text in ((0, "full"), (1, "causal"))
        }
        for op, dims in (("attention", (64, 128, 256)), ("attention_backward", (64, 128)))
    },
    "attention_paged": {
        f"bf16, 64 sequences of 4096, 32 heads of {dim} on 8{text}": {
            "batch": 64,
            "q_heads": 32,
            "kv_heads": 8,
            "q_length": 1,
            "k_length": 4096,
            "head_dim": dim,
            "value_dim": dim,
            "codes": bits < 16,
            "nvfp4": bits == 4,
        }
        for dim in (64, 128, 256)
        for bits, text in CACHE_BITS
    },
    "append_kv": {
        f"bf16, 64 tokens, 8 heads of 128{text}": {
            "tokens": 64,
            "kv_heads": 8,
            "head_dim": 128,
            "value_dim": 128,
            "codes": bits < 16,
            "nvfp4": bits == 4,
        }
        for bits, text in CACHE_BITS
    },
    "merge_attention": {"bf16": {}},
}

#: What the examples are answered for where there is no GPU: an H200.
EXAMPLE_GPU = {
    "sm_count": 132,
    "shared_bytes_per_block": 232448,
    "l2_bytes": 60 * 2**20,
    "major": 9,
    "minor": 0,
}


#: What the registry has as the architecture of kernels for sm_90a alone.
NATIVE = 90


def _attempt(function: Callable[[], Any]) -> Any:
    """The function's result, or a text with the reason where it fails."""
    try:
        return function()
    except Exception as error:
        return f"unavailable ({type(error).__name__}: {error})"


def _architecture(entry: str) -> str:
    """What an entry of THUNDERKITTENS_CUDA_ARCHS stands for, in words."""
    number, _, kind = entry.partition("-")
    native = not number.isdigit() or kind == "real"
    return f"sm_{number}" if native else f"sm_{number} and later"


def _package() -> dict[str, Any]:
    record = _build.record()
    return {
        "version": record["version"],
        "commit": record["commit"],
        "built for torch": f">= {record['torch_minimum']} (headers of {record['torch_headers']})",
        "built with": f"nvcc {record['nvcc']}" if record["nvcc"] else "no CUDA kernels",
        "architectures": ", ".join(map(_architecture, record["cuda_archs"])) or "none",
        "families": ", ".join(record["families"]) or "none",
        "kernels": len(_build.kernel_table()),
        "folder": str(Path(__file__).parent),
    }


def _driver() -> str:
    text = Path("/proc/driver/nvidia/version").read_text().split("\n")[0]
    return text.removeprefix("NVRM version: ")


def _system() -> dict[str, Any]:
    def package_version(name: str) -> str:
        return str(importlib.import_module(name).__version__)

    def torch_cuda() -> str:
        import torch

        return torch.version.cuda or "none (CPU only)"

    result = {
        "python": platform.python_version(),
        "platform": f"{platform.system()} {platform.machine()}, {' '.join(platform.libc_ver())}",
        "torch": _attempt(lambda: package_version("torch")),
        "torch's CUDA": _attempt(torch_cuda),
        "numpy": _attempt(lambda: package_version("numpy")),
    }
    if Path("/proc/driver/nvidia/version").exists():
        result["driver"] = _attempt(_driver)
    return result


def _gpus() -> list[dict[str, Any]]:
    import torch

    if not torch.cuda.is_available():
        return []
    gpus = []
    for index in range(torch.cuda.device_count()):
        p = torch.cuda.get_device_properties(index)
        gpus.append(
            {
                "name": p.name,
                "memory_gib": round(p.total_memory / 2**30, 1),
                "sm_count": p.multi_processor_count,
                "shared_bytes_per_block": getattr(p, "shared_memory_per_block_optin", 0),
                "l2_bytes": getattr(p, "L2_cache_size", 0),
                "major": p.major,
                "minor": p.minor,
            }
        )
    return gpus


def _device(gpu: dict[str, Any]) -> Any:
    """A GPU as the choosing functions take it, and as the environment restricts it."""
    values = {key: int(gpu[key]) for key in EXAMPLE_GPU}
    return _load.compiled_module().DeviceProperties(**values).restricted()


def kernel_for(op: str, problem: dict[str, Any], gpu: dict[str, Any]) -> str:
    """The name of the kernel that `op` would use for a problem on a GPU, or why it has none."""
    _C = _load.compiled_module()
    device = _device(gpu)
    reason = _C.unsupported(op, problem, device)
    return f"none: {reason}" if reason else str(_C.choose(op, problem, device)["kernel"])


def _ops(gpu: dict[str, Any]) -> dict[str, dict[str, str]]:
    built = _load.compiled_module().ops()
    result: dict[str, dict[str, str]] = {}
    for op, examples in EXAMPLES.items():
        if op in built:
            result[op] = {
                text: _attempt(partial(kernel_for, op, problem, gpu))
                for text, problem in examples.items()
            }
        else:
            result[op] = {"any": "none: this build leaves it out; CPU tensors run the reference"}
    return result


def _state() -> dict[str, str]:
    """Whether ops work here on CPU tensors and on CUDA tensors."""
    if _load.import_problem:
        return {"CPU tensors": _load.import_problem, "CUDA tensors": _load.import_problem}
    return {
        "CPU tensors": "ready (reference formulas)",
        "CUDA tensors": _load.cuda_problem or _attempt(_cuda_state),
        "eager gradients": _nodes(),
    }


def _nodes() -> str:
    if _load.has_nodes:
        return "recorded by nodes in C++"
    headers = _build.record()["torch_headers"]
    built = "not built" if _build.find("_autograd.so") is None else f"built for torch {headers}"
    return f"recorded in Python, slower (nodes in C++: {built})"


def _cuda_state() -> str:
    _C = _load.compiled_module()
    gpus = _gpus()
    if not gpus:
        return "the kernels are loaded, but torch sees no GPU"
    gpu = _device(gpus[0])
    if reason := str(_C.no_code_for(gpu)):
        return reason
    return "ready" if _C.runs_native(gpu) else _portable_state(gpu, _C.architectures())


def _portable_state(device: Any, architectures: str) -> str:
    """Which ops have kernels on a GPU that has none of its own, by a build for some architectures,
    and who compiles them."""
    _C = _load.compiled_module()
    least = 10 * device.major + device.minor
    found = {k["op"] for k in _C.kernels() if k["arch"] != NATIVE and k["arch"] <= least}
    built = _C.holds_machine_code_for(device, architectures)
    how = "machine code" if built else "compiled by the driver at first use"
    return f"ready for {', '.join(sorted(found))} (portable kernels, {how})"


def collect() -> dict[str, Any]:
    """Everything that the command shows, as one dictionary."""
    gpus = _attempt(_gpus)
    have_gpu = isinstance(gpus, list) and bool(gpus)
    gpu = gpus[0] if have_gpu else EXAMPLE_GPU
    return {
        "thunderkittens": _attempt(_package),
        "system": _attempt(_system),
        "gpus": gpus,
        "state": _attempt(_state),
        "kernels on": gpu["name"] if have_gpu else "an H200 (torch sees no GPU here)",
        "ops": _attempt(lambda: _ops(gpu)),
    }


def _print_section(title: str, values: Any) -> None:
    print(title)
    if not isinstance(values, dict):
        print(f"  {values}")
        return
    width = max((len(key) for key in values), default=0)
    for key, value in values.items():
        print(f"  {key:{width}}  {value}")


def _print_gpus(gpus: Any) -> None:
    if isinstance(gpus, list):
        texts = {
            f"cuda:{index}": f"{gpu['name']}, sm_{gpu['major']}{gpu['minor']}, "
            f"{gpu['sm_count']} SMs, {gpu['memory_gib']} GiB"
            for index, gpu in enumerate(gpus)
        }
        _print_section("GPUs", texts or "none that torch sees")
    else:
        _print_section("GPUs", gpus)


def print_report(report: dict[str, Any]) -> None:
    """Prints what collect() found."""
    _print_section("thunderkittens", report["thunderkittens"])
    _print_section("system", report["system"])
    _print_gpus(report["gpus"])
    _print_section("ops on", report["state"])
    ops, gpu = report["ops"], report["kernels on"]
    if not isinstance(ops, dict):
        _print_section("kernels", ops)
        return
    answers = {answer for examples in ops.values() for answer in examples.values()}
    if len(answers) == 1:  # why there are none
        _print_section(f"kernels of {', '.join(ops)} on {gpu}", answers.pop())
        return
    for op, examples in ops.items():
        _print_section(f"kernel of {op} on {gpu}", examples)


@functools.cache
def _expression(pattern: str) -> re.Pattern[str]:
    """What a mangled name holds of which the registry says `pattern`: csrc/common/registry.h."""
    name = r"(?:N(?:S[0-9A-Z]*_|\d+[a-z_0-9]+?)*\d+[A-Za-z]+E|S[0-9A-Z]*_)"
    return re.compile(re.escape(pattern).replace(r"\*", r"\w*?").replace("<enum>", name))


def _matches(pattern: str, symbol: str) -> bool:
    return _expression(pattern).search(symbol) is not None


def kernels() -> list[dict[str, Any]]:
    """Every kernel: the compiler's report of its resources, joined with the registry's entry.

    The registry adds `op`, `name`, `config`, `threads` and `shared_bytes` (dynamic, per block).
    """
    return with_registry(_build.kernel_table())


def with_registry(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Rows of `family`, `arch` and `symbol`, each joined with the registry's entry."""
    registry = _attempt(lambda: _load.compiled_module().kernels())
    if not isinstance(registry, list):
        return rows
    joined, seen = [], set()
    for row in rows:
        # Files of several ops may have the same kernel.
        kernel = row["family"], row["arch"], row["symbol"]
        if kernel in seen:
            continue
        seen.add(kernel)
        entries = [
            {key: entry[key] for key in ("op", "name", "config", "threads", "shared_bytes")}
            for entry in registry
            if (entry["family"], entry["arch"] == 90) == (row["family"], row["arch"].endswith("a"))
            and _matches(entry["symbol"], row["symbol"])
        ]
        joined += [{**entry, **row} for entry in entries or [{}]]
    return joined


def print_kernels() -> None:
    """Prints the resource use of every kernel, as the compiler reported it."""
    columns = {
        "family": "family",
        "name": "kernel",
        "arch": "arch",
        "threads": "threads",
        "shared_bytes": "shared",
        "registers": "registers",
        "spill_store_bytes": "spill stores",
        "spill_load_bytes": "spill loads",
        "stack_bytes": "stack",
        "code_bytes": "code bytes",
    }
    rows = kernels()
    if not rows:
        print("this build holds no kernels")
        return
    cells = [list(columns.values()), *([str(row.get(key, "?")) for key in columns] for row in rows)]
    widths = [max(len(line[i]) for line in cells) for i in range(len(columns))]
    for line in cells:
        print("  ".join(cell.ljust(w) for cell, w in zip(line, widths, strict=True)).rstrip())


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds this command's options to its parser."""
    parser.add_argument("--json", action="store_true", help="print the report as JSON")
    parser.add_argument(
        "--kernels",
        action="store_true",
        help="print every kernel's registers, spills and code size",
    )


def main(args: argparse.Namespace) -> int:
    """Prints the report; always returns 0."""
    try:
        if args.kernels and args.json:
            print(json.dumps(kernels(), indent=2))
        elif args.kernels:
            print_kernels()
        elif args.json:
            print(json.dumps(collect(), indent=2))
        else:
            print_report(collect())
    except Exception as error:
        print(f"info: {type(error).__name__}: {error}", file=sys.stderr)
    return 0
