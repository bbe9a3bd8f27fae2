"""The ops behind a sample, called as the dispatcher calls them."""

from __future__ import annotations

import torch

import thunderkittens as tk

from .samples import MUTATING, leaves

E4M3 = torch.float8_e4m3fn
OUTPUTS = ("fp8_tensor", "fp8_row", "fp8_1x128", "nvfp4")
SWIZZLE = tk.reference._block_scaled.swizzle_scales
# Arguments of the op from the options of the public function.
QUANTISERS = {
    "fp8_quantize": lambda options, x, scale=None: (
        x,
        ("tensor", "row", "1x128", "128x128").index(options["granularity"]),
        options.get("dtype", E4M3),
        scale,
        options.get("transposed", False),
    ),
    "fp8_gemm": lambda options, a, b, scale_a, scale_b, bias=None, offs=None: (
        *(a, b, scale_a, scale_b, bias, 0, options.get("out_dtype")),
        *(options.get("accurate", True), offs),
    ),
    "mxfp8_quantize": lambda options, x: (
        x.mT if options.get("axis") == -2 else x,
        options.get("dtype", E4M3),
        options.get("rule") == "floor",
        options.get("swizzle", True),
        options.get("transpose", False),
    ),
    "mxfp8_dequantize": lambda options, data, scale: (data, scale, torch.bfloat16, False),
    "mxfp8_prepare": lambda options, data, scale: (data, scale, False),
    "mxfp8_gemm": lambda options, a, b, scale_a, scale_b, offs=None: (
        (a, b, scale_a, scale_b, None, 0, None, True, False, False)
        if offs is None  # groups: the exact path alone, scales in the 128x4 layout
        else (
            *(a, b, SWIZZLE(scale_a), SWIZZLE(scale_b), None, 0, None),
            *(False, True, True, *(None,) * 6, offs),
        )
    ),
    "nvfp4_quantize": lambda options, x, global_scale=None: (
        *(x, global_scale, "block" in options, global_scale is None),
    ),
    "nvfp4_dequantize": lambda options, *tensors: (*tensors, options["dtype"], False),
    "rms_norm_quantize": lambda options, x, weight, residual=None, scale=None: (
        *(x, weight, residual, one_number(scale), OUTPUTS.index(options["output"])),
        *(options.get("swizzle", True), 1e-6, options.get("weight_offset", 0.0)),
    ),
    "layer_norm_quantize": lambda options, x, weight, bias, residual=None, scale=None: (
        *(x, weight, bias, residual, one_number(scale)),
        *(OUTPUTS.index(options.get("output", "fp8_row")), options.get("swizzle", True), 1e-5),
    ),
}


def one_number(scale):
    return None if scale is None else scale.reshape(())


def recurrent_calls(sample, device):
    """Calls of the ops of SSD and linear attention: all tensors, in the order of the schemas."""
    forward, op, backward = (
        getattr(torch.ops.thunderkittens, sample.op + end) for end in ("_forward", "", "_backward")
    )
    count = len(sample.shapes) - len(sample.keywords)
    names = ("D", "z", "dt_bias") if sample.op == "ssd" else ("decay", "g")

    def arguments(tensors):
        given = dict(zip(sample.keywords, tensors[count:], strict=True))
        return (*tensors[:count], *(given.get(name) for name in names), None, None)

    tensors = sample.tensors(device)
    options = (sample.options.get("dt_softplus", False), 0.0, None)
    if sample.op != "ssd":
        options = (sample.options.get("scale"), sample.options.get("state_v_first", False))
    yield forward, (*arguments(tensors), *options)
    yield op, (*arguments(leaves(sample, device)), *options, True)
    out, state = op(*arguments(tensors), *options, True)
    needs = [True] * (9 if sample.op == "ssd" else 6)
    yield backward, (torch.randn_like(out), state, *arguments(tensors), *options, needs)
    needs[0] = needs[2] = False
    yield backward, (torch.randn_like(out), None, *arguments(tensors), *options, needs)


def direct_calls(sample, device):
    """Calls of the ops behind a sample; tensors require gradients where that is allowed."""
    ops = torch.ops.thunderkittens
    tensors = sample.tensors(device)
    if sample.op == "gemm" and "residual" in sample.keywords:
        a, b, bias, residual = tensors
        options = (None, residual, 4, 1, sample.options["alpha"], sample.options["beta"])
        yield ops.gemm_forward.fused, (a, b, bias, *options)
        a, b, bias, residual = (x.requires_grad_() for x in leaves(sample, device))
        yield ops.gemm.fused, (a, b, bias, None, residual, *options[2:])
        out, z = ops.gemm.fused(*(x.detach() for x in (a, b, bias)), *options)
        if options[3]:
            yield ops.gemm_backward, (torch.randn_like(out), z, *options[2:4])
        return
    if sample.op == "gemm":
        arguments = (*tensors, *(None,) * (3 - len(tensors)), sample.options.get("out_dtype"))
        yield ops.gemm_forward, arguments
        yield (
            ops.gemm,
            (*(x.requires_grad_() for x in leaves(sample, device)), *arguments[len(tensors) :]),
        )
        return
    if sample.op == "grouped_gemm":
        yield ops.grouped_gemm_forward, tensors
        yield ops.grouped_gemm, leaves(sample, device)
        return
    options = sample.options
    if sample.op == "based":
        flags = (options.get("normalize", False), 1e-12, None, None, True)
        yield ops.based_forward, (*tensors, *flags)
        yield ops.based, (*leaves(sample, device), *flags)
        out, numerator, denominator, rows = ops.based(*tensors, *flags)
        head = (torch.randn_like(out), numerator, denominator, *tensors, out, rows, flags[0])
        yield ops.based_backward, (*head, numerator, denominator, [True] * 4)
        yield ops.based_backward, (*head, None, None, [False, True, False, False])
        return
    if sample.op in ("ssd", "linear_attention"):
        yield from recurrent_calls(sample, device)
        return
    if sample.op == "lolcats":
        flags = (*(None,) * 5, "return_state" in options or sample.public == "hedgehog")
        yield ops.lolcats_forward, (*tensors, *flags)
        # There is no gradient through a state.
        yield ops.lolcats, (*leaves(sample, device), *flags[:5], False)
        out, *_, maxima, denominators = ops.lolcats(*tensors, *flags)
        head = (torch.randn_like(out), *tensors, out, maxima, denominators)
        yield ops.lolcats_backward, (*head, *(None,) * 5, [True] * 7)
        yield ops.lolcats_backward, (*head, *(None,) * 5, [False, True, *[False] * 4, True])
        return
    if sample.op == "causal_conv1d_update":
        x, state, weight = tensors
        yield ops.causal_conv1d_update, (x, state, weight, None, 4, None)
        return
    if sample.op == "causal_conv1d":
        count = 2 + ("bias" in sample.keywords)
        state, edges = (*tensors[count:], None, None)[:2]
        options = (*(None,) * (3 - count), 4, state, edges)
        yield ops.causal_conv1d_forward, (*tensors[:count], *options)
        yield ops.causal_conv1d, (*leaves(sample, device)[:count], *options, True)
        out, last = ops.causal_conv1d(*tensors[:count], *options, True)
        for needs, grad_state in (([True] * 4, last), ([False, True, False, False], None)):
            head = (torch.randn_like(out), grad_state, *tensors[:count])
            yield ops.causal_conv1d_backward, (*head, *options, needs)
        return
    if sample.op in ("rms_norm", "layer_norm"):
        yield from norm_calls(sample, device)
        return
    if sample.op == "rotary":
        numbers = (None, None, None, options["interleaved"], False, options["heads"])
        yield ops.rotary_forward.default, (*tensors, *numbers)
        yield ops.rotary.default, (*leaves(sample, device), *numbers)
        yield ops.rotary_forward.in_place, (*tensors, *numbers)
        return
    if sample.op == "gated_delta_rule":
        edges = tensors[5] if sample.keywords else None
        count = 2 if edges is None else 3
        state = torch.randn(count, 2, 64, tensors[2].shape[3], device=device)
        heads = (torch.zeros(2, device=device), torch.ones(2, device=device))
        rest = (*heads, edges, 0.5, True, True, True, False)
        yield ops.gated_delta_rule_forward, (*tensors[:5], state, *rest)
        yield ops.gated_delta_rule, (*leaves(sample, device)[:5], state, *rest, True)
        out, after = ops.gated_delta_rule(*tensors[:5], state, *rest, True)
        head = (torch.randn_like(out), after, *tensors[:5], state)
        yield ops.gated_delta_rule_backward, (*head, *rest, [True] * 8)
        some = [False, True, *[False] * 5, True]
        yield ops.gated_delta_rule_backward, (head[0], None, *head[2:], *rest, some)
        return
    if sample.op == "gated_delta_rule_decode":
        flags = (None, None, None, None, True, True)
        yield ops.gated_delta_rule_decode, (*tensors, *flags)
        return
    if sample.op in MUTATING:
        flags = (bool(options),) if sample.op == "lolcats_decode" else ()
        if sample.op == "based_decode":
            flags = (options["normalize"], 1e-12)
        yield getattr(ops, sample.op), (*tensors, *flags)
        return
    if sample.op in QUANTISERS:
        count = len(tensors) - len(sample.keywords)
        named = dict(zip(sample.keywords, tensors[count:], strict=True))
        yield getattr(ops, sample.op), QUANTISERS[sample.op](options, *tensors[:count], **named)
        return
    window_left, window_right = options.get("window_size", (-1, -1))

    def arguments(tensors):
        count = len(tensors) - len(sample.keywords)
        named = dict(zip(sample.keywords, tensors[count:], strict=True))
        maxima = [options[name] for name in ("max_seqlen_q", "max_seqlen_k") if name in options]
        return (
            *tensors[:count],
            *maxima,
            {False: 0, True: 1, "upper_left": 2}[options.get("causal", False)],
            options.get("scale"),
            window_left,
            window_right,
            options.get("softcap", 0.0),
            named.get("alibi_slopes"),
            named.get("sink"),
        )

    forward, op, backward = (getattr(ops, sample.op + end) for end in ("_forward", "", "_backward"))
    yield forward, arguments(tensors)
    yield op, arguments(leaves(sample, device))
    plain = arguments(tensors)
    out, lse = op(*plain)
    for needs, grad_lse in (([True] * 4, lse), ([False, True, False, False], None)):
        head = (torch.randn_like(out), grad_lse, *plain[:3], out, lse)
        yield backward, (*head, *plain[3:], None, needs)


def norm_calls(sample, device):
    ops, options = torch.ops.thunderkittens, sample.options
    names = ("weight", "residual", "gate", "seed")
    numbers = [options.get("eps", 1e-6)]
    if sample.op == "layer_norm":
        names = ("weight", "bias", "residual", "seed")
    else:
        numbers.append(options.get("weight_offset", 0.0))
    numbers.append(options.get("dropout_p", 0.0))
    if sample.op == "rms_norm":
        numbers += [options.get("gate_first", False), options.get("group_size", 0)]

    def arguments(tensors):
        count = len(tensors) - len(sample.keywords)
        named = dict(zip(names, tensors[1:count], strict=False))
        named |= dict(zip(sample.keywords, tensors[count:], strict=True))
        return tensors[0], *(named.get(name) for name in names)

    plain = arguments(sample.tensors(device))
    yield getattr(ops, sample.op + "_forward").default, (*plain, *numbers)
    yield getattr(ops, sample.op), (*arguments(leaves(sample, device)), *numbers)
    given = dict(zip(names, plain[1:], strict=True))
    if sample.op == "layer_norm":
        yield ops.layer_norm_forward.single, (*plain[:3], numbers[0])
    else:
        alone = (plain[0], given["weight"], given["gate"], *numbers[:2], *numbers[3:])
        yield ops.rms_norm_forward.single, alone
    grad = torch.randn_like(plain[0])
    grad_sum = None if given["residual"] is None else torch.randn_like(given["residual"])
    rest = [given[name] for name in names if name not in ("residual", "bias")]
    for needs in ([True] * 4, [False, True, False, False]):
        yield (
            getattr(ops, sample.op + "_backward"),
            (grad, grad_sum, plain[0], *rest, *numbers, needs),
        )
