"""Recurrent layers of transformers with random weights, this package's beside them, and their
formulas, token by token."""

from __future__ import annotations

import importlib
from typing import Any

import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn

from thunderkittens import nn as layers

WIDTH = 48
# Two heads of keys for four of values, and other sizes of keys than of values.
LINEAR = {
    "hidden_size": WIDTH,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 24,
    "linear_conv_kernel_dim": 4,
    "num_hidden_layers": 2,
    "layer_types": ["linear_attention", "full_attention"],
}
DELTA = {"heads": 2, "value_heads": 4, "key_dim": 16, "value_dim": 24}
MAMBA = {
    "hidden_size": WIDTH,
    "mamba_n_heads": 6,
    "mamba_d_head": 16,
    "mamba_d_state": 24,
    "mamba_n_groups": 1,  # as published; versions of transformers differ in a norm over more
    "mamba_d_conv": 4,
    "mamba_expand": 2,
    "mamba_chunk_size": 64,
}
MIXER: dict[str, Any] = {"heads": 6, "head_dim": 16, "state_size": 24}
LIMITS = (0.02, 0.3)

# Of each model: its module, the layer's class, the configuration's arguments, and the layer here.
MODELS: dict[str, tuple[str, str, dict[str, Any], type[nn.Module], dict[str, Any]]] = {
    "Mamba2": (
        "mamba2",
        "Mamba2Mixer",
        {
            "hidden_size": WIDTH,
            "num_heads": 6,
            "head_dim": 16,
            "state_size": 24,
            "n_groups": 1,
            "chunk_size": 64,
            "num_hidden_layers": 1,
            "use_conv_bias": False,
            "time_step_limit": LIMITS,
        },
        layers.Mamba2Mixer,
        {**MIXER, "conv_bias": False, "dt_limit": LIMITS},
    ),
    "Bamba": (
        "bamba",
        "BambaMixer",
        {**MAMBA, "mamba_proj_bias": True, "rms_norm_eps": 1e-4},
        layers.Mamba2Mixer,
        {**MIXER, "bias": True, "eps": 1e-4},
    ),
    "GraniteMoeHybrid": (
        "granitemoehybrid",
        "GraniteMoeHybridMambaLayer",
        {**MAMBA, "num_hidden_layers": 1, "layer_types": ["mamba"], "rms_norm_eps": 1e-5},
        layers.Mamba2Mixer,
        MIXER,
    ),
    "NemotronH": (
        "nemotron_h",
        "NemotronHMamba2Mixer",
        {
            "hidden_size": WIDTH,
            "mamba_num_heads": 6,
            "mamba_head_dim": 16,
            "ssm_state_size": 24,
            "n_groups": 3,
            "conv_kernel": 4,
            "chunk_size": 64,
            "time_step_min": 0.01,
            "layer_norm_epsilon": 1e-5,
        },
        layers.Mamba2Mixer,
        {**MIXER, "groups": 3, "dt_limit": (0.01, float("inf"))},
    ),
    "Zamba2": (
        "zamba2",
        "Zamba2MambaMixer",
        {
            "hidden_size": WIDTH,
            "n_mamba_heads": 6,
            "mamba_d_state": 24,
            "mamba_ngroups": 2,
            "chunk_size": 64,
            "time_step_min": 0.01,
            "num_hidden_layers": 1,
            "num_attention_heads": 4,
            "layers_block_type": ["linear_attention"],
        },
        layers.Mamba2Mixer,
        {**MIXER, "groups": 2, "dt_limit": (0.01, float("inf"))},
    ),
    "Qwen3Next": (
        "qwen3_next",
        "Qwen3NextGatedDeltaNet",
        LINEAR,
        layers.GatedDeltaNet,
        {**DELTA, "published": "qwen3_next"},
    ),
    "Qwen3_5Text": (
        "qwen3_5",
        "Qwen3_5GatedDeltaNet",
        LINEAR,
        layers.GatedDeltaNet,
        {**DELTA, "published": "qwen3_5"},
    ),
    "OlmoHybrid": (
        "olmo_hybrid",
        "OlmoHybridGatedDeltaNet",
        {**LINEAR, "linear_allow_neg_eigval": True},
        layers.GatedDeltaNet,
        {**DELTA, "published": "olmo_hybrid", "allow_neg_eigval": True},
    ),
}
# Layers that transformers does not have.
OWN: dict[str, tuple[type[nn.Module], dict[str, Any]]] = {
    "fla": (layers.GatedDeltaNet, {**DELTA, "published": "fla", "conv_bias": True}),
    "fla, no gate": (layers.GatedDeltaNet, {**DELTA, "published": "fla", "gate": False}),
    "no norm": (layers.Mamba2Mixer, {**MIXER, "norm": False, "conv_width": 2}),
    "norm before gate": (layers.Mamba2Mixer, {**MIXER, "groups": 2, "norm_before_gate": True}),
}
EVERY = [*MODELS, *OWN]


def ours(name: str, device: str = "cpu", dtype: torch.dtype = torch.float64) -> Any:
    """A layer of this package, with weights that make every part of it count."""
    kind, options = OWN[name] if name in OWN else MODELS[name][3:]
    layer = kind(WIDTH, **options).to(device)
    randomize(layer)
    return layer.to(dtype)


def theirs(name: str) -> tuple[Any, Any]:
    """The layer of transformers, in float32, and its configuration."""
    module, kind, arguments, *_ = MODELS[name]
    config = getattr(transformers, f"{name}Config")(**arguments)
    source = importlib.import_module(f"transformers.models.{module}.modeling_{module}")
    layer = getattr(source, kind)(config, 0)
    randomize(layer)
    return layer, config


def cache_of(config: Any) -> Any:
    """The cache of transformers for a model of a configuration."""
    return transformers.DynamicCache(config=config)


@torch.no_grad()
def randomize(layer: nn.Module) -> None:
    for name, x in layer.named_parameters():
        if name == "A_log":
            x.uniform_(-2, 2)
        elif name in ("dt_bias", "D") or name.endswith("norm.weight"):
            x.copy_(torch.randn_like(x) / 2 + (-2 if name == "dt_bias" else 1))
        elif x.dim() == 2:
            x.normal_(std=x.shape[1] ** -0.5)
        else:
            x.normal_(std=0.5)


# Formulas, of the parameters of a layer of this package, in their dtype.


def formula(layer: Any, x: Tensor) -> Tensor:
    """A layer's output for x (B, T, width), a token at a time, without a cache."""
    return (mamba2 if isinstance(layer, layers.Mamba2Mixer) else delta_net)(layer, x)


def convolved(x: Tensor, conv: Any, rows: slice = slice(None)) -> Tensor:
    weight = conv.weight[rows]
    bias = None if conv.bias is None else conv.bias[rows]
    padded = F.pad(x.transpose(1, 2), (weight.shape[2] - 1, 0))
    return F.silu(F.conv1d(padded, weight, bias, groups=weight.shape[0])).transpose(1, 2)


def normed(x: Tensor, norm: Any, size: int) -> Tensor:
    rows = x.unflatten(-1, (-1, size))
    rows = rows / (rows.square().mean(-1, keepdim=True) + norm.eps).sqrt()
    return rows.flatten(-2) * norm.weight


def mamba2(layer: Any, x: Tensor) -> Tensor:
    heads, dim, groups, keys = layer.heads, layer.head_dim, layer.groups, layer.state_size
    inner = heads * dim
    z, inputs, dt = layer.in_proj(x).tensor_split((inner, 2 * inner + 2 * groups * keys), -1)
    inputs = convolved(inputs, layer.conv1d)
    values, B, C = inputs.tensor_split((inner, inner + groups * keys), -1)
    values = values.unflatten(-1, (heads, dim))
    B, C = (y.unflatten(-1, (groups, keys)).repeat_interleave(heads // groups, 2) for y in (B, C))
    steps = F.softplus(dt + layer.dt_bias).clamp(*layer.dt_limit)
    state = x.new_zeros(x.shape[0], heads, dim, keys)
    outs = []
    for t in range(x.shape[1]):
        d = steps[:, t, :, None]
        decay = torch.exp(-layer.A_log.exp()[:, None] * d)[..., None]
        state = decay * state + (d * values[:, t])[..., None] * B[:, t, :, None]
        outs.append((state * C[:, t, :, None]).sum(-1) + layer.D[:, None] * values[:, t])
    out, gate = torch.stack(outs, 1).flatten(2), F.silu(z)
    if layer.norm is None:
        out = out * gate
    elif layer.norm.gate_first:
        out = normed(out * gate, layer.norm, inner // groups)
    else:
        out = normed(out, layer.norm, inner // groups) * gate
    return layer.out_proj(out)


def delta_net(layer: Any, x: Tensor) -> Tensor:
    heads, value_heads, keys, columns = 2, 4, layer.key_dim, layer.value_dim
    size = heads * keys
    if layer.published == "qwen3_next":
        parts = layer.in_proj_qkvz(x).view(*x.shape[:2], heads, -1)
        cuts = (keys, 2 * keys, 2 * keys + 2 * columns)
        q, k, v, z = (y.reshape(*x.shape[:2], -1) for y in parts.tensor_split(cuts, -1))
        b, a = layer.in_proj_ba(x).view(*x.shape[:2], heads, -1).chunk(2, -1)
        b, a = b.reshape(*x.shape[:2], -1), a.reshape(*x.shape[:2], -1)
    elif layer.published == "qwen3_5":
        q, k, v = layer.in_proj_qkv(x).tensor_split((size, 2 * size), -1)
        z, b, a = layer.in_proj_z(x), layer.in_proj_b(x), layer.in_proj_a(x)
    else:
        q, k, v = layer.q_proj(x), layer.k_proj(x), layer.v_proj(x)
        z, b, a = layer.g_proj and layer.g_proj(x), layer.b_proj(x), layer.a_proj(x)
    if layer.published == "fla":
        q, k, v = (
            convolved(y, conv)
            for y, conv in ((q, layer.q_conv1d), (k, layer.k_conv1d), (v, layer.v_conv1d))
        )
    else:
        rows = slice(0, size), slice(size, 2 * size), slice(2 * size, None)
        q, k, v = (convolved(y, layer.conv1d, r) for y, r in zip((q, k, v), rows, strict=True))
    q, k = (y.unflatten(-1, (heads, keys)).repeat_interleave(2, 2) for y in (q, k))
    q, k = (y / (y.square().sum(-1, keepdim=True) + 1e-6).sqrt() for y in (q, k))
    v = v.unflatten(-1, (value_heads, columns))
    decay = torch.exp(-layer.A_log.exp() * F.softplus(a + layer.dt_bias))
    beta = b.sigmoid() * (2 if layer.allow_neg_eigval else 1)
    state = x.new_zeros(x.shape[0], value_heads, keys, columns)
    outs = []
    for t in range(x.shape[1]):
        state = decay[:, t, :, None, None] * state
        seen = (state * k[:, t, :, :, None]).sum(2)
        new = beta[:, t, :, None] * (v[:, t] - seen)
        state = state + k[:, t, :, :, None] * new.unsqueeze(2)
        outs.append((state * q[:, t, :, :, None]).sum(2) * keys**-0.5)
    qwen = layer.published.startswith("qwen")
    norm, last = (layer.norm, layer.out_proj) if qwen else (layer.o_norm, layer.o_proj)
    out = normed(torch.stack(outs, 1), norm, columns).flatten(2)
    return last(out if z is None else out * F.silu(z))
