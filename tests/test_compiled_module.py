"""The compiled module `_C`: the tile library's layouts as arrays, the registry and the choice.

The layouts are checked against what the hardware's documentation says of them (PTX ISA: fragments
of mma.m16n8k16, and the 32, 64 and 128-byte swizzles of tensor maps), in formulas written anew.
"""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from thunderkittens import _C, info

H200 = _C.DeviceProperties(**info.EXAMPLE_GPU)
TILES = [(16, 16), (16, 64), (64, 32), (32, 128)]


@pytest.mark.parametrize("element_bytes", [1, 2, 4])
@pytest.mark.parametrize("layout", ["row", "col"])
@pytest.mark.parametrize(("rows", "cols"), TILES[1:])
def test_register_tile_holds_every_element_once(rows, cols, layout, element_bytes):
    if layout == "col":
        rows, cols = cols, rows
    positions = _C.register_tile_positions(rows, cols, layout, element_bytes)
    assert positions.shape == (32, rows * cols // 32, 2)
    flat = np.sort(positions[..., 0].ravel() * cols + positions[..., 1].ravel())
    assert np.array_equal(flat, np.arange(rows * cols))


def test_register_tile_is_the_fragment_of_mma():
    positions = _C.register_tile_positions(16, 16)
    for lane, slot in itertools.product(range(32), range(8)):
        row = lane // 4 + (8 if slot // 2 % 2 else 0)
        col = lane % 4 * 2 + slot % 2 + (8 if slot >= 4 else 0)
        assert positions[lane, slot].tolist() == [row, col]


def test_column_layout_is_the_transpose():
    row = _C.register_tile_positions(16, 16, "row")
    col = _C.register_tile_positions(16, 16, "col")
    assert np.array_equal(row[..., ::-1], col)


@pytest.mark.parametrize("swizzle", [0, 32, 64, 128, None])
@pytest.mark.parametrize("element_bytes", [1, 2, 4])
@pytest.mark.parametrize(("rows", "cols"), [(16, 128), (64, 128), (64, 256)])
def test_shared_tile_uses_every_byte_once(rows, cols, element_bytes, swizzle):
    offsets = _C.shared_tile_offsets(rows, cols, element_bytes, swizzle)
    expected = np.arange(rows * cols) * element_bytes
    assert np.array_equal(np.sort(offsets.ravel()), expected)


@pytest.mark.parametrize("swizzle", [32, 64, 128])
def test_swizzle_is_that_of_tensor_maps(swizzle):
    """16-byte chunk c of row r lies at chunk c ^ (r * width / 128) within its stripe."""
    rows, cols = 64, 256
    offsets = _C.shared_tile_offsets(rows, cols, 2, swizzle)
    chunks = swizzle // 16
    for row, chunk in itertools.product(range(rows), range(cols // 8)):
        stripe, within = divmod(chunk, chunks)
        moved = within ^ (row * swizzle // 128 % chunks)
        expected = stripe * rows * swizzle + row * swizzle + moved * 16
        assert offsets[row, chunk * 8] == expected


@pytest.mark.parametrize("swizzle", [64, 128])
def test_swizzle_spreads_a_column_over_the_banks(swizzle):
    """Eight rows at one column, as ldmatrix reads them, fall into different 16-byte banks."""
    offsets = _C.shared_tile_offsets(64, 64, 2, swizzle)
    for first in range(0, 64, 8):
        banks = offsets[first : first + 8, 0] // 16 % 8
        assert len(set(banks.tolist())) == 8


@pytest.mark.parametrize("order", ["row_major", "grouped_raster", "grouped_raster_columns"])
@pytest.mark.parametrize(("rows", "cols", "batch"), [(1, 1, 1), (7, 5, 2), (16, 3, 1), (3, 40, 3)])
def test_schedule_visits_every_tile_once(rows, cols, batch, order):
    tiles = _C.tile_schedule(rows, cols, batch, order, group=4)
    flat = np.ravel_multi_index(tiles.T, (batch, rows, cols))
    assert np.array_equal(np.sort(flat), np.arange(rows * cols * batch))
    assert np.all(np.diff(tiles[:, 0]) >= 0), "one matrix after the other"


def test_grouped_raster_keeps_to_its_bands():
    tiles = _C.tile_schedule(8, 10, order="grouped_raster", group=4)
    assert set(tiles[:40, 1].tolist()) == {0, 1, 2, 3}
    assert tiles[:5].tolist() == [[0, 0, 0], [0, 1, 0], [0, 2, 0], [0, 3, 0], [0, 0, 1]]
    columns = _C.tile_schedule(10, 8, order="grouped_raster_columns", group=4)
    assert np.array_equal(columns[:, ::-1][:, :2], tiles[:, 1:])


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: _C.register_tile_positions(8, 16), "rows must be a multiple of 16, got 8"),
        (lambda: _C.register_tile_positions(16, 16, "diagonal"), "layout must be 'row' or 'col'"),
        (lambda: _C.register_tile_positions(16, 16, "row", 3), "element_bytes must be 1, 2 or 4"),
        (lambda: _C.shared_tile_offsets(16, 16, 2, 48), "swizzle_bytes must be 0, 32, 64 or 128"),
        (lambda: _C.shared_tile_offsets(16, 24, 2, 128), "no multiple of the swizzle's width"),
        (lambda: _C.tile_schedule(2, 2, order="spiral"), "order must be 'row_major'"),
        (lambda: _C.tile_schedule(0, 2), "rows, cols and batch must be positive"),
        (lambda: _C.choose("nothing", {}, H200), "no op 'nothing' in this build"),
        (lambda: _C.problem_fields("nothing"), "no op 'nothing' in this build"),
    ],
)
def test_wrong_calls_say_what_is_wrong(call, message):
    with pytest.raises(RuntimeError) as error:
        call()
    assert message in str(error.value)


@pytest.mark.parametrize("op", _C.ops())
def test_unknown_fields_of_a_problem_are_named(op):
    with pytest.raises(RuntimeError, match=f"{op}: a problem has no field 'colour'"):
        _C.choose(op, {"colour": 1}, H200)


@pytest.mark.parametrize("op", _C.ops())
def test_the_chosen_kernel_is_in_the_registry(op):
    names = {kernel["name"] for kernel in _C.kernels() if kernel["op"] == op}
    for problem in info.EXAMPLES[op].values():
        assert _C.unsupported(op, problem, H200) == _C.no_code_for(H200)
        assert _C.choose(op, problem, H200)["kernel"] in names


# Kernels, and their symbols as nvcc 13.0 mangles them, from the kernel's name on. Where kernels of
# several sources have the name, the op is before it.
SYMBOLS = {
    "forward_bf16_d192v128_128x128": (
        "14forward_kernelINS0_13ForwardKernelIXtlNS0_6ConfigELi192ELi128ELi2ELi128ELi2ELb0E"
        "LNS_5DTypeE0ELb0ELi0ELb0ELb0EEEEEEEvNS0_14ForwardGlobalsIT_EE"
    ),
    "forward_fp16_d128_128x128_softcap": (
        "14forward_kernelINS0_13ForwardKernelIXtlNS0_6ConfigELi128ELi128ELi2ELi128ELi2ELb0E"
        "LNS_5DTypeE1ELb1ELi0ELb0ELb0EEEEEEEvNS0_14ForwardGlobalsIT_EE"
    ),
    "split_kv_bf16_d64_64x64": (
        "15split_kv_kernelINS0_13SplitKvKernelIXtlNS0_6ConfigELi64ELi64ELi1ELi64ELi4ELb1E"
        "LNS_5DTypeE0ELb0ELi0ELb0ELb0EEEEEEEvNS0_14SplitKvGlobalsIT_EE"
    ),
    "attention/combine_bf16": (
        "9attention14combine_kernelI13__nv_bfloat16EEvNS0_14CombineGlobalsIT_EE"
    ),
    "combine_few_bf16": "18combine_few_kernelI13__nv_bfloat16EEvNS0_14CombineGlobalsIT_EE",
    "attention_paged/combine_bf16": (
        "6decode14combine_kernelI13__nv_bfloat16EEvNS1_14CombineGlobalsIT_EE"
    ),
    "slide_bf16_d128_f32_portable": (
        "20lolcats_slide_kernelINS0_13LolcatsKernelILNS_5DTypeE0ELi128ELi32EEELb1EEEv"
        "NS0_20LolcatsDecodeGlobalsINT_1TEEE"
    ),
    "decode_bf16_d64_f64": (
        "21lolcats_decode_kernelINS0_13LolcatsKernelILNS_5DTypeE0ELi64ELi64EEELb0EEEv"
        "NS0_20LolcatsDecodeGlobalsINT_1TEEE"
    ),
    "segment_state_gradients_fp16_d128_f32_portable": (
        "38lolcats_portable_segment_states_kernelINS0_13LolcatsKernelILNS_5DTypeE1ELi128ELi32EEE"
        "Lb1EEEvNS1_21LolcatsSegmentGlobalsIT_EE"
    ),
    "decode_fp16_d192v128_codes": (
        "13decode_kernelINS1_6KernelIXtlNS1_6ConfigELi192ELi128ELi4ELi7ELi1ELb0ELNS_5DTypeE1E"
        "Li0ELb0ELb0EEEEEEEvNS1_7GlobalsIT_EE"
    ),
    "decode_fp16_d128_nvfp4": (
        "13decode_kernelINS1_6KernelIXtlNS1_6ConfigELi128ELi128ELi3ELi9ELi2ELb1ELNS_5DTypeE1E"
        "Li0ELb0ELb0EEEEEEEvNS1_7GlobalsIT_EE"
    ),
    "decode_bf16_d128_nvfp4_8_rows": (
        "15few_rows_kernelINS1_6KernelIXtlNS1_6ConfigELi128ELi128ELi12ELi0ELi3ELb1ELNS_5DTypeE0E"
        "Li8ELb0ELb0EEEEEEEvNS1_7GlobalsIT_EE"
    ),
    "decode_portable_bf16_d64_codes": (
        "15few_rows_kernelINS1_6KernelIXtlNS1_6ConfigELi64ELi64ELi14ELi0ELi2ELb0ELNS_5DTypeE0E"
        "Li16ELb1ELb0EEEEEEEvNS1_7GlobalsIT_EE"
    ),
    "combine_portable_fp16": (
        "6decode23portable_combine_kernelI6__halfEEvNS1_14CombineGlobalsIT_EE"
    ),
    "merge_portable_fp16": "12merge_kernelI6__halfLb1EEEvNS1_12MergeGlobalsIT_EE",
    "append_nvfp4_bf16": (
        "19append_nvfp4_kernelI13__nv_bfloat16EEvNS1_13AppendGlobalsIT_EENS1_11BlockScalesE"
    ),
    "backward_bf16_d64_128x128_deterministic": (
        "15backward_kernelINS0_14BackwardKernelIXtlNS0_14BackwardConfigELi64ELi128ELi2E"
        "LNS_5DTypeE0ELb0ELi0ELi0ELi0ELi0EEELNS0_13QueryGradientE2EEEEEvNS0_15BackwardGlobalsIT_EE"
    ),
    "backward_bf16_d192v128_64x128_score_mod": (
        "20backward_d256_kernelINS0_18BackwardD256KernelIXtlNS0_14BackwardConfigELi192ELi64ELi3E"
        "LNS_5DTypeE0ELb1ELi128ELi0ELi0ELi0EEEEEEEvNS0_19BackwardD256GlobalsIT_EE"
    ),
    "portable_backward_bf16_d128_64x128_8_warps_2_stages": (
        "24portable_backward_kernelINS0_22PortableBackwardKernelIXtlNS0_14BackwardConfigELi128E"
        "Li64ELi2ELNS_5DTypeE0ELb0ELi128ELi128ELi32ELi2EEEEEEEvNS0_23PortableBackwardGlobalsIT_EE"
    ),
    "backward_postprocess_64x2x48_fp16": (
        "18postprocess_kernelI6__halfLi64ELi2ELi48EEEvNS0_18PostprocessGlobalsIT_XT2_EEE"
    ),
    "fp16_tt_64x64_cluster": (
        "19cluster_tile_kernelINS1_17ClusterTileTraitsIXtlNS0_6ConfigELi64ELi64ELi14ELi1ELb0E"
        "Li64ELb0ELNS_5DTypeE1ELb1ELb0ELb0ELb1EEEEEEEvNT_7GlobalsE"
    ),
    "bf16_nt_64x128_short_k": (
        "14short_k_kernelINS1_12ShortKTraitsIXtlNS0_6ConfigELi64ELi128ELi8ELi1ELb0ELi64ELb0E"
        "LNS_5DTypeE0ELb0ELb0ELb0ELb0EEEEEEEvNT_7GlobalsE"
    ),
    "fp16_split_k": "14split_k_kernelINS1_12SplitKTraitsILNS_5DTypeE1EEEEEvNT_7GlobalsE",
    "nvfp4_fp16_256x64_split_k": (
        "20nvfp4_split_k_kernelINS1_12KernelTraitsIXtlNS0_6ConfigELi64ELi4ELi1ELi2ELi5ELi4E"
        "LNS_5DTypeE1EEEEEEEvNT_7GlobalsE"
    ),
    "nvfp4_fp16_fused_dequant": (
        "20fused_dequant_kernelINS1_12KernelTraitsIXtlNS0_6ConfigELi128ELi256ELi4ELi2ELb0ELi64E"
        "Lb0ELNS_5DTypeE1ELb0ELb0ELb0ELb0EEEEENS0_11Nvfp4SourceEEEvNT_7GlobalsE"
        "NS1_11DequantPlanINS8_1TET0_EE"
    ),
    "fp16_tt_64x64_single_wave": (
        "24single_wave_64x64_kernelINS1_16SingleWaveTraitsIXtlNS0_6ConfigELi64ELi64ELi10ELi1ELb0E"
        "Li64ELb0ELNS_5DTypeE1ELb1ELb0ELb0ELb0EEEEEEEvNT_7GlobalsE"
    ),
    "e4m3_e4m3_fast_128x176": (
        "15fp8_gemm_kernelINS1_12KernelTraitsIXtlNS0_6ConfigELi128ELi176ELi5ELi2ELi2ELb0ELi128E"
        "LNS0_4SumsE0ELNS_5DTypeE4ELS6_4ELb0EEEEELb0EEEvNT_7GlobalsE"
    ),
    "e4m3_e4m3_promoted_128x176_rowwise": (
        "15fp8_gemm_kernelINS1_12KernelTraitsIXtlNS0_6ConfigELi128ELi176ELi4ELi2ELi3ELb0ELi128E"
        "LNS0_4SumsE1ELNS_5DTypeE4ELS6_4ELb0EEEEELb1EEEvNT_7GlobalsE"
    ),
    "e5m2_swap_ab_16": (
        "20mxfp8_dequant_kernelINS1_13DequantTraitsIXtlNS0_13DequantConfigEtlNS_10nvfp4_gemm6Config"
        "ELi16ELi1ELi4ELi8ELi4ELi1ELNS_5DTypeE0EELS7_5EEEEEEEvNT_7GlobalsE"
    ),
    "native_swap_ab_16": (
        "19mxfp8_native_kernelINS1_12NativeTraitsIXtlNS0_11NativeShapeELi16ELi1ELi512ELi4EEEEEEE"
        "vNT_7GlobalsE"
    ),
}


@pytest.mark.skipif(
    not {"gemm", "attention"} <= set(_C.ops()), reason="this build leaves gemm or attention out"
)
@pytest.mark.parametrize("name", SYMBOLS)
def test_symbols_tell_the_kernels_of_a_family_apart(name):
    kernels = _C.kernels()
    op, _, kernel_name = name.rpartition("/")
    [family] = {
        (kernel["family"], kernel["arch"])
        for kernel in kernels
        if kernel["name"] == kernel_name and op in ("", kernel["op"])
    }
    matching = [
        kernel["name"]
        for kernel in kernels
        if (kernel["family"], kernel["arch"]) == family
        and info._matches(kernel["symbol"], SYMBOLS[name])
    ]
    assert matching == [kernel_name]


@pytest.mark.skipif("gemm" not in _C.ops(), reason="this build leaves gemm out")
@pytest.mark.parametrize(
    ("problem", "blocks"),
    [
        ((64, 512, 512, 512), 128),  # 8 tiles a product, 16 products at a time
        ((16, 1024, 1024, 1024), 128),
        ((33, 512, 512, 512), 132),  # two rounds, of whole products three
        ((1, 4096, 4096, 512), 132),
        ((4, 512, 512, 8192), 132),  # a round
    ],
)
def test_gemm_works_on_whole_products(problem, blocks):
    sizes = dict(zip(("batch", "m", "n", "k"), problem, strict=True))
    choice = _C.choose("gemm", sizes, H200)
    assert choice["blocks"] == min(blocks, len(_C.gemm_tile_order(sizes, H200)))


@pytest.mark.skipif("gemm" not in _C.ops(), reason="this build leaves gemm out")
@pytest.mark.parametrize("b_n_major", [False, True])
@pytest.mark.parametrize(
    ("problem", "splits"),
    [
        ((1, 2112, 7168, False), (3,)),
        ((16, 2112, 512, False), (1,)),  # too short a K
        ((8, 512, 7168, False), (4, 8)),
        ((32, 4096, 7168, False), (1,)),  # half of the SMs read as fast as all
        ((16, 4096, 7168, True), (3,)),
        ((16, 8192, 16384, True), (2,)),
        ((16, 8192, 8192, True), (1,)),
        ((16, 24576, 16384, True), (1,)),
    ],
)
def test_gemm_of_few_rows_divides_k(problem, splits, b_n_major):
    sizes = dict(zip(("m", "n", "k", "fused"), problem, strict=True))
    choice = _C.choose("gemm", sizes | {"b_n_major": b_n_major}, H200)
    assert choice["swap_ab"]
    assert choice["splits"] in splits
    tiles = -(-sizes["n"] // choice["block_n"])
    assert choice["blocks"] <= min(132, choice["splits"] * tiles)
    assert choice["blocks"] % choice["splits"] == 0


@pytest.mark.skipif("gemm" not in _C.ops(), reason="this build leaves gemm out")
@pytest.mark.parametrize(
    ("m", "n", "strategy", "shared"),
    [
        (64, 8192, "single_wave_64x64", (1, 1)),
        (64, 8448, "single_wave_64x64", (1, 1)),  # as many tiles as SMs
        (63, 8192, "cluster_tile", (1, 1)),  # a tile that is not whole
        (32, 8192, "swap_ab", (1, 1)),
        (128, 7168, "cluster_tile", (2, 4)),
        (128, 8192, "split_k", (1, 1)),
        (200, 8192, "split_k", (1, 1)),
    ],
)
def test_gemm_of_few_rows_in_one_wave(m, n, strategy, shared):
    choice = _C.choose("gemm", {"m": m, "n": n, "k": 8192}, H200)
    assert choice["strategy"] == strategy
    assert (choice["share_m"], choice["share_n"]) == shared


@pytest.mark.skipif("mxfp8_gemm" not in _C.ops(), reason="this build leaves gemm out")
@pytest.mark.parametrize(
    ("m", "n", "k", "fields", "kernel"),
    [
        (64, 8192, 8192, {}, "e4m3_swap_ab_64"),
        (128, 8192, 8192, {}, "e4m3_swap_ab_128"),
        (512, 8192, 8192, {}, "e4m3_swap_ab_128"),
        (1024, 8192, 8192, {}, "fused_dequant"),
        (160, 704, 2080, {}, "e4m3_swap_ab_128"),
        (800, 704, 2080, {}, "dequantize"),
        (64, 8192, 8192, {"rescaled": True}, "native_swap_ab_64"),
        (64, 28672, 8192, {"rescaled": True, "kept_b": True}, "dequantize"),  # its last pass
        (64, 8192, 8192, {"rescaled": True, "kept_b": True}, "native_swap_ab_64"),
    ],
)
def test_mxfp8_gemm_of_rows(m, n, k, fields, kernel):
    assert _C.choose("mxfp8_gemm", {"m": m, "n": n, "k": k, **fields}, H200)["kernel"] == kernel


@pytest.mark.skipif("attention" not in _C.ops(), reason="this build leaves attention out")
@pytest.mark.parametrize(
    ("batch", "heads", "rows", "keys", "split"),
    [
        (1, 32, 1, 8192, True),
        (8, 32, 50, 64, False),  # as many blocks as fit, and nothing to split
        (1, 4, 322, 6147, True),  # more queries, but few blocks
        (4, 16, 2048, 2048, False),
    ],
)
def test_attention_splits_keys_where_blocks_are_few(batch, heads, rows, keys, split):
    sizes = {"batch": batch, "q_heads": heads, "kv_heads": heads, "q_length": rows}
    sizes |= {"k_length": keys, "head_dim": 128, "value_dim": 128, "dtype": "bf16"}
    choice = _C.choose("attention", sizes | {"causal": 0, "window_left": -1}, H200)
    assert (choice["splits"] > 1) == split


@pytest.mark.skipif("gemm" not in _C.ops(), reason="this build leaves gemm out")
@pytest.mark.parametrize("b_n_major", [False, True])
@pytest.mark.parametrize(
    ("m", "n", "k", "divided"),
    [
        (512, 512, 16384, True),
        (256, 1024, 16384, True),
        (256, 2112, 7168, True),
        (512, 1024, 4096, False),  # too short a K for an exchange
        (4096, 2112, 7168, False),
        (2048, 2048, 2048, False),
    ],
)
def test_gemm_of_few_tiles_divides_k(m, n, k, divided, b_n_major):
    choice = _C.choose("gemm", {"m": m, "n": n, "k": k, "b_n_major": b_n_major}, H200)
    assert not choice["swap_ab"]
    splits = choice["splits"]
    assert (splits > 1) == divided
    if divided:
        assert choice["blocks"] % splits == 0
        assert 96 <= choice["blocks"] <= 132


@pytest.mark.skipif("gemm" not in _C.ops(), reason="this build leaves gemm out")
@pytest.mark.parametrize("b_n_major", [False, True])
@pytest.mark.parametrize(
    ("m", "n", "k"), [(640, 2112, 7168), (1024, 2112, 7168), (1152, 2048, 8192)]
)
def test_gemm_of_tiles_that_do_not_fill_the_rounds_divides_k(m, n, k, b_n_major):
    problem = {"m": m, "n": n, "k": k, "b_n_major": b_n_major}
    choice = _C.choose("gemm", problem, H200)
    assert choice["splits"] > 1
    assert choice["blocks"] == 132
    fewer = _C.DeviceProperties(**(info.EXAMPLE_GPU | {"sm_count": 78}))
    assert _C.choose("gemm", problem, fewer)["blocks"] <= 78


@pytest.mark.skipif("gemm" not in _C.ops(), reason="this build leaves gemm out")
@pytest.mark.parametrize(
    ("n", "k", "fused", "once"),
    [(8192, 8192, 0, True), (28672, 8192, 0, False), (28672, 8192, 1, True)],
)
def test_gemm_of_few_rows_leaves_the_cache_first(n, k, fused, once):
    problem = {"m": 16, "n": n, "k": k, "fused": bool(fused)}
    assert _C.choose("gemm", problem, H200)["evict_first_b"] == once


def assert_dealt_once_each(problem, n):
    """Every row of tiles has columns from 0 to n, each in one tile."""
    order = _C.gemm_tile_order(problem, H200)
    assert len(np.unique(order, axis=0)) == len(order)
    choice = _C.choose("gemm", problem, H200)
    batch, rows = problem.get("batch", 1), -(-problem["m"] // choice["block_m"])
    assert {tuple(x) for x in order[:, :2]} == set(itertools.product(range(batch), range(rows)))
    for place in itertools.product(range(batch), range(rows)):
        row = order[(order[:, :2] == place).all(axis=1)]
        row = row[row[:, 2].argsort()]
        assert row[:, 2].tolist() == list(range(len(row)))
        first, end = row[:, 3], row[:, 3] + row[:, 4]
        assert first[0] == 0
        assert (first[1:] == end[:-1]).all()
        assert first[-1] < n <= end[-1]


@pytest.mark.skipif("gemm" not in _C.ops(), reason="this build leaves gemm out")
@pytest.mark.parametrize("m", [1, 129, 4096])
@pytest.mark.parametrize("n", [8, 1000, 4096, 5000, 8192])
@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("gate", [0, 1])
def test_gemm_tiles_are_dealt_once_each(m, n, batch, gate):
    problem = {"m": m, "n": n * (1 + gate), "k": 4096, "batch": batch, "gate": gate}
    problem["fused"] = bool(gate)
    assert_dealt_once_each(problem, n)
