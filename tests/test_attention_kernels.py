"""Every kernel of attention on the emulator, whatever the choice would be: ragged lengths, masks,
score options, packed sequences, under every policy."""

from __future__ import annotations

import itertools
import re
import zlib
from itertools import pairwise

import pytest
import torch

import thunderkittens as tk
from helpers.attention import (
    assert_attention,
    assert_gradients,
    normal,
    plain_attention,
    plain_low_lse,
    score_options,
    sink_noise,
)
from helpers.policies import least_intensity
from test_portable import GPUS, device
from thunderkittens import _C, emulation, info

if emulation.problem is not None:
    pytest.skip(emulation.problem, allow_module_level=True)

# A kernel that never ends runs outside of Python, where only another thread can stop it.
pytestmark = pytest.mark.timeout(300, method="thread")

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
PATTERN = re.compile(
    r"(forward|portable|split_kv|backward|portable_backward)_(bf16|fp16)_d(\d+)(?:v(\d+))?"
    r"_(\d+)x(\d+)(?:_\d+_warps_\d_stages?)?(_score_mod|_softcap)?$"
)
BACKWARD = ("backward", "portable_backward")


def kernels(op, *kinds):
    """Names of the kernels, with the fields of their configuration."""
    found = []
    for kernel in _C.kernels():
        match = PATTERN.match(kernel["name"]) if kernel["op"] == op else None
        if match and match[1] in kinds:
            stages = int(re.search(r"(\d+) stage", kernel["config"])[1])
            found.append((kernel["name"], match, stages))
    return found


def fields(match, stages, **more):
    if match[1].startswith("portable"):
        whole = {"splits": 0} if match[1] == "portable" else {}
        return next(k["fields"] for k in _C.kernels() if k["name"] == match[0]) | whole | more
    _, _, dim, value_dim, rows, keys, options = match.groups()
    config = {"head_dim": int(dim), "stages": stages, "score_mod": options == "_score_mod"}
    if match[1] == "backward":
        values = {"value_dim": int(value_dim or dim)} if int(dim) > 128 else {}
        return config | {"block_m": int(rows)} | values | more
    config |= {"value_dim": int(value_dim or dim), "block_n": int(keys)}
    config |= {"warpgroups": int(rows) // 64, "softcap_only": options == "_softcap"}
    # Those that split the keys have the score options all in one kernel.
    return config | ({"splits": 3, "score_mod": True} if match[1] == "split_kv" else {"splits": 0})


def problems(match):
    """Lengths and options, dense; the last ones are also those of packed sequences."""
    if match[1] == "split_kv":
        yield (1, 300), {"causal": True}, ("sink",)
        yield (5, 190), {"window_size": (70, 3)}, ("softcap", "alibi")
    elif match[7] == "_softcap":
        # tanh has other forms where the scores of a whole block of keys are small.
        yield (140, 400), {"softcap": 30.0}, ("sink",)
        yield (140, 400), {"softcap": 9.0}, ()
        yield (150, 190), {"causal": "upper_left"}, ("softcap", "sink")
        yield (130, 290), {"window_size": (240, 20)}, ("softcap",)
    elif match[7]:
        yield (150, 190), {"causal": "upper_left"}, ("softcap", "alibi_batch", "sink")
        yield (130, 70), {"window_size": (40, 20)}, ("alibi",)
    else:
        yield (200, 77), {}, ()
        yield (130, 200), {"causal": True, "window_size": (90, -1)}, ("sink",)


def cases(op, *kinds):
    return [
        pytest.param(
            name,
            match,
            stages,
            policy,
            id=f"{name}-{policy}",
            marks=least_intensity(DTYPES[match[2]], policy),
        )
        for name, match, stages in kernels(op, *kinds)
        for policy in emulation.POLICIES
    ]


def operands(match, lengths, batch=1):
    dtype, dim = DTYPES[match[2]], int(match[3])
    value_dim = int(match[4] or dim)
    shapes = [(batch, 4, lengths[0], dim - 8), (batch, 2, lengths[1], dim - 8)]
    shapes.append((batch, 2, lengths[1], value_dim))
    return [normal(shape, dtype, "cpu") for shape in shapes]


@pytest.mark.parametrize(
    ("name", "match", "stages", "policy"), cases("attention", "forward", "portable", "split_kv")
)
def test_forward(name, match, stages, policy):
    torch.manual_seed(zlib.crc32(name.encode()))
    for lengths, mask, scores in problems(match):
        q, k, v = operands(match, lengths)
        options = {**mask, **score_options(scores, 4, 1, "cpu")}
        with tk.emulate(policy, seed=lengths[0], config=fields(match, stages), sm_count=3) as run:
            result = tk.attention(q, k, v, **options, return_lse=True)
        assert [kernel["kernel"] for kernel in run.kernels] == [name]
        assert_attention(result, q, k, v, **options)

    # The last problem's options, on sequences of which some have no tokens.
    lengths = [(1, 140), (0, 9), (lengths[0] // 2, lengths[0] // 3), (3, 0)]
    q, k, v = operands(match, tuple(map(sum, zip(*lengths, strict=True))))
    packed = [x[0].transpose(0, 1).contiguous() for x in (q, k, v)]
    edges = [[0, *torch.tensor(side).cumsum(0).tolist()] for side in zip(*lengths, strict=True)]
    tensors = [torch.tensor(e, dtype=torch.int32) for e in edges]
    with tk.emulate(policy, seed=1, config=fields(match, stages), sm_count=3):
        out, lse = tk.attention_varlen(*packed, *tensors, 140, 150, **options, return_lse=True)
    for (a, b), (c, d) in zip(*map(pairwise, edges), strict=True):
        part = out[a:b].transpose(0, 1).unsqueeze(0), lse[:, a:b].unsqueeze(0).contiguous()
        assert_attention(part, q[:, :, a:b], k[:, :, c:d], v[:, :, c:d], **options)


def spared(spare):
    """The mark of a test that the lowest intensity is spared since that of a twin runs."""
    return pytest.mark.intensity(2 if spare else 1)


def backward_cases():
    """In both modes; at the lowest intensity in one of them for bf16 and in the other for fp16."""
    for case in cases("attention_backward", *BACKWARD):
        match = case.values[1]
        for deterministic in (False, True):
            marks = [*case.marks, spared(deterministic != (match[2] == "bf16"))]
            yield pytest.param(
                *case.values, deterministic, id=f"{case.id}-{deterministic}", marks=marks
            )


@pytest.mark.parametrize(
    ("name", "match", "stages", "policy", "deterministic"), [*backward_cases()]
)
def test_backward(name, match, stages, policy, deterministic):
    torch.manual_seed(zlib.crc32(name.encode()))
    for parts, (lengths, mask, scores) in enumerate(problems(match), 1):
        q, k, v = operands(match, lengths)
        options = {**mask, **score_options(scores, 4, 1, "cpu")}
        sink = options.pop("sink", None)
        tensors = [q, k, v] + ([] if sink is None else [sink])
        out, lse = tk.attention(q, k, v, **options, sink=sink, return_lse=True)
        grad_out, grad_lse = torch.randn_like(out), torch.randn_like(lse)
        grad_lse[lse == -torch.inf] = 0
        mode = {False: 0, True: 1, "upper_left": 2}[options.get("causal", False)]
        config = fields(match, stages, head_splits=min(parts, 2))  # of each group of two heads
        with tk.emulate(policy, seed=lengths[0], config=config, sm_count=3) as run:
            actual = torch.ops.thunderkittens.attention_backward(
                grad_out, grad_lse, q, k, v, out, lse, mode, None,
                *options.get("window_size", (-1, -1)), options.get("softcap", 0.0),
                options.get("alibi_slopes"), sink, deterministic, [True] * 4,
            )  # fmt: skip
        assert [kernel["kernel"] for kernel in run.kernels] == [name]

        def gradients(
            function, convert, tensors=tensors, options=options, grads=(grad_out, grad_lse)
        ):
            leaves = [convert(x).detach().requires_grad_() for x in tensors]
            sink = leaves[3] if len(leaves) > 3 else None
            outputs = function(*leaves[:3], sink=sink, **options)
            grads = [g.to(x.dtype) for g, x in zip(grads, outputs, strict=True)]
            return torch.autograd.grad(outputs, leaves, grads)

        expected = gradients(
            lambda *x, **o: tk.reference.attention(*x, **o, return_lse=True), torch.Tensor.double
        )
        plain = gradients(
            lambda q, k, v, **o: (plain_attention(q, k, v, **o), plain_low_lse(q, k, **o)),
            lambda x: x,
        )
        noise = 0.0 if sink is None else sink_noise(q, k, v, grad_out, sink=sink, **options)
        assert_gradients(actual[: len(tensors)], expected, plain, noise=noise)


@pytest.mark.parametrize(
    ("name", "match", "stages"),
    [
        pytest.param(
            *kernel,
            # Native ones are kernels of their own.
            marks=spared(kernel[0].startswith("portable") and kernel[1][2] == "fp16"),
        )
        for kernel in kernels("attention_backward", *BACKWARD)
    ],
)
def test_backward_without_that_of_q(name, match, stages):
    """As for frozen queries: the other gradients have the same bits."""
    torch.manual_seed(zlib.crc32(name.encode()))
    lengths, mask, scores = list(problems(match))[-1]
    q, k, v = operands(match, lengths)
    options = {**mask, **score_options(scores, 4, 1, "cpu")}
    sink = options.get("sink")
    out, lse = tk.attention(q, k, v, **options, return_lse=True)
    grad_out, grad_lse = torch.randn_like(out), torch.randn_like(lse)
    grad_lse[lse == -torch.inf] = 0
    found = []
    for need in (True, False):
        with tk.emulate("late_mma", seed=1, config=fields(match, stages), sm_count=3) as run:
            found.append(torch.ops.thunderkittens.attention_backward(
                grad_out, grad_lse, q, k, v, out, lse, int(options.get("causal", False)), None,
                *options.get("window_size", (-1, -1)), options.get("softcap", 0.0),
                options.get("alibi_slopes"), sink, False, [need, True, True, True],
            ))  # fmt: skip
        assert [kernel["kernel"] for kernel in run.kernels] == [name]
    (_, *grads), (none, *without) = found
    assert none.numel() == 0 or not none.any()
    for x, y in zip(grads[:2], without[:2], strict=True):
        assert y.any()
        assert torch.equal(x, y)


def packed_cases():
    for case in cases("attention_backward", *BACKWARD):
        marks = [*case.marks, spared(case.values[1][2] == "bf16")]
        yield pytest.param(*case.values, id=case.id, marks=marks)


@pytest.mark.parametrize(("name", "match", "stages", "policy"), [*packed_cases()])
def test_backward_of_packed_sequences(name, match, stages, policy):
    """Some of which have no tokens, in a fixed order."""
    torch.manual_seed(zlib.crc32(name.encode()))
    (rows, keys), mask, scores = list(problems(match))[-1]
    lengths = [(1, 140), (0, 9), (rows, keys), (3, 0)]
    q, k, v = operands(match, tuple(map(sum, zip(*lengths, strict=True))))
    options = {**mask, **score_options(scores, 4, 1, "cpu")}
    sink = options.pop("sink", None)
    packed = [x[0].transpose(0, 1).contiguous() for x in (q, k, v)]
    edges = [[0, *torch.tensor(side).cumsum(0).tolist()] for side in zip(*lengths, strict=True)]
    packing = [*(torch.tensor(e, dtype=torch.int32) for e in edges), 150, 200]
    out, lse = tk.attention_varlen(*packed, *packing, **options, sink=sink, return_lse=True)
    grad_out, grad_lse = torch.randn_like(out), torch.randn_like(lse)
    grad_lse[lse == -torch.inf] = 0
    config = fields(match, stages, head_splits=1 + emulation.POLICIES.index(policy) % 2)
    with tk.emulate(policy, seed=rows, config=config, sm_count=3) as run:
        actual = torch.ops.thunderkittens.attention_varlen_backward(
            grad_out, grad_lse, *packed, out, lse, *packing,
            int(options.get("causal", False)), None, *options.get("window_size", (-1, -1)),
            options.get("softcap", 0.0), options.get("alibi_slopes"), sink, True, [True] * 4,
        )  # fmt: skip
    assert [kernel["kernel"] for kernel in run.kernels] == [name]
    for (a, b), (c, d) in zip(*map(pairwise, edges), strict=True):
        parts = [q[:, :, a:b], k[:, :, c:d], v[:, :, c:d]]
        grads = grad_out[a:b].transpose(0, 1)[None], grad_lse[:, a:b][None]

        def gradients(function, convert, parts=parts, grads=grads):
            leaves = [convert(x).detach().requires_grad_() for x in parts]
            outputs = function(*leaves, sink=None if sink is None else convert(sink), **options)
            pairs = [g.to(x.dtype) for g, x in zip(grads, outputs, strict=True)]
            return torch.autograd.grad(outputs, leaves, pairs)

        if b == a or d == c:
            assert all(bool((x == 0).all()) for x in (actual[0][a:b], actual[1][c:d]))
            continue
        expected = gradients(
            lambda *x, **o: tk.reference.attention(*x, **o, return_lse=True), torch.Tensor.double
        )
        plain = gradients(
            lambda q, k, v, **o: (plain_attention(q, k, v, **o), plain_low_lse(q, k, **o)),
            lambda x: x,
        )
        ends = ((a, b), (c, d), (c, d))
        mine = [
            x[first:last].transpose(0, 1)[None]
            for x, (first, last) in zip(actual, ends, strict=False)
        ]
        assert_gradients(mine, expected, plain)


@pytest.mark.parametrize("dim", [64, 256])
def test_backward_of_one_block(dim):
    """A single tile of keys of a single head is work, too."""
    leaves = [torch.randn(1, 1, n, dim).bfloat16().requires_grad_() for n in (9, 20, 20)]
    grad_out = torch.randn(1, 1, 9, dim).bfloat16()
    with tk.emulate("late_mma", seed=1) as run:
        found = torch.autograd.grad(tk.attention(*leaves), leaves, grad_out)
    assert len(run.kernels) == 2
    doubles = [x.detach().double().requires_grad_() for x in leaves]
    expected = torch.autograd.grad(tk.reference.attention(*doubles), doubles, grad_out.double())
    plain = torch.autograd.grad(plain_attention(*leaves), leaves, grad_out)
    assert_gradients(found, expected, plain)


def test_the_last_section_has_fewer_heads():
    """Three heads in sections of two, forward and backward."""
    leaves = [torch.randn(1, 3, n, 64).bfloat16().requires_grad_() for n in (150, 290, 290)]
    grad_out = torch.randn(1, 3, 150, 64).bfloat16()
    found = []
    for heads in (1, 2):
        with tk.emulate("late_mma", seed=1, config={"section_heads": heads}, sm_count=2) as run:
            out, lse = tk.attention(*leaves, return_lse=True)
            _, *grads = torch.autograd.grad(out, leaves, grad_out)
        assert [kernel["section_heads"] for kernel in run.kernels] == [heads, heads]
        found.append((out, lse, *grads))
    for x, y in zip(*found, strict=True):
        assert torch.equal(x, y)


# Multiprocessors, threads of the host, heads worked on together, parts of a group, policy.
WAYS = [
    (1, 1, 1, 1, "on_wait"),
    (2, 1, 3, 1, "random"),
    (6, 3, 8, 1, "random"),
    (1, 1, 3, 2, "random"),
    (3, 2, 2, 2, "late_mma"),
]
PLAIN_KERNELS = [k for k in kernels("attention_backward", *BACKWARD) if "_bf16_" in k[0]]
PLAIN_KERNELS = [k for k in PLAIN_KERNELS if not k[0].endswith("_score_mod")]
# One problem each at the lowest intensity.
FIXED_ORDERS = [
    pytest.param(*k, lengths, id=f"{k[0]}-{len(lengths)}", marks=spared((i + j) % 2))
    for i, k in enumerate(PLAIN_KERNELS)
    for j, lengths in enumerate(([(70, 290)], [(1, 140), (0, 9), (70, 200), (3, 0), (66, 129)]))
]


@pytest.mark.parametrize(("name", "match", "stages", "lengths"), FIXED_ORDERS)
def test_a_fixed_order_ends_with_the_same_bits(name, match, stages, lengths):
    """However many blocks are at work, one after the other or at once, and in whatever order they
    begin: one alone only ends if no key block waits for another that is begun later."""
    torch.manual_seed(zlib.crc32(name.encode()))
    q, k, v = operands(match, tuple(map(sum, zip(*lengths, strict=True))))
    packed = [x[0].transpose(0, 1).contiguous() for x in (q, k, v)]
    edges = [[0, *torch.tensor(side).cumsum(0).tolist()] for side in zip(*lengths, strict=True)]
    packing = [*(torch.tensor(e, dtype=torch.int32) for e in edges), 70, 290]
    out, lse = tk.attention_varlen(*packed, *packing, causal=True, return_lse=True)
    grad_out = torch.randn_like(out)
    if len(lengths) == 1:
        grad_out, out = (x.transpose(0, 1)[None].contiguous() for x in (grad_out, out))
        op, inputs = torch.ops.thunderkittens.attention_backward, (q, k, v, out, lse[None])
    else:
        op = torch.ops.thunderkittens.attention_varlen_backward
        inputs = (*packed, out, lse, *packing)
    results = {1: [], 2: []}
    for seed, (sm_count, threads, heads, splits, policy) in enumerate(WAYS):
        config = fields(match, stages, head_splits=splits, deterministic_section_heads=heads)
        with tk.emulate(
            policy, seed, config=config, sm_count=sm_count, host_threads=threads, check_order=False
        ) as run:
            grads = op(grad_out, None, *inputs, 1, None, -1, -1, 0.0, None, None, True, [True] * 4)
        assert [kernel["kernel"] for kernel in run.kernels] == [name]
        results[splits].append(grads[:3])
    for first, *others in results.values():
        assert torch.equal(first[0], results[1][0][0])
        for grads in others:
            assert all(map(torch.equal, grads, first))


def test_portable_kernels_fit_every_gpu():
    """A block has at most 99 KB of shared memory where the compute capability is 8.6, 8.9 or 12."""
    found = [k for k in _C.kernels() if k["op"] == "attention" and k["arch"] == 80]
    assert found
    assert all(k["shared_bytes"] <= 99 << 10 for k in found)


@pytest.mark.parametrize("gpu", GPUS)
@pytest.mark.parametrize(("dim", "few", "more"), [(128, 2, 2), (256, 2, 1)])
def test_portable_tiles_of_more_rows(gpu, dim, few, more):
    """128 rows where a multiprocessor holds `more` such blocks, if there are enough of them. With
    head dimension 256 their warps have no more rows each, and `few` of 64 rows are the quicker."""
    properties = device(gpu, portable_only=True)
    shared = {k["name"]: k["shared_bytes"] for k in _C.kernels() if k["op"] == "attention"}
    problem = {"q_heads": 16, "kv_heads": 16, "q_length": 1024, "k_length": 1024}
    problem |= {"head_dim": dim, "value_dim": dim, "dtype": "bf16"}

    def chosen(batch):
        return _C.choose("attention", problem | {"batch": batch}, properties)["kernel"]

    def holds(blocks, kernel):
        return blocks * (shared[kernel] + 1024) <= properties.shared_bytes_per_block

    small = f"portable_bf16_d{dim}_64x64"
    large = "portable_bf16_d128_128x64" if dim == 128 else "portable_bf16_d256_128x32"
    gains = holds(more, large) and (dim == 128 or not holds(few, small))
    for batch in (1, 16):
        enough = 128 * batch >= more * properties.sm_count
        assert chosen(batch) == (large if gains and enough else small)


@pytest.mark.parametrize("gpu", GPUS)
def test_portable_gradients_fit_the_gpu(gpu):
    """Larger tiles than there is memory for on every GPU are for those that have it."""
    kernels = {k["name"]: k for k in _C.kernels() if k["op"] == "attention_backward"}
    properties = device(gpu, portable_only=True)
    for dim, value_dim, softcap in itertools.product((8, 64, 72, 136, 256), (64, 256), (0, 1)):
        problem = {"batch": 1, "q_heads": 16, "kv_heads": 16, "q_length": 512, "k_length": 512}
        problem |= {"head_dim": dim, "value_dim": value_dim, "softcap": softcap}
        chosen = _C.choose("attention_backward", problem, properties)
        kernel = kernels[chosen["kernel"]]
        assert kernel["arch"] == 80
        assert kernel["shared_bytes"] <= properties.shared_bytes_per_block
        assert chosen["head_dim"] >= max(dim, value_dim)
        assert chosen["score_mod"] == softcap


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("causal", [0, 1])
@pytest.mark.parametrize("length", [2048, 16384])
def test_softcap_alone_has_a_kernel(dtype, causal, length):
    device = _C.DeviceProperties(**info.EXAMPLE_GPU)
    problem = {"dtype": dtype, "batch": 1, "q_heads": 16, "kv_heads": 16, "causal": causal}
    problem |= {"q_length": length, "k_length": length, "head_dim": 128, "value_dim": 120}

    def chosen(**scores):
        return _C.choose("attention", problem | scores, device)["kernel"]

    for more in ({}, {"sink": True}, {"window_left": 100}, {"varlen": True}):
        assert chosen(softcap=True, **more) == f"forward_{dtype}_d128_128x128_softcap"
    for scores in ({"alibi": True}, {"alibi": True, "softcap": True}):
        assert chosen(**scores).endswith("_score_mod")
    other_dim = chosen(softcap=True, head_dim=64, value_dim=64)
    assert other_dim.endswith("_score_mod") or other_dim.startswith("split_kv_")


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
def test_a_steep_softcap(dtype):
    """Scores of less than one reach where tanh bends: only a polynomial that knows how far it holds
    is right."""
    torch.manual_seed(1)
    q, k, v = (torch.randn(1, 2, n, 128).to(dtype) for n in (140, 290, 290))
    q = (q.float() * 0.6 / (q.float() @ k.float().mT).abs().max()).to(dtype)
    name = f"forward_{'bf16' if dtype is torch.bfloat16 else 'fp16'}_d128_128x128_softcap"
    (config,) = (fields(m, stages) for n, m, stages in kernels("attention", "forward") if n == name)
    with tk.emulate("late_mma", seed=1, config=config) as run:
        out, lse = tk.attention(q, k, v, scale=30.0, softcap=10.0, return_lse=True)
    assert run.kernels[0]["kernel"].endswith("_softcap")
    assert_attention((out, lse), q, k, v, scale=30.0, softcap=10.0)


@pytest.mark.parametrize("dim", [64, 128, 192, 256])
def test_groups_are_split_where_their_key_heads_do_not_fill_the_gpu(dim):
    device = _C.DeviceProperties(**info.EXAMPLE_GPU)

    def parts(q_heads, kv_heads, batch=1, length=4096, **mask):
        problem = {"dtype": "bf16", "batch": batch, "q_heads": q_heads, "kv_heads": kv_heads}
        problem |= {"q_length": length, "k_length": length, "head_dim": dim, "value_dim": dim}
        return _C.choose("attention_backward", problem | mask, device)["head_splits"]

    for mask in ({}, {"causal": 1}, {"window_left": 700}):
        assert parts(32, 32, **mask) == 1  # nothing to split
        assert parts(32, 8, batch=8, **mask) == 1  # full already
        assert parts(32, 1, **mask) > 1
        assert 7 % parts(7, 1, **mask) == 0  # parts are equal
    assert parts(8, 2, length=40) == 1  # not worth two more kernels


@pytest.mark.parametrize("dim", [64, 192])
def test_groups_are_split_further_for_a_fixed_order(dim):
    """Under a causal mask over many key blocks, where a large GPU has room."""
    q, k, v = (
        normal((1, h, n, dim), torch.bfloat16, "cpu") for h, n in ((4, 70), (1, 1200), (1, 1200))
    )
    out, lse = tk.attention(q, k, v, causal=True, return_lse=True)
    grad_out = torch.randn_like(out)
    needs = [True, True, True, False]
    results = []
    for sm_count in (5, 132):
        with tk.emulate("late_mma", sm_count=sm_count, check_order=False):
            grads = torch.ops.thunderkittens.attention_backward(
                grad_out, None, q, k, v, out, lse, 1, None, -1, -1, 0.0, None, None, True, needs
            )
        results.append(grads[:3])

    def gradients(function, convert):
        leaves = [convert(x).detach().requires_grad_() for x in (q, k, v)]
        out = function(*leaves, causal=True)
        return torch.autograd.grad(out, leaves, grad_out.to(out.dtype))

    expected = gradients(tk.reference.attention, torch.Tensor.double)
    plain = gradients(plain_attention, lambda x: x)
    for grads in results:
        assert_gradients(grads, expected, plain)
    assert torch.equal(results[0][0], results[1][0])
