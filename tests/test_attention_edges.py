"""Where attention's masks, tiles and rings end: which keys a row sees, on every kernel on the
emulator, wherever the mask's edges fall in a block of keys and in one of queries; groups of heads
that do not divide a tile; rings that wrap; many splits."""

from __future__ import annotations

import math
import zlib

import pytest
import torch

import thunderkittens as tk
from helpers.attention import assert_attention, normal, score_options
from test_attention_kernels import BACKWARD, DTYPES, fields, kernels, spared

ROWS = 66  # of queries of a sequence: two blocks of 64
FURTHER = 131  # most further keys: beyond those of one block
MASKS = {
    "causal": {"causal": True},
    "window": {"window_size": (75, 17)},
    # Wide enough for blocks that neither edge cuts.
    "wide": {"window_size": (150, 40)},
}


def plain_kernels(op, *kinds):
    """One type, and no score options: they have the same code for masks."""
    found = [k for k in kernels(op, *kinds) if k[1][2] == "bf16" and not k[1][7]]
    return [pytest.param(*kernel, id=kernel[0]) for kernel in found]


def masked_kernels(op, *kinds):
    """Windows where the head dimension is one that a kind of kernels begins with; of a portable
    gradient, which is slow here, one mask at the lowest intensity."""
    masks = {"64": ("causal", "window", "wide"), "128": ("causal", "window", "wide")}
    masks |= {"192": ("causal", "window")}
    found = []
    for i, kernel in enumerate(plain_kernels(op, *kinds)):
        name, match, _ = kernel.values
        of_kernel = masks.get(match[3], ("causal",))
        for j, mask in enumerate(of_kernel):
            mark = spared(match[1].startswith("portable") and i % len(of_kernel) != j)
            found.append(pytest.param(*kernel.values, mask, id=f"{name}-{mask}", marks=mark))
    return found


class Sequences:
    """One for each offset, packed. All scores are nearly the same, so that a row's output counts
    the keys that it sees, by their number modulo the head dimension; one more or one less changes
    any result by more than all its rounding errors."""

    def __init__(self, match, mask, intensity):
        offsets = range(0, FURTHER, 5 if intensity == 1 else 1)
        self.dim, self.value_dim = int(match[3]), int(match[4] or match[3])
        self.k_lengths = [ROWS + offset for offset in offsets]
        rows, keys = torch.arange(ROWS), torch.arange(self.k_lengths[-1])
        last = rows + torch.tensor(offsets)[:, None]
        first = torch.zeros_like(last)
        if "window_size" in mask:
            left, right = mask["window_size"]
            first, last = last - left, last + right
        exists = keys < torch.tensor(self.k_lengths)[:, None]
        self.seen = (keys >= first[..., None]) & (keys <= last[..., None]) & exists[:, None]
        self.count = self.seen.sum(2).double()
        self.q = 2.0**-10 * unit(rows, self.dim)
        self.k, self.v = unit(keys, self.dim), unit(keys, self.value_dim)
        self.out = (self.seen.double() @ self.v) / self.count[..., None]
        edges = [torch.tensor([ROWS] * len(offsets)), torch.tensor(self.k_lengths)]
        edges = [torch.nn.functional.pad(x.cumsum(0), (1, 0)).int() for x in edges]
        self.packing = [*edges, ROWS, self.k_lengths[-1]]
        self.exists = exists

    def operands(self):
        q = self.q.repeat(len(self.k_lengths), 1)
        k, v = (torch.cat([x[:n] for n in self.k_lengths]) for x in (self.k, self.v))
        return [x[:, None].bfloat16() for x in (q, k, v)]

    def gradients(self, grad_out):
        """Of q, k and v in float64, packed."""
        weights = self.seen / self.count[..., None]
        products = grad_out @ self.v.T
        scores = weights * (products - (weights * products).sum(2, keepdim=True))
        scores = scores / math.sqrt(self.dim)
        grads = [scores @ self.k, scores.mT @ self.q, weights.mT @ grad_out]
        return [grads[0].flatten(0, 1), *(x[self.exists] for x in grads[1:])]


def unit(numbers, dim):
    return torch.nn.functional.one_hot(numbers % dim, dim).double()


@pytest.mark.emulator
@pytest.mark.parametrize(
    ("name", "match", "stages", "mask"), masked_kernels("attention", "forward", "split_kv")
)
def test_rows_see_the_keys_up_to_the_edge(name, match, stages, mask, intensity):
    sequences = Sequences(match, MASKS[mask], intensity)
    config = fields(match, stages)
    with tk.emulate("late_mma", config=config, sm_count=2, check_order=False) as run:
        out, lse = tk.attention_varlen(
            *sequences.operands(), *sequences.packing, **MASKS[mask], return_lse=True
        )
    assert [kernel["kernel"] for kernel in run.kernels] == [name]
    assert torch.equal(lse.view(-1, ROWS).exp().round().double(), sequences.count)
    seen = out.double().view(-1, ROWS, sequences.value_dim) * sequences.count[..., None]
    assert torch.equal(seen.round(), (sequences.out * sequences.count[..., None]).round())


@pytest.mark.emulator
@pytest.mark.parametrize(
    ("name", "match", "stages", "mask"), masked_kernels("attention_backward", *BACKWARD)
)
def test_gradients_of_the_keys_up_to_the_edge(name, match, stages, mask, intensity):
    sequences = Sequences(match, MASKS[mask], intensity)
    grad_out = sequences.count[..., None] * unit(torch.arange(ROWS), sequences.value_dim)
    out, lse = sequences.out.flatten(0, 1), sequences.count.log().flatten()
    window = MASKS[mask].get("window_size", (-1, -1))
    config = fields(match, stages, head_splits=1)
    with tk.emulate("late_mma", config=config, sm_count=2, check_order=False) as run:
        grads = torch.ops.thunderkittens.attention_varlen_backward(
            grad_out.flatten(0, 1)[:, None].bfloat16(), None, *sequences.operands(),
            out[:, None].bfloat16(), lse[None].float(), *sequences.packing, int(mask == "causal"),
            None, *window, 0.0, None, None, False, [True, True, True, False],
        )  # fmt: skip
    assert [kernel["kernel"] for kernel in run.kernels] == [name]
    for grad, expected in zip(grads, sequences.gradients(grad_out), strict=False):
        atol = 2**-10 * float(expected.abs().max())
        torch.testing.assert_close(grad[:, 0].double(), expected, rtol=2**-5, atol=atol)


@pytest.mark.emulator
@pytest.mark.parametrize(
    ("name", "match", "stages"), plain_kernels("attention", "forward", "split_kv")
)
def test_rings_of_keys_wrap_twice(name, match, stages):
    """A block alone takes more blocks of keys than twice its stages, with a ragged last one."""
    block_n, split = int(match[6]), match[1] == "split_kv"
    length, v_dim = (2 * stages + 1) * block_n + 9, match[4] or match[3]
    torch.manual_seed(zlib.crc32(name.encode()))
    for rows, options in ((3, {"causal": True}), (2, {"window_size": (length - block_n, 0)})):
        q, k, v = (
            normal((1, heads, n, int(dim)), torch.bfloat16, "cpu")
            for heads, n, dim in ((2, rows, match[3]), (1, length, match[3]), (1, length, v_dim))
        )
        for policy in ("on_wait", "late_mma"):
            config = fields(match, stages) | {"splits": int(split)}
            with tk.emulate(policy, config=config, sm_count=1) as run:
                result = tk.attention(q, k, v, **options, return_lse=True)
            assert [kernel["kernel"] for kernel in run.kernels] == [name]
            assert_attention(result, q, k, v, **options)


@pytest.mark.emulator
@pytest.mark.parametrize(("name", "match", "stages"), plain_kernels("attention", "split_kv"))
def test_split_keys_of_longer_queries(name, match, stages):
    """Several tiles of rows for a head, groups that tiles cut, ranges that a mask leaves empty."""
    torch.manual_seed(zlib.crc32(name.encode()))
    for rows, keys, heads, options in (
        (150, 420, (2, 2), {}),
        (97, 301, (6, 2), {"causal": True}),
        (200, 200, (2, 1), {"causal": "upper_left"}),
        (130, 390, (3, 1), {"window_size": (90, 20)}),
    ):
        q, k, v = (
            normal((2, h, n, int(match[3])), torch.bfloat16, "cpu")
            for h, n in ((heads[0], rows), (heads[1], keys), (heads[1], keys))
        )
        with tk.emulate("late_mma", config=fields(match, stages) | {"splits": 3}) as run:
            result = tk.attention(q, k, v, **options, return_lse=True)
        assert run.kernels[0]["kernel"] == name
        assert_attention(result, q, k, v, **options)


@pytest.mark.emulator
@pytest.mark.parametrize(
    ("splits", "dtype"),
    [(16, "fp16"), (17, "fp16"), (33, "bf16"), (71, "fp16"), (16, "bf16"), (128, "bf16")],
)
def test_many_splits(splits, dtype):
    """As many as one warp combines, and more, also than its lanes; some have no keys, and some rows
    nothing but the sink."""
    torch.manual_seed(splits)
    of_dtype = f"split_kv_{dtype}_d64_"
    name, match, stages = next(k for k in kernels("attention", "split_kv") if of_dtype in k[0])
    for length, options in ((34 * 128 + 5, {}), (700, {"window_size": (300, 0)})):
        options = options | score_options(("sink",), 6, 1, "cpu")
        q, k, v = (
            normal((1, heads, n, 64), DTYPES[dtype], "cpu")
            for heads, n in ((6, 2), (2, length), (2, length))
        )
        config = fields(match, stages) | {"splits": splits}
        with tk.emulate("late_mma", config=config, check_order=False) as run:
            result = tk.attention(q, k, v, **options, return_lse=True)
        assert [kernel["kernel"] for kernel in run.kernels] == [name]
        assert_attention(result, q, k, v, **options)


@pytest.mark.emulator
@pytest.mark.parametrize(("q_heads", "kv_heads"), [(5, 1), (10, 2), (7, 1)])
@pytest.mark.parametrize(("name", "match", "stages"), plain_kernels("attention", "split_kv"))
def test_groups_of_heads_that_do_not_divide_a_tile(name, match, stages, q_heads, kv_heads):
    """The rows are those of all heads of a group, and those of a position lie in two tiles."""
    torch.manual_seed(zlib.crc32(name.encode()))
    group = q_heads // kv_heads
    for rows, options in ((130 // group, {"causal": True}), (64 // group + 1, {})):
        options = options | score_options(("sink", "alibi_batch"), q_heads, 2, "cpu")
        q, k, v = (
            normal((2, heads, n, int(match[3])), torch.bfloat16, "cpu")
            for heads, n in ((q_heads, rows), (kv_heads, 150), (kv_heads, 150))
        )
        with tk.emulate("on_wait", config=fields(match, stages), sm_count=3) as run:
            result = tk.attention(q, k, v, **options, return_lse=True)
        assert [kernel["kernel"] for kernel in run.kernels] == [name]
        assert_attention(result, q, k, v, **options)


@pytest.mark.emulator
@pytest.mark.parametrize(
    ("name", "match", "stages"),
    [k for k in plain_kernels("attention_backward", "backward") if int(k.values[1][3]) > 128],
)
def test_gradient_without_keys(name, match, stages):
    """The main kernel has nothing to do, and is not launched; dQ is zero all the same."""
    dim, value_dim = int(match[3]), int(match[4] or match[3])
    q, k, v, out = (
        normal((1, 2, n, d), torch.bfloat16, "cpu")
        for n, d in ((70, dim), (0, dim), (0, value_dim), (70, value_dim))
    )
    lse = torch.full((1, 2, 70), -math.inf)
    with tk.emulate("late_mma", config=fields(match, stages, head_splits=1)) as run:
        grads = torch.ops.thunderkittens.attention_backward(
            torch.randn_like(out), None, q, k, v, torch.zeros_like(out), lse, 0, None, -1, -1, 0.0,
            None, None, False, [True, True, True, False],
        )  # fmt: skip
    assert [kernel["kernel"] for kernel in run.kernels] == [name]
    assert bool((grads[0] == 0).all())
    assert grads[1].shape == k.shape
