"""gemm's cluster tiles on the emulator: split-K over a cluster, tiles shared by multicast;
copies of operands that TMA cannot read."""

from __future__ import annotations

import itertools

import pytest
import torch

import thunderkittens as tk
from helpers.policies import every_dtype_and_policy
from test_gemm_kernels import DTYPES, H200, POLICIES, integers
from thunderkittens import _C, emulation

if emulation.problem is not None:
    pytest.skip(emulation.problem, allow_module_level=True)

LAYOUTS = list(itertools.product((False, True), repeat=2))  # a_m_major, b_n_major
CLUSTER_TILE = {"strategy": "cluster_tile", "cluster_tile": True, "swap_ab": False, "block_k": 64}
CLUSTER_TILE |= {"share_m": 1, "share_n": 1, "per_sm": 1}


def laid_out(
    a: torch.Tensor, b: torch.Tensor, a_m_major: bool, b_n_major: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    return (
        a.mT.contiguous().mT if a_m_major else a,
        b if b_n_major else b.mT.contiguous().mT,
    )


def choose(m: int, n: int, k: int, **fields: object) -> dict[str, object]:
    return _C.choose("gemm", {"m": m, "n": n, "k": k, "batch": 1, **fields}, H200)


# Rows and columns of a tile, stages, consumers; blocks of a cluster.
SPLITS = [*(((64, 64, 14, 1), splits) for splits in (1, 2, 3, 8)), ((64, 128, 9, 1), 3)]
SPLITS += [((64, 192, 7, 1), 1), ((192, 192, 4, 3), 2)]
SPLITS += [((128, 128, 7, 2), splits) for splits in (1, 4)]


@every_dtype_and_policy
@pytest.mark.parametrize(("tile", "splits"), SPLITS, ids=str)
def test_split_k_over_a_cluster(tile, splits, dtype, policy):
    """Rows and columns that tiles have in part, ranges of k of different lengths, rings that wrap;
    a bias, another type of output, rows that are not aligned."""
    for number, (a_m_major, b_n_major) in enumerate(LAYOUTS):
        batch, m, n = 1 + number % 2, tile[0] + 8, tile[1] + 8 * number
        k = 64 * (splits * 9 + 1) + 40 if number == splits % 4 else 64 * splits + 24
        a, b = integers(batch, m, k, dtype=dtype), integers(batch, k, n, dtype=dtype)
        left, right = laid_out(a, b, a_m_major, b_n_major)
        bias = integers(n, dtype=dtype) if number % 2 else None
        out_dtype = torch.float32 if number == 3 else dtype
        names = ("block_m", "block_n", "stages", "consumers")
        config = {**CLUSTER_TILE, **dict(zip(names, tile, strict=True))}
        config |= {"splits": splits, "per_sm": 1 + number // 2}
        with tk.emulate(policy, seed=number, config=config) as run:
            out = tk.gemm(left, right, bias=bias, out_dtype=out_dtype)
        expected = a.float() @ b.float() + (0 if bias is None else bias.float())
        assert torch.equal(out, expected.to(out_dtype)), (a_m_major, b_n_major)
        name = f"{'nt'[a_m_major]}{'tn'[b_n_major]}_{tile[0]}x{tile[1]}_cluster"
        assert run.kernels[0]["kernel"].partition("_")[2] == name
    a, b = integers(65, 200, dtype=dtype), integers(200, 67, dtype=dtype)
    with tk.emulate(policy, config=config | {"splits": min(splits, 4)}) as run:
        out = tk.gemm(a, b.t().contiguous().t())
    assert torch.equal(out, (a.float() @ b.float()).to(dtype))
    assert run.kernels[0]["kernel"].endswith(f"_{tile[0]}x{tile[1]}_cluster")


# Rows and columns of a tile, stages, consumers; blocks of a cluster that share b's and a's tiles,
# and that share the k of one.
SHARES = [((64, 64, 14, 1), *cluster) for cluster in ((2, 1, 1), (1, 2, 3), (2, 2, 2), (8, 1, 1))]
SHARES += [((64, 128, 9, 1), *cluster) for cluster in ((1, 4, 1), (2, 2, 1))]
SHARES += [((128, 128, 7, 2), *cluster) for cluster in ((2, 1, 2), (4, 2, 1))]
SHARES += [((64, 192, 7, 1), 1, 2, 1), ((128, 192, 5, 2), 2, 2, 1), ((192, 192, 4, 3), 2, 1, 1)]


@every_dtype_and_policy
@pytest.mark.parametrize(("tile", "share_m", "share_n", "splits"), SHARES, ids=str)
def test_multicast_over_a_cluster(tile, share_m, share_n, splits, dtype, policy):
    """Clusters whose last blocks have no rows or columns of their own, more steps than stages."""
    for number, (a_m_major, b_n_major) in enumerate(LAYOUTS):
        batch = 1 + number % 2
        m, n = tile[0] * max(1, share_m - 1) + 8, tile[1] * max(1, share_n - 1) + 8 * number + 8
        k = 64 * (splits * 9 + 1) + 40 if number == splits % 4 else 64 * splits + 24
        a, b = integers(batch, m, k, dtype=dtype), integers(batch, k, n, dtype=dtype)
        left, right = laid_out(a, b, a_m_major, b_n_major)
        names = ("block_m", "block_n", "stages", "consumers")
        config = {**CLUSTER_TILE, **dict(zip(names, tile, strict=True))}
        config |= {"splits": splits, "share_m": share_m, "share_n": share_n}
        config["per_sm"] = 1 + number // 2
        with tk.emulate(policy, seed=number, config=config) as run:
            out = tk.gemm(left, right)
        assert torch.equal(out, (a.float() @ b.float()).to(dtype)), (a_m_major, b_n_major)
        name = f"{'nt'[a_m_major]}{'tn'[b_n_major]}_{tile[0]}x{tile[1]}_cluster"
        assert run.kernels[0]["kernel"].partition("_")[2] == name


# Each tile: alone, by several blocks that divide k, and where the tile's columns are few for all of
# a consumer's threads or more than they are.
FUSED = [((64, 64, 14, 1), 1), ((64, 128, 9, 1), 3), ((64, 192, 7, 1), 1), ((64, 192, 7, 1), 2)]
FUSED += [((128, 128, 7, 2), 1), ((128, 192, 5, 2), 2), ((192, 192, 4, 3), 1)]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("tile", "splits"), FUSED, ids=str)
def test_fused_cluster_tiles(tile, splits, dtype):
    """What is kept for the gradient, activations, a residual that may be the output: rows in part,
    columns that are and are not multiples of four, another type of output."""
    names = ("block_m", "block_n", "stages", "consumers")
    config = {**CLUSTER_TILE, **dict(zip(names, tile, strict=True)), "splits": splits}
    for number, n in enumerate((tile[1] + 12, tile[1] + 35, tile[1] - 7)):
        batch, m, k = 1 + number % 2, tile[0] + 9, 64 * (splits + 1) + 24
        a, b = integers(batch, m, k, dtype=dtype), integers(batch, k, n, dtype=dtype)
        out_dtype = torch.float32 if number == 0 else dtype
        residual = integers(batch, m, n, dtype=out_dtype)
        bias = integers(n, dtype=dtype)
        z = 2 * (a.float() @ b.float()) + bias.float()
        for activation in (None, "relu", "silu"):
            into = residual.clone()
            with tk.emulate("late_mma", seed=number, config=config) as run:
                out = tk.gemm(
                    a, b, bias=bias, activation=activation, residual=into, alpha=2.0, beta=0.5,
                    out_dtype=out_dtype,
                )  # fmt: skip
            assert run.kernels[0]["kernel"].endswith(f"_{tile[0]}x{tile[1]}_cluster")
            function = {None: lambda x: x, "relu": torch.relu, "silu": torch.nn.functional.silu}
            expected = function[activation](z) + 0.5 * residual.float()
            if activation == "silu":
                torch.testing.assert_close(out, expected.to(out_dtype), rtol=1e-2, atol=1e-2)
            else:
                assert torch.equal(out, expected.to(out_dtype)), (n, activation)
    kept = [x.clone().requires_grad_() for x in (a, b)]
    with tk.emulate("late_mma", config=config):
        out = tk.gemm(*kept, activation="relu")
    with tk.emulate("late_mma"):  # whose products have fewer steps of k than blocks
        out.sum().backward()
    grad = (a.float() @ b.float() > 0).float()
    assert torch.equal(kept[1].grad, (a.float().mT @ grad).to(dtype))


# Columns, the pitches of rows and of batches, the output's type, blocks that divide k. Lengths and
# pitches are multiples of other numbers than the vectors that are stored: each of them alone keeps
# a store from being one of vectors.
PITCHES = [(63, 64, 65 * 64, None, 1), (40, 45, 65 * 48, None, 1), (40, 40, 9 * 289, None, 1)]
PITCHES += [(67, 72, 65 * 72, None, 2), (67, 67, 65 * 67, torch.float32, 2)]
PITCHES += [(66, 68, 65 * 68, torch.float32, 2), (68, 68, 65 * 68 + 2, torch.float32, 2)]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("n", "pitch", "batch_pitch", "out_dtype", "splits"), PITCHES, ids=str)
def test_outputs_of_any_pitch(n, pitch, batch_pitch, out_dtype, splits, dtype):
    """Nothing is written beside the output, and all of it is."""
    out_dtype = out_dtype or dtype
    a, b = integers(2, 65, 200, dtype=dtype), integers(2, 200, n + -n % 8, dtype=dtype)[..., :n]
    memory = torch.full((2 * batch_pitch,), 77.0, dtype=out_dtype)
    untouched = memory.clone()
    place = (2, 65, n), (batch_pitch, pitch, 1)
    untouched.as_strided(*place).copy_(a.float() @ b.float())
    config = CLUSTER_TILE | {"block_m": 64, "block_n": 64, "stages": 14, "consumers": 1}
    with tk.emulate("random", seed=n, config=config | {"splits": splits}) as run:
        tk.gemm(a, b, out=memory.as_strided(*place))
    assert run.kernels[0]["kernel"].endswith("_64x64_cluster")
    assert torch.equal(memory, untouched)


def test_choice_of_clusters():
    """Clusters are for operands whose rows do not begin at lines of 128 bytes; split-K for few
    tiles and a long k, over a cluster for any layout."""
    assert choose(4096, 4096, 4096, b_n_major=True)["strategy"] == "persistent"
    off_lines = {"a_alignment": 16, "b_alignment": 16}
    shared = choose(3872, 1512, 5368, b_n_major=True, **off_lines)
    assert shared["share_m"] * shared["share_n"] > 1
    assert choose(128, 8192, 8192)["splits"] > 1
    assert choose(56, 72, 7240, a_m_major=True, b_n_major=True, fused=True)["splits"] > 1
    for a_m_major, b_n_major in LAYOUTS:
        few = choose(312, 40, 6323, a_m_major=a_m_major, b_n_major=b_n_major)
        assert few["kernel"].endswith("_64x64_cluster")
        assert few["splits"] == 8
        many = choose(2048, 2048, 512, a_m_major=a_m_major, b_n_major=b_n_major)
        assert many["splits"] == 1


# ---- operands that TMA cannot read ----

# A kernel that reads copies of them, whatever k is.
COPYING = CLUSTER_TILE | {"block_m": 64, "block_n": 64, "stages": 14, "consumers": 1, "splits": 1}


def shifted(x: torch.Tensor, elements: int, padding: int) -> torch.Tensor:
    """The same values in rows with a padding, beginning a number of elements behind an address that
    is a multiple of 16 bytes; in the order of x's memory."""
    if x.stride(-1) != 1:
        return shifted(x.mT, elements, padding).mT
    *batch, rows, cols = x.shape
    memory = torch.full((*batch, rows, cols + padding), 7, dtype=x.dtype)
    flat = torch.full((memory.numel() + elements,), 7, dtype=x.dtype)[elements:]
    view = flat.view(memory.shape)[..., :cols]
    view.copy_(x)
    return view


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("policy", POLICIES)
def test_copies_keep_their_order(policy, dtype):
    """Every shift of a row's begin, rows shorter than a vector of 16 bytes and of several, one
    operand or both, batches; the layout that is chosen for is the one that was given."""
    sizes = ((33, 37, 3), (70, 129, 65), (9, 8, 21), (66, 63, 130))
    for number, ((m, n, k), (a_m_major, b_n_major)) in enumerate(itertools.product(sizes, LAYOUTS)):
        batch = (2,) if number % 3 == 0 else ()
        a, b = integers(*batch, m, k, dtype=dtype), integers(*batch, k, n, dtype=dtype)
        left, right = laid_out(a, b, a_m_major, b_n_major)
        left = shifted(left, number % 8, number % 3)
        right = shifted(right, (number + 3) % 8, (number + 1) % 3)
        with tk.emulate(policy, seed=number, config=COPYING) as run:
            out = tk.gemm(left, right)
        assert torch.equal(out, (a.float() @ b.float()).to(dtype)), (number, m, n, k)
        choice = run.kernels[0]
        if min(m, k) > 1:
            assert (choice["a_m_major"], choice["b_n_major"]) == (a_m_major, b_n_major)


def test_copies_of_expanded_and_strided_operands():
    """An operand of all batches is copied once; one without adjacent elements still is."""
    a, b = integers(3, 20, 21, dtype=torch.bfloat16), integers(21, 19, dtype=torch.bfloat16)
    expected = (a.float() @ b.float()).bfloat16()
    strided = torch.empty(3, 20, 42, dtype=torch.bfloat16)[..., ::2].copy_(a)
    for left, right in ((a, b), (strided, b), (a, b.expand(3, 21, 19))):
        with tk.emulate("late_mma", config=COPYING):
            assert torch.equal(tk.gemm(left, right), expected)
    rows = a[0, :1].expand(20, 21)
    with tk.emulate("late_mma", config=COPYING):
        out = tk.gemm(rows, b)
    assert torch.equal(out, (rows.float() @ b.float()).bfloat16())
