"""A call of every op by the sizes of its dimensions, for the tests of sizes of 0."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

import thunderkittens as tk

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
E4M3, E8M0 = torch.float8_e4m3fn, torch.float8_e8m0fnu


@dataclass
class Draw:
    """Tensors of a call: small integers, and scales that are powers of two."""

    device: str

    def operand(self, *shape: int, dtype: torch.dtype = BF16) -> Tensor:
        return torch.randint(-2, 3, shape, device=self.device).to(dtype).requires_grad_()

    def codes(self, *shape: int) -> Tensor:
        return torch.randint(0, 100, shape, device=self.device).to(torch.uint8)

    def fp8(self, *shape: int) -> Tensor:
        return torch.randint(-8, 9, shape, device=self.device).float().to(E4M3)

    def scale(self, *shape: int, dtype: torch.dtype = FP32) -> Tensor:
        return torch.randint(1, 3, shape, device=self.device).float().to(dtype)

    def ends(self, groups: int, total: int) -> Tensor:
        """Groups of one; the last of `total` belongs to none."""
        ends = [min(i + 1, max(total - 1, 0)) for i in range(groups)]
        return torch.tensor(ends, dtype=torch.int32, device=self.device)


Arguments = dict[str, Any]
Build = Callable[[Draw, dict[str, int]], Arguments]


@dataclass
class Call:
    """A call of `tk.<op>` or of `function`: the sizes of its dimensions, and a function that makes
    its arguments of them. `positive` are dimensions that must not be 0, with what the error says;
    "G unless H" may be 0 if H is."""

    op: str
    sizes: dict[str, int]
    build: Build
    positive: dict[str, str] = field(default_factory=dict)
    function: str = ""

    def zeros(self, most: int = 2) -> Iterator[dict[str, int]]:
        """The sizes with one dimension of 0, or up to `most`."""
        for count in range(1, most + 1):
            for names in itertools.combinations(self.sizes, count):
                yield {**self.sizes, **dict.fromkeys(names, 0)}

    def errors(self, sizes: dict[str, int]) -> list[str]:
        """What the error of a call of these sizes may say; none where it must not raise one."""
        return [words for name, words in self.positive.items() if _refused(name, sizes)]


def _refused(name: str, sizes: dict[str, int]) -> bool:
    name, _, unless = name.partition(" unless ")
    return sizes[name] == 0 and sizes.get(unless, 1) > 0


def tensors_of(arguments: Any) -> list[Tensor]:
    """The tensors among arguments or results."""
    if isinstance(arguments, Tensor):
        return [arguments]
    if isinstance(arguments, dict):
        arguments = arguments.values()
    if isinstance(arguments, str) or not isinstance(arguments, tuple | list | type({}.values())):
        return []
    return [y for x in arguments for y in tensors_of(x)]


def gemm(a: tuple[str, ...], b: tuple[str, ...], plain: bool = False, **options: Any) -> Build:
    """A product of operands of these dimensions, with everything that it may have, or plain."""

    def build(draw: Draw, n: dict[str, int]) -> Arguments:
        sizes = {**n, "1": 1}
        left, right = (draw.operand(*(sizes[x] for x in s)) for s in (a, b))
        result = {"a": left, "b": right, **options}
        if plain:
            return result
        gated = options.get("activation") in ("swiglu", "geglu")
        shape = [*torch.broadcast_shapes(left.shape[:-2], right.shape[:-2]), left.shape[-2]]
        residual = draw.operand(
            *shape, right.shape[-1] // (1 + gated), dtype=options.get("out_dtype", BF16)
        )
        return {**result, "bias": draw.operand(right.shape[-1]), "residual": residual}

    return build


def grouped(a: tuple[str, ...], b: tuple[str, ...], divided: str) -> Build:
    def build(draw: Draw, n: dict[str, int]) -> Arguments:
        operands = {"a": draw.operand(*(n[x] for x in a)), "b": draw.operand(*(n[x] for x in b))}
        return {**operands, "offs": draw.ends(n["E"], n[divided])}

    return build


def attention(**options: Any) -> Build:
    def build(draw: Draw, n: dict[str, int]) -> Arguments:
        result = {
            "q": draw.operand(n["B"], n["H"], n["S"], n["D"]),
            "k": draw.operand(n["B"], n["G"], n["T"], n["D"]),
            "v": draw.operand(n["B"], n["G"], n["T"], n["V"]),
            "return_lse": True,
            **options,
        }
        if "softcap" in options:
            result["sink"] = draw.operand(n["H"], dtype=FP32)
            result["alibi_slopes"] = draw.scale(n["B"], n["H"])
        return result

    return build


def varlen(draw: Draw, n: dict[str, int]) -> Arguments:
    def edges(tokens: int) -> Tensor:
        ends = [tokens * i // max(n["B"], 1) for i in range(n["B"] + 1)]
        return torch.tensor(ends, dtype=torch.int32, device=draw.device)

    return {
        "q": draw.operand(n["S"], n["H"], n["D"]),
        "k": draw.operand(n["T"], n["G"], n["D"]),
        "v": draw.operand(n["T"], n["G"], n["V"]),
        "cu_seqlens_q": edges(n["S"]),
        "cu_seqlens_k": edges(n["T"]),
        "max_seqlen_q": n["S"],
        "max_seqlen_k": n["T"],
        "return_lse": True,
        "causal": True,
    }


def quantize(*shape: str, **options: Any) -> Build:
    def build(draw: Draw, n: dict[str, int]) -> Arguments:
        return {"x": torch.randn([n[x] for x in shape], device=draw.device).to(BF16), **options}

    return build


def nvfp4_quantize(*batch: str, given: bool = False, **options: Any) -> Build:
    def build(draw: Draw, n: dict[str, int]) -> Arguments:
        result = quantize(*batch, "M", "K", **options)(draw, n)
        if given:
            result["global_scale"] = draw.scale(*(n[x] for x in batch))
            result["seed"] = torch.tensor([7], device=draw.device)
        return result

    return build


def blocks(n: int, length: int) -> int:
    return -(-n // length)


def fp8_gemm(kind: str, groups: bool = False, **options: Any) -> Build:
    def build(draw: Draw, n: dict[str, int]) -> Arguments:
        m, columns, k = n["M"], n["N"], n["K"]
        scale_a, scale_b = {
            "tensor": ((), ()),
            "row": ((m, 1), (1, columns)),
            "block": ((m, blocks(k, 128)), (blocks(k, 128), blocks(columns, 128))),
            "fine": ((m, blocks(k, 128)), (blocks(k, 128), columns)),
        }[kind]
        more = {"offs": draw.ends(n["E"], m)} if groups else {}
        return {
            "a": draw.fp8(m, k),
            "b": draw.fp8(*([n["E"]] if groups else []), k, columns),
            "scale_a": draw.scale(*scale_a),
            "scale_b": draw.scale(*scale_b),
            "bias": draw.operand(columns).detach(),
            **more,
            **options,
        }

    return build


def fp8_linear(*batch: str, **options: Any) -> Build:
    def build(draw: Draw, n: dict[str, int]) -> Arguments:
        x, weight = draw.operand(*(n[x] for x in batch), n["K"]), draw.operand(n["N"], n["K"])
        return {"x": x, "weight": weight, "bias": draw.operand(n["N"]), **options}

    return build


def mxfp8_gemm(groups: bool = False, **options: Any) -> Build:
    def build(draw: Draw, n: dict[str, int]) -> Arguments:
        m, columns, k = n["M"], n["N"], n["K"]
        e = [n["E"]] if groups else []
        more = {"offs": draw.ends(n["E"], m)} if groups else {}
        return {
            "a": draw.fp8(m, k),
            "b": draw.fp8(*e, k, columns),
            "scale_a": draw.scale(m, blocks(k, 32), dtype=E8M0),
            "scale_b": draw.scale(*e, columns, blocks(k, 32), dtype=E8M0),
            "bias": draw.operand(columns).detach(),
            "swizzle": False,
            **more,
            **options,
        }

    return build


def mxfp8_data(*batch: str) -> Build:
    def build(draw: Draw, n: dict[str, int]) -> Arguments:
        shape = [n[x] for x in (*batch, "M")]
        scale = draw.scale(*shape, blocks(n["K"], 32), dtype=E8M0)
        return {"data": draw.fp8(*shape, n["K"]), "scale": scale, "swizzle": False}

    return build


def nvfp4_data(*batch: str, weight: bool = False) -> Build:
    def build(draw: Draw, n: dict[str, int]) -> Arguments:
        e = [n[x] for x in batch]
        return {
            "weight" if weight else "data": draw.codes(*e, n["M"], n["K"] // 2),
            "block_scale": draw.scale(*e, n["M"], blocks(n["K"], 16), dtype=E4M3),
            "global_scale": draw.scale(*e),
            "swizzle": False,
        }

    return build


def nvfp4_gemm(*batch: str, groups: bool = False, coded: bool = False, **options: Any) -> Build:
    def build(draw: Draw, n: dict[str, int]) -> Arguments:
        m, columns, k = n["M"], n["N"], n["K"]
        e = [n["E"]] if groups else []
        bias = draw.operand(columns)
        result = {
            "a": draw.operand(*(n[x] for x in batch), m, k),
            "b": draw.codes(*e, columns, k // 2),
            "scale_b": draw.scale(*e, columns, k // 16, dtype=E4M3),
            "global_scale_b": draw.scale(*e),
            "bias": bias,
            "swizzle": False,
            **options,
        }
        if groups or coded:
            result |= {"a": result["a"].detach(), "bias": bias.detach()}
        if groups:
            result["offs"] = draw.ends(n["E"], m)
        if coded:
            result |= {"a": draw.codes(m, k // 2), "global_scale_a": draw.scale()}
            result["scale_a"] = draw.scale(m, k // 16, dtype=E4M3)
        return result

    return build


def based(state: bool, **options: Any) -> Build:
    def build(draw: Draw, n: dict[str, int]) -> Arguments:
        head = (n["B"], n["H"])
        result = {x: draw.operand(*head, n["N"], 16) for x in "qk"}
        result["v"] = draw.operand(*head, n["N"], n["V"])
        if state:
            numerator = draw.operand(*head, 153, n["V"], dtype=FP32)
            result["initial_state"] = (numerator, draw.operand(*head, 153, dtype=FP32))
        return {**result, **options}

    return build


def based_decode(draw: Draw, n: dict[str, int]) -> Arguments:
    call = based(True)(draw, {**n, "N": 1})
    state = tuple(x.detach().clone() for x in call.pop("initial_state"))
    return {**{name: x.detach() for name, x in call.items()}, "state": state}


def gated_delta_rule(*, state: bool = False, packed: bool = False, **options: Any) -> Build:
    def build(draw: Draw, n: dict[str, int]) -> Arguments:
        count = n["B"]
        head = (1 if packed else count, n["H"], n["N"])
        result = {x: draw.operand(*head, n["D"]) for x in "qk"}
        result["v"] = draw.operand(*head, n["V"])
        result["g"] = -draw.scale(*head).requires_grad_()
        result["beta"] = draw.operand(*head, dtype=FP32)
        if packed:
            ends = [n["N"] * i // max(count, 1) for i in range(count + 1)]
            result["cu_seqlens"] = torch.tensor(ends, dtype=torch.int32, device=draw.device)
        if state:
            state_shape = (count, n["H"], n["D"], n["V"])
            result["initial_state"] = draw.operand(*state_shape, dtype=FP32)
        return {**result, **options, "qk_l2norm": True, "beta_sigmoid": True}

    return build


def gated_delta_rule_decode(draw: Draw, n: dict[str, int]) -> Arguments:
    call = gated_delta_rule(state=True)(draw, {**n, "N": 2})
    state = call.pop("initial_state").detach().clone()
    plain = {name: x.detach() if isinstance(x, Tensor) else x for name, x in call.items()}
    return {**plain, "state": state}


def lolcats(state: bool, hedgehog: bool = False, **options: Any) -> Build:
    maps, factors = (("qmap", "kmap"), ("alphas", "betas")) if hedgehog else (
        ("q_map", "k_map"), ("alpha", "beta"))  # fmt: skip

    def build(draw: Draw, n: dict[str, int]) -> Arguments:
        result: Arguments = {"q": draw.operand(n["B"], n["H"], n["N"], n["D"])}
        result |= {x: draw.operand(n["B"], n["G"], n["N"], n["D"]) for x in "kv"}
        result |= {x: draw.operand(n["H"], n["D"], n["F"]) for x in maps}
        result |= {x: draw.scale(n["H"]).requires_grad_() for x in factors}
        if state:
            result["initial_state"] = lolcats_state(draw, n)
        return {**result, **options}

    return build


def lolcats_state(draw: Draw, n: dict[str, int]) -> tk.LolcatsState:
    sizes = (n[x] for x in "BHGDF")
    state = tk.reference.empty_state(*sizes, dtype=BF16, device=draw.device)
    state.lengths.fill_(3)
    state.keys[:, :, :3] = 1
    return state


def lolcats_decode(draw: Draw, n: dict[str, int]) -> Arguments:
    call = lolcats(False)(draw, {**n, "N": 1})
    return {name: x.detach() for name, x in call.items()} | {"state": lolcats_state(draw, n)}


PRODUCT = {"M": 3, "N": 8, "K": 16}
GROUPS = {"E": 2, **PRODUCT}
DEEP = {**PRODUCT, "K": 144}
HEADS = {"H": 4, "G": 2, "S": 3, "T": 5, "D": 64, "V": 64}
TOKENS = {"B": 2, "H": 2, "N": 5}
MULTIPLE = {
    "D": "head dim 0; it must be a multiple of 8 from 8 to 256",
    "V": "head dim 0; it must be a multiple of 8 from 8 to 256",
    "G unless H": "k has 0 heads, q has 4; q's heads must be a multiple of k's",
}
COLUMNS = {"V": "v has 0 columns; they must be a multiple of 8 from 8 to 256"}
DELTA = {**TOKENS, "D": 16, "V": 16}
KEYS_AND_COLUMNS = {**COLUMNS, "D": "q has 0 columns; they must be a multiple of 8 from 8 to 128"}
LOLCATS = {"B": 2, "H": 4, "G": 2, "N": 5, "D": 64, "F": 32}
LOLCATS_DECODE = {name: n for name, n in LOLCATS.items() if name != "N"}
POSITIVE = {
    "D": "q has head dimension 0; it must be 64 or 128",
    "F": "F 32 or 64",
    "G unless H": "k has 0 heads, q has 4; q's heads must be a multiple of k's",
    "H unless G": "k has 2 heads, q has 0; q's heads must be a multiple of k's",
}
TWO = {"B": 2, "C": 3}


def only(sizes: dict[str, int], names: tuple[str, ...]) -> dict[str, int]:
    return {name: n for name, n in sizes.items() if name in names}


CALLS = {
    "gemm": Call("gemm", PRODUCT, gemm(("M", "K"), ("K", "N"), plain=True)),
    "gemm_out": Call("gemm", PRODUCT, gemm(("M", "K"), ("K", "N"), alpha=2.0, out_dtype=FP32)),
    **{
        f"gemm_{name}": Call("gemm", PRODUCT, gemm(("M", "K"), ("K", "N"), activation=name, **more))
        for name, more in {
            "relu": {"beta": 2.0},
            "gelu": {"alpha": 0.5},
            "gelu_tanh": {"out_dtype": FP32},
            "silu": {},
            "swiglu": {"gate_layout": "interleaved"},
            "geglu": {"beta": -1.0},
        }.items()
    },
    "gemm_batch": Call("gemm", {"B": 2, **PRODUCT}, gemm(("B", "M", "K"), ("K", "N"))),
    "gemm_batches": Call(
        "gemm", {**TWO, **PRODUCT}, gemm(("B", "C", "M", "K"), ("K", "N"), activation="relu")
    ),
    "gemm_batched": Call("gemm", {"B": 2, **PRODUCT}, gemm(("B", "M", "K"), ("B", "K", "N"))),
    "gemm_broadcast": Call(
        "gemm",
        {**TWO, **PRODUCT},
        gemm(("B", "1", "M", "K"), ("C", "K", "N"), activation="swiglu"),
    ),
    "gemm_batch_of_b": Call("gemm", {"B": 2, **PRODUCT}, gemm(("M", "K"), ("B", "K", "N"), True)),
    "grouped_rows": Call("grouped_gemm", GROUPS, grouped(("M", "K"), ("E", "K", "N"), "M")),
    "grouped_columns": Call("grouped_gemm", GROUPS, grouped(("E", "M", "K"), ("K", "N"), "N")),
    "grouped_parts": Call("grouped_gemm", GROUPS, grouped(("M", "K"), ("K", "N"), "K")),
    "attention": Call("attention", {"B": 2, **HEADS}, attention(causal=True), MULTIPLE),
    "attention_sink": Call(
        "attention", {"B": 2, **HEADS}, attention(softcap=5.0, window_size=(2, 2)), MULTIPLE
    ),
    "attention_varlen": Call("attention_varlen", {"B": 2, **HEADS}, varlen, MULTIPLE),
    **{
        f"fp8_quantize_{of}_{len(batch)}": Call(
            "fp8_quantize",
            {**only(TWO, batch), "M": 3, "K": 144},
            quantize(*batch, "M", "K", granularity=of),
        )
        for of in ("tensor", "row", "1x128", "128x128")
        for batch in ((), ("B",), ("B", "C"))
    },
    **{
        f"fp8_quantize_{of}_transposed": Call(
            "fp8_quantize",
            {"M": 3, "K": 144},
            quantize("M", "K", granularity=of, transposed=True),
        )
        for of in ("tensor", "row", "1x128", "128x128")
    },
    **{
        f"fp8_gemm_{of}": Call("fp8_gemm", DEEP, fp8_gemm(of, activation=activation))
        for of, activation in (("tensor", None), ("row", "relu"), ("block", "silu"), ("fine", None))
    },
    "fp8_gemm_fast": Call("fp8_gemm", PRODUCT, fp8_gemm("row", accurate=False)),
    "fp8_gemm_groups": Call("fp8_gemm", GROUPS, fp8_gemm("row", True)),
    "fp8_gemm_groups_of_blocks": Call("fp8_gemm", GROUPS, fp8_gemm("block", True)),
    **{
        f"fp8_linear_{scaling}_{len(batch)}": Call(
            "fp8_linear",
            {**only(TWO, batch), **only(PRODUCT, (*batch, "N", "K"))},
            fp8_linear(*batch, scaling=scaling),
        )
        for scaling in ("row", "block")
        for batch in ((), ("M",), ("B", "M"), ("B", "C", "M"))
    },
    "mxfp8_quantize": Call("mxfp8_quantize", {"M": 3, "K": 40}, quantize("M", "K", transpose=True)),
    "mxfp8_quantize_batch": Call(
        "mxfp8_quantize", {"B": 2, "M": 3, "K": 40}, quantize("B", "M", "K", axis=-2, swizzle=False)
    ),
    "mxfp8_dequantize": Call("mxfp8_dequantize", {"M": 3, "K": 40}, mxfp8_data()),
    "mxfp8_dequantize_batch": Call("mxfp8_dequantize", {"B": 2, "M": 3, "K": 40}, mxfp8_data("B")),
    "mxfp8_prepare": Call("mxfp8_prepare", {"M": 3, "K": 40}, mxfp8_data()),
    "mxfp8_prepare_batch": Call("mxfp8_prepare", {"B": 2, "M": 3, "K": 40}, mxfp8_data("B")),
    "mxfp8_gemm": Call("mxfp8_gemm", PRODUCT, mxfp8_gemm(activation="relu")),
    "mxfp8_gemm_rebased": Call("mxfp8_gemm", PRODUCT, mxfp8_gemm(path="rebased")),
    "mxfp8_gemm_groups": Call("mxfp8_gemm", GROUPS, mxfp8_gemm(True)),
    "nvfp4_quantize": Call("nvfp4_quantize", {"M": 3, "K": 48}, nvfp4_quantize()),
    "nvfp4_quantize_batch": Call(
        "nvfp4_quantize", {"B": 2, "M": 3, "K": 48}, nvfp4_quantize("B", block="16x16")
    ),
    "nvfp4_quantize_given": Call(
        "nvfp4_quantize",
        {"B": 2, "M": 3, "K": 48},
        nvfp4_quantize("B", given=True, swizzle=False),
    ),
    "nvfp4_dequantize": Call("nvfp4_dequantize", {"M": 3, "K": 48}, nvfp4_data()),
    "nvfp4_dequantize_batch": Call("nvfp4_dequantize", {"B": 2, "M": 3, "K": 48}, nvfp4_data("B")),
    "nvfp4_prepare": Call("nvfp4_prepare", {"M": 3, "K": 48}, nvfp4_data(weight=True)),
    "nvfp4_prepare_batch": Call(
        "nvfp4_prepare", {"B": 2, "M": 3, "K": 48}, nvfp4_data("B", weight=True)
    ),
    "nvfp4_gemm": Call("nvfp4_gemm", PRODUCT, nvfp4_gemm(activation="relu")),
    "nvfp4_gemm_batch": Call("nvfp4_gemm", {"B": 2, **PRODUCT}, nvfp4_gemm("B")),
    "nvfp4_gemm_batches": Call(
        "nvfp4_gemm", {**TWO, **PRODUCT}, nvfp4_gemm("B", "C", out_dtype=FP32)
    ),
    "nvfp4_gemm_codes": Call("nvfp4_gemm", PRODUCT, nvfp4_gemm(coded=True)),
    "nvfp4_gemm_groups": Call("nvfp4_gemm", GROUPS, nvfp4_gemm(groups=True)),
    "based": Call("based", {**TOKENS, "V": 16}, based(False, normalize=True), COLUMNS),
    "based_state": Call(
        "based", {**TOKENS, "V": 16}, based(True, return_state=True, normalize=True), COLUMNS
    ),
    "based_linear_prefill": Call(
        "based", {**TOKENS, "V": 16}, based(False), COLUMNS, "based_linear_prefill"
    ),
    "based_decode": Call("based_decode", {"B": 2, "H": 2, "V": 16}, based_decode, COLUMNS),
    "gated_delta_rule": Call("gated_delta_rule", DELTA, gated_delta_rule(), KEYS_AND_COLUMNS),
    "gated_delta_rule_state": Call(
        "gated_delta_rule",
        DELTA,
        gated_delta_rule(state=True, return_state=True),
        KEYS_AND_COLUMNS,
    ),
    "gated_delta_rule_packed": Call(
        "gated_delta_rule",
        DELTA,
        gated_delta_rule(state=True, packed=True, return_state=True),
        {**KEYS_AND_COLUMNS, "B": "cu_seqlens has shape"},
    ),
    "gated_delta_rule_decode": Call(
        "gated_delta_rule_decode",
        {"B": 2, "H": 2, "D": 16, "V": 16},
        gated_delta_rule_decode,
        KEYS_AND_COLUMNS,
    ),
    "lolcats": Call("lolcats", LOLCATS, lolcats(False), POSITIVE),
    "lolcats_state": Call("lolcats", LOLCATS, lolcats(True, return_state=True), POSITIVE),
    "hedgehog": Call("lolcats", LOLCATS, lolcats(False, True), POSITIVE, "hedgehog"),
    "lolcats_decode": Call("lolcats_decode", LOLCATS_DECODE, lolcats_decode, POSITIVE),
}
