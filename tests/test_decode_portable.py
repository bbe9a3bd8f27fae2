"""The portable kernels of attention over a cache and of what is around it, on the emulator: every
format of a cache, rows that warps share and rows that they have to themselves, and the choice for
GPUs of each size."""

from __future__ import annotations

import pytest
import torch

import thunderkittens as tk
from helpers.paged import Case
from helpers.policies import every_dtype_and_policy
from test_portable import GPUS, device
from thunderkittens import _C, emulation

if emulation.problem is not None:
    pytest.skip(emulation.problem, allow_module_level=True)

BF16, FP16 = torch.bfloat16, torch.float16
DIMS = [(64, 64), (128, 128), (192, 128), (256, 256)]
FORMATS = {"16 bits": {}, "8 bits": {"codes": True}, "NVFP4": {"codes": True, "nvfp4": True}}


def problem(dims=(128, 128), queries=1, **more):
    base = {"dtype": "bf16", "batch": 4, "q_heads": 8, "kv_heads": 2, "tokens": 4 * queries}
    base |= {"q_length": queries, "k_length": 4096, "head_dim": dims[0], "value_dim": dims[1]}
    return base | {"page_size": 16} | more


# ---- rows ----


@every_dtype_and_policy
@pytest.mark.parametrize("queries", [4, 7, 17])  # 16 rows, 28, 68
@pytest.mark.parametrize("dims", DIMS)
def test_rows_of_a_tile(dims, queries, dtype, policy):
    """Warps share the keys of 16 rows, two by two those of 32, and have more rows to themselves; 68
    are two tiles. Parts begin inside of items, and a ring wraps."""
    shape = (dims[0] - 8, dims[1])
    made = Case([400, 70, 17, 0], [queries] * 4, (4, 1), shape, size=24, dtype=dtype)
    with tk.emulate(policy, seed=queries, sm_count=3, portable=True) as run:
        made.check(*made.run())
    value = f"v{dims[1]}" if dims[1] != dims[0] else ""
    name = {BF16: "bf16", FP16: "fp16"}[dtype]
    assert [x["kernel"] for x in run.kernels] == [f"decode_portable_{name}_d{dims[0]}{value}"]


@pytest.mark.parametrize("queries", [3, 8, 9])  # 6 rows, 16, 18
@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2, torch.int8])
@pytest.mark.parametrize("of_q", [BF16, FP16])
@pytest.mark.parametrize("dim", [64, 128])
def test_results_are_those_of_the_kernels_for_hopper(dim, of_q, dtype, queries):
    """Of caches of 8 bits the products are the same, key by key, where one split has them all, and
    integers make sums exact."""
    made = Case([150, 64], [queries] * 2, (4, 2), (dim, dim), dtype=of_q)
    for name in ("k_cache", "v_cache"):
        codes = torch.randint_like(getattr(made, name), -2, 3)
        setattr(made, name, codes.to(torch.int8) if dtype is torch.int8 else codes.to(dtype))
    made.q = torch.zeros_like(made.q)
    with tk.emulate(portable=True, sm_count=2) as run:
        out, lse = made.run()
    assert run.kernels[0]["kernel"].endswith("_codes_8_rows" if queries == 3 else "_codes")
    with tk.emulate(sm_count=2):
        expected, expected_lse = made.run()
    torch.testing.assert_close(out, expected, rtol=torch.finfo(of_q).eps, atol=0)
    torch.testing.assert_close(lse, expected_lse, rtol=1e-6, atol=0)


# ---- codes, of which GPUs before 8.9 have no conversion ----


@pytest.mark.parametrize("dim", [256, 128])
@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_every_code_becomes_its_value(dtype, dim):
    """The only key of a sequence gives its values back: all 256 codes, with NaN and subnormals. Its
    LSE against queries of one element each gives the key's. Of 128 for the rows of one tensor core
    operand at a time, whose kernel is another one."""
    heads, together = 256 // dim, 256 if dim == 256 else 8
    codes = torch.arange(256, dtype=torch.uint8).view(dtype)
    v_cache = codes.reshape(1, 1, heads, dim)
    finite = torch.where(codes.float().isfinite(), codes.float(), 0.0).to(dtype)
    k_cache = finite.reshape(1, 1, heads, dim)
    q = torch.eye(dim, dtype=FP16).reshape(1, dim, 1, dim).repeat(1, 1, heads, 1)
    caches = k_cache, v_cache, None, torch.ones(1, dtype=torch.int32)
    with tk.emulate(portable=True) as run:
        out = tk.attention_paged(torch.zeros_like(q[:, :1]), *caches)
        lse = torch.cat(
            [
                tk.attention_paged(part, *caches, causal=False, scale=1.0, return_lse=True)[1]
                for part in q.split(together, dim=1)
            ],
            dim=2,
        )
    name = "d256_codes" if dim == 256 else "d128_codes_8_rows"
    assert {x["kernel"] for x in run.kernels} == {f"decode_portable_fp16_{name}"}
    expected = codes.to(FP16).reshape(1, 1, heads, dim).expand_as(out)
    torch.testing.assert_close(out, expected, rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(lse.flatten(), finite.float(), rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("code", [0x7F, 0xFF])
@pytest.mark.parametrize("sign", [-1.0, 1.0])
@pytest.mark.parametrize("rows", [1, 12])
@pytest.mark.parametrize("format", ["e4m3", "NVFP4"])
def test_a_key_that_is_no_number_makes_none_of_its_rows_one(format, rows, sign, code):
    """Of either sign against queries of either sign, where other keys, and rows that do not see
    it, are numbers."""
    caches = [torch.zeros(1, 5, 1, 128, dtype=torch.uint8) for _ in range(2)]
    options = {}
    if format == "NVFP4":
        scales = [torch.zeros(1, 5, 1, 8, dtype=torch.uint8) for _ in range(2)]
        caches = [torch.full_like(x[..., :64], 0x22) for x in caches]
        scales[0][0, 4, 0, 3] = code
        names = ("k_block_scale", "v_block_scale")
        options = {name: x.view(torch.float8_e4m3fn) for name, x in zip(names, scales, strict=True)}
    else:
        caches[0][0, 4, 0, 50] = code
        caches = [x.view(torch.float8_e4m3fn) for x in caches]
    q = torch.full((1, rows, 1, 128), sign, dtype=BF16)
    with tk.emulate(portable=True):
        out = tk.attention_paged(q, *caches, None, torch.tensor([5], dtype=torch.int32), **options)
    assert bool(out[0, -1].isnan().all())
    assert not bool(out[0, :-1].isnan().any())


@pytest.mark.parametrize("of_q", [BF16, FP16])
def test_every_scale_of_a_block_becomes_its_value(of_q):
    """Of NVFP4, whose scales are e4m3: of either sign, with NaN and subnormals."""
    scales = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn)
    values = torch.full((256, 1, 1, 16), 0x22, dtype=torch.uint8)  # ones, two to a byte
    lengths = torch.ones(256, dtype=torch.int32)
    block_scales = scales.reshape(256, 1, 1, 1).repeat(1, 1, 1, 4)[..., :2].contiguous()
    padded = torch.zeros(256, 1, 1, 4, dtype=torch.uint8).view(torch.float8_e4m3fn)
    padded[..., :2] = block_scales
    q = torch.zeros(256, 1, 1, 32, dtype=of_q)
    with tk.emulate(portable=True) as run:
        out = tk.attention_paged(
            q,
            values,
            values,
            None,
            lengths,
            k_block_scale=padded[..., :2],
            v_block_scale=padded[..., :2],
        )
    name = "bf16" if of_q is BF16 else "fp16"
    assert [x["kernel"] for x in run.kernels] == [f"decode_portable_{name}_d128_nvfp4_8_rows"]
    expected = scales.to(of_q)[:, None].expand(256, 32)
    torch.testing.assert_close(out[:, 0, 0], expected, rtol=0, atol=0, equal_nan=True)


# ---- the choice ----


@pytest.mark.parametrize("name", GPUS)
@pytest.mark.parametrize("dims", DIMS)
@pytest.mark.parametrize("kind", FORMATS)
def test_choices_fit_the_gpu(kind, dims, name):
    """A schedule is of all formats of codes, so they are cut into as many parts."""
    gpu = device(name, portable_only=True)
    asked = problem(dims, **FORMATS[kind])
    assert _C.unsupported("attention_paged", asked, gpu) == _C.no_code_for(gpu)
    choice = _C.choose("attention_paged", asked, gpu)
    kernel = next(k for k in _C.kernels() if k["name"] == choice["kernel"])
    assert kernel["arch"] == 80
    blocks = choice["parts"] // gpu.sm_count
    small = gpu.shared_bytes_per_block <= 99 << 10
    most = 3 if kind != "16 bits" and gpu.shared_bytes_per_block > 163 << 10 else 2
    assert blocks == (1 if small or dims[0] > 128 else most)
    assert blocks * (kernel["shared_bytes"] + 1024) <= gpu.shared_bytes_per_block + 1024
    assert (
        choice["schedule_ints"]
        == (
            _C.choose("attention_paged", problem(dims, codes=kind != "16 bits"), gpu)[
                "schedule_ints"
            ]
        )
    )


def test_portable_kernels_fit_every_gpu():
    found = [k for k in _C.kernels() if k["op"] == "attention_paged" and k["arch"] == 80]
    assert found
    assert all(k["shared_bytes"] <= 99 << 10 for k in found)


@pytest.mark.parametrize(
    ("queries", "more", "prefills"),
    [
        (127, {}, False),
        (128, {}, True),
        (128, {"mask": True}, False),
        (128, {"codes": True}, False),
    ],
)
def test_many_queries_take_the_kernels_of_attention(queries, more, prefills):
    gpu = device("A100")
    choice = _C.choose("attention_paged", problem(queries=queries, **more), gpu)
    assert choice["prefill"] == prefills
    assert choice["kernel"].startswith("decode_portable_")


@pytest.mark.parametrize("op", ["append_kv", "merge_attention"])
def test_kernels_around_it_have_portable_twins(op):
    names = {k["arch"]: set() for k in _C.kernels()}
    for kernel in (k for k in _C.kernels() if k["op"] == op):
        names[kernel["arch"]].add(kernel["name"].replace("portable_", ""))
    assert names[80] == names[90]


# ---- pages of prefill ----


@every_dtype_and_policy
@pytest.mark.parametrize("dims", [*DIMS, (96, 96), (192, 192)])
def test_prefill_of_pages(dims, dtype, policy):
    """Pages of another size than a block of keys, that lie anywhere, and lead nowhere behind."""
    options = {"softcap": 20.0, "alibi_slopes": torch.rand(2), "sink": torch.randn(2)}
    shape = {"heads": (2, 1), "dims": dims, "dtype": dtype}
    queries = [250, 0, 140, 129]
    made = Case([300, 5, 140, 190], queries, size=24, packed=True, options=options, **shape)
    with tk.emulate(policy, seed=1, sm_count=3, portable=True) as run:
        made.check(*made.run())
    assert run.kernels[0]["kernel"].endswith("_paged")
    made = Case([200, 170], [140, 140], pages=False, options={"window_size": (99, 3)}, **shape)
    with tk.emulate(policy, seed=2, portable=True) as run:
        made.check(*made.run())
    assert run.kernels[0]["kernel"].endswith("_paged")
