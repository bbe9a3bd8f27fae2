"""What docs/numerics.md says about reruns and about the rest of a batch, on the emulator.

`test_library.py` and the tests of the ops ask a GPU for the same bits again; here kernels run in
other orders, which a GPU may or may not take.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import thunderkittens as tk
from helpers.samples import SAMPLES
from thunderkittens import _C, emulation, info

if emulation.problem is not None:
    pytest.skip(emulation.problem, allow_module_level=True)

pytestmark = pytest.mark.emulator
DOCUMENT = Path(__file__).resolve().parents[1] / "docs/numerics.md"
H200 = _C.DeviceProperties(**info.EXAMPLE_GPU)


def bits(x: torch.Tensor) -> torch.Tensor:
    """In which NaNs compare, too."""
    return x.flatten().clone(memory_format=torch.contiguous_format).view(torch.uint8)


def assert_same(results: Any, others: Any) -> None:
    for x, y in zip(results, others, strict=True):
        assert torch.equal(bits(x), bits(y))


# ---- the same call again ----


@pytest.mark.parametrize("name", SAMPLES)
def test_bits_do_not_depend_on_the_order(name):
    """Of threads, of copies and products, and of blocks, which two threads of the host share."""
    sample = SAMPLES[name]
    tensors = sample.tensors("cpu")
    with torch.no_grad():
        with tk.emulate("on_wait", check_order=False):
            first = sample.function(*tensors)
        with tk.emulate("random", seed=3, host_threads=2, check_order=False):
            again = sample.function(*tensors)
    assert_same(first, again)


@pytest.mark.parametrize("lengths", [(70, 70), (33, 190)])
def test_gradients_of_attention_in_a_fixed_order(lengths):
    """Key blocks add to the gradient of q, in a fixed order where that is asked for."""
    length, keys = lengths
    q, k, v = (torch.randn(1, h, n, 64).bfloat16() for h, n in ((2, length), (1, keys), (1, keys)))

    def gradients(policy: str, seed: int, threads: int) -> list[torch.Tensor]:
        leaves = [x.clone().requires_grad_() for x in (q, k, v)]
        with tk.emulate(policy, seed, host_threads=threads, check_order=False):
            out = tk.attention(*leaves, causal=True, deterministic=True)
            out.backward(torch.ones_like(out))
        return [x.grad for x in leaves]

    assert_same(gradients("on_wait", 0, 1), gradients("random", 3, 2))


# ---- a part of the batch ----


def rows(*shape: int) -> torch.Tensor:
    return torch.randn(shape).bfloat16()


def grouped(x: torch.Tensor, b: torch.Tensor, ends: list[int]) -> torch.Tensor:
    return tk.grouped_gemm(x, b, torch.tensor(ends, dtype=torch.int32))


def grouped_gemm() -> Any:
    """A group's rows, with others or alone, and in tiles of both heights."""
    x, b = rows(150, 72), rows(2, 72, 40)
    yield (lambda: grouped(x, b, [20, 150])[:20]), (lambda: grouped(x[:20], b[:1], [20]))
    # More rows to a tile, as of larger groups.
    low = {"block_m": 64, "block_n": 128, "stages": 8, "consumers": 1}
    high = {"block_m": 128, "block_n": 256, "stages": 4, "consumers": 2}

    def by(tile: dict[str, Any]) -> torch.Tensor:
        with tk.emulate(config=tile, check_order=False):
            return grouped(x[:20], b[:1], [20])

    yield (lambda: by(low)), (lambda: by(high))


def fp8_quantize() -> Any:
    x = rows(256, 256)
    for granularity in ("row", "1x128", "128x128"):
        yield (
            lambda g=granularity: [y[:128] for y in part(tk.fp8_quantize(x, g))],
            lambda g=granularity: part(tk.fp8_quantize(x[:128], g)),
        )


def part(results: Any) -> list[torch.Tensor]:
    """Codes, and scales of blocks of rows as often as they have rows."""
    codes, scale = results[:2]
    return [codes, scale.repeat_interleave(codes.shape[0] // scale.shape[0], 0)]


def mxfp8_quantize() -> Any:
    x = rows(48, 64)
    plain = {"swizzle": False}
    yield (
        lambda: [y[:16] for y in tk.mxfp8_quantize(x, **plain)[:2]],
        lambda: tk.mxfp8_quantize(x[:16], **plain)[:2],
    )


def mxfp8_dequantize() -> Any:
    data, scale = tk.mxfp8_quantize(rows(48, 64), swizzle=False)[:2]

    def call(n: int) -> torch.Tensor:
        return tk.mxfp8_dequantize(data[:n], scale[:n], swizzle=False)

    yield (lambda: call(48)[:16]), (lambda: call(16))


def nvfp4_quantize() -> Any:
    """With a scale of the matrix that is given; otherwise it is that of all rows."""
    x, scale = rows(48, 64), torch.tensor(1 / 64)
    plain = {"global_scale": scale, "swizzle": False}
    yield (
        lambda: [y[:16] for y in tk.nvfp4_quantize(x, **plain)[:2]],
        lambda: tk.nvfp4_quantize(x[:16], **plain)[:2],
    )


def nvfp4_dequantize() -> Any:
    data, blocks, scale = tk.nvfp4_quantize(rows(48, 64), swizzle=False)

    def call(n: int) -> torch.Tensor:
        return tk.nvfp4_dequantize(data[:n], blocks[:n], scale, swizzle=False)

    yield (lambda: call(48)[:16]), (lambda: call(16))


def lolcats_decode() -> Any:
    sample = SAMPLES["lolcats_decode"]
    tensors = sample.tensors(str(torch.get_default_device()))
    batch = tensors[0].shape[0]
    assert batch > 1
    of_heads = range(3, 7)  # maps and factors, which have no batch

    def call(n: int) -> Any:
        parts = (x if i in of_heads else x[:n] for i, x in enumerate(tensors))
        return [y[:1] for y in sample.function(*parts)]

    yield (lambda: call(batch)), (lambda: call(1))


def ssd_decode() -> Any:
    """Also of linear attention, which is the same kernel."""
    for op, fixed in (("ssd_decode", (2,)), ("linear_attention_decode", ())):
        sample = SAMPLES[op]
        tensors = sample.tensors(str(torch.get_default_device()))
        batch = tensors[0].shape[0]
        assert batch > 1

        def call(n: int, sample: Any = sample, tensors: Any = tensors, fixed: Any = fixed) -> Any:
            parts = (x if i in fixed else x[:n] for i, x in enumerate(tensors))
            return [y[:1] for y in sample.function(*parts)]

        yield (lambda n=batch, call=call: call(n)), (lambda call=call: call(1))


def gated_delta_rule_decode() -> Any:
    sample = SAMPLES["gated_delta_rule_decode"]
    tensors = sample.tensors(str(torch.get_default_device()))
    batch = tensors[0].shape[0]
    assert batch > 1

    def call(n: int) -> Any:
        return [y[:1] for y in sample.function(*(x[:n] for x in tensors))]

    yield (lambda: call(batch)), (lambda: call(1))


def append_kv() -> Any:
    """What lies in the pages, of two sequences or of the first alone."""
    k, v = rows(2, 3, 2, 64), rows(2, 3, 2, 64)
    table = torch.tensor([[2, 0], [1, 3]], dtype=torch.int32)
    lengths = torch.tensor([14, 5], dtype=torch.int32)

    def call(n: int) -> list[torch.Tensor]:
        caches = [torch.zeros(4, 16, 2, 64, dtype=torch.bfloat16) for _ in range(2)]
        tk.append_kv(k[:n], v[:n], *caches, page_table=table[:n], seq_lens=lengths[:n])
        return [x[[2, 0]] for x in caches]

    yield (lambda: call(2)), (lambda: call(1))


def attention_paged() -> Any:
    """With a split size."""
    q = rows(3, 2, 4, 64)
    cache = rows(2, 9, 64, 2, 64)
    table = torch.arange(9, dtype=torch.int32).view(3, 3)
    lengths = torch.tensor([150, 64, 192], dtype=torch.int32)

    def call(n: int) -> torch.Tensor:
        return tk.attention_paged(q[:n], *cache, table[:n], lengths[:n], split_size=64)[:1]

    yield (lambda: call(3)), (lambda: call(1))


def merge_attention() -> Any:
    outs = [rows(4, 2, 3, 64) for _ in range(2)]
    lses = [torch.randn(4, 3, 2) for _ in range(2)]

    def call(n: int) -> Any:
        return [y[:1] for y in tk.merge_attention([x[:n] for x in outs], [x[:n] for x in lses])]

    yield (lambda: call(4)), (lambda: call(1))


def causal_conv1d() -> Any:
    """Alone, the blocks of a sequence are cut in another way."""
    x, weight = rows(3, 24, 200), rows(24, 4)

    def call(n: int) -> Any:
        orders = (x[:n], x[:n].transpose(1, 2).contiguous().transpose(1, 2))
        return [tk.causal_conv1d(y, weight, activation="silu")[:1] for y in orders]

    yield (lambda: call(3)), (lambda: call(1))


def causal_conv1d_update() -> Any:
    x, state, weight = rows(3, 40, 2), rows(3, 40, 5), rows(40, 4)

    def call(count: int) -> Any:
        mine = state[:count].clone()
        return tk.causal_conv1d_update(x[:count], mine, weight)[:1], mine[:1]

    yield (lambda: call(3)), (lambda: call(1))


def rms_norm() -> Any:
    """Also of layer norms, which are the same kernel; of rows in registers and of longer ones."""
    for width in (33, 96, 4096, 8200, 33000):
        x, weight = rows(40, width), rows(width)
        for norm in (tk.rms_norm, tk.layer_norm):

            def call(n: int, norm: Any = norm, x: Any = x, weight: Any = weight) -> Any:
                return norm(x[:n], weight)[:1]

            yield (lambda call=call: call(40)), (lambda call=call: call(1))


def rms_norm_quantize() -> Any:
    """Also of layer norms; of rows in registers, and of those that are read again."""
    scale = torch.tensor(0.01)
    for width, norm, output in itertools.product(
        (40, 1034, 4096),
        (tk.rms_norm_quantize, tk.layer_norm_quantize),
        ("fp8_row", "fp8_1x128", "fp8_tensor", "nvfp4"),
    ):
        x, options = rows(20, width), {"output": output, "swizzle": False}
        if output in ("fp8_tensor", "nvfp4"):
            options["scale"] = scale

        def call(n: int, norm: Any = norm, x: Any = x, options: Any = options) -> Any:
            data, scales = norm(x[:n], **options)
            return [data[:1], scales[:1] if scales.dim() > 0 else scales]

        yield (lambda call=call: call(20)), (lambda call=call: call(1))


def rotary() -> Any:
    x, cos, sin = rows(3, 4, 9, 32), torch.randn(16, 8), torch.randn(16, 8)
    yield (lambda: tk.rotary(x, cos, sin)[:1]), (lambda: tk.rotary(x[:1], cos, sin))


INVARIANT: dict[str, Callable[[], Any]] = {
    function.__name__: function
    for function in (
        append_kv,
        attention_paged,
        causal_conv1d,
        causal_conv1d_update,
        fp8_quantize,
        gated_delta_rule_decode,
        grouped_gemm,
        lolcats_decode,
        merge_attention,
        mxfp8_dequantize,
        mxfp8_quantize,
        nvfp4_dequantize,
        nvfp4_quantize,
        rms_norm,
        rms_norm_quantize,
        rotary,
        ssd_decode,
    )
}


@pytest.mark.parametrize("op", INVARIANT)
def test_bits_do_not_depend_on_the_rest_of_the_batch(op):
    for whole, alone in INVARIANT[op]():
        with tk.emulate(check_order=False):
            expected, result = whole(), alone()
        if isinstance(result, torch.Tensor):
            expected, result = [expected], [result]
        assert_same(expected, result)


@pytest.mark.gpu
@pytest.mark.parametrize("op", INVARIANT)
def test_bits_do_not_depend_on_the_rest_of_the_batch_on_a_gpu(op):
    with torch.device("cuda"):
        for whole, alone in INVARIANT[op]():
            expected, result = whole(), alone()
            if isinstance(result, torch.Tensor):
                expected, result = [expected], [result]
            assert_same(expected, result)


# Of the others two batches of which the choice differs, and what of it.
DEPENDS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "attention": (
        "splits",
        {"batch": 1, "q_heads": 8, "kv_heads": 8, "q_length": 1, "k_length": 16384},
        {"batch": 256, "q_heads": 8, "kv_heads": 8, "q_length": 1, "k_length": 16384},
    ),
    "gemm": ("strategy", {"m": 16, "n": 4096, "k": 4096}, {"m": 4096, "n": 4096, "k": 4096}),
    "fp8_gemm": (
        "sums",
        {"m": 16, "n": 4096, "k": 4096, "accurate": False},
        {"m": 4096, "n": 4096, "k": 4096, "accurate": False},
    ),
    "mxfp8_gemm": ("kernel", {"m": 16, "n": 4096, "k": 4096}, {"m": 4096, "n": 4096, "k": 4096}),
    "nvfp4_gemm": ("split_k", {"m": 64, "n": 8192, "k": 8192}, {"m": 256, "n": 8192, "k": 8192}),
    "based": (
        "segments",
        {"batch": 1, "heads": 32, "length": 8192, "value_dim": 64},
        {"batch": 16, "heads": 32, "length": 8192, "value_dim": 64},
    ),
    "based_decode": (
        "threads",
        {"batch": 1, "heads": 32, "value_dim": 64},
        {"batch": 64, "heads": 32, "value_dim": 64},
    ),
    "gated_delta_rule": (
        "segments",
        {"sequences": 1, "heads": 8, "value_heads": 8, "length": 8192},
        {"sequences": 32, "heads": 8, "value_heads": 8, "length": 8192},
    ),
    "ssd": (
        "segments",
        {"batch": 1, "heads": 16, "length": 8192},
        {"batch": 64, "heads": 16, "length": 8192},
    ),
    "lolcats": (
        "segments",
        {"batch": 1, "heads": 32, "kv_heads": 32, "length": 8192},
        {"batch": 16, "heads": 32, "kv_heads": 32, "length": 8192},
    ),
}


@pytest.mark.parametrize("op", DEPENDS)
def test_choice_depends_on_the_batch(op):
    field, one, other = DEPENDS[op]
    assert _C.choose(op, one, H200)[field] != _C.choose(op, other, H200)[field]


def test_table_of_the_document():
    """It has every op, and says of each what is tested here."""
    table = re.findall(
        r"^\| `(\w+)` \| (\w+)", DOCUMENT.read_text().split("## Determinism")[1], re.M
    )
    said = dict(table)
    public = {op.removesuffix("_backward") for op in _C.ops()} | {"attention_varlen"}
    assert set(said) == public
    # A prepared operand is the rearranged bits of one that is there.
    assert {op for op, word in said.items() if word == "yes"} == {
        *(INVARIANT.keys() - {"attention_paged"}),  # which is with a split size alone
        "mxfp8_prepare",
        "nvfp4_prepare",
    }
    assert {op for op, word in said.items() if word == "no"} == {
        *DEPENDS,
        "attention_paged",
        "attention_varlen",
    }
