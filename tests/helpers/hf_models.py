"""Small models of transformers with random weights, prompts with padding, and when results are as
good as those of a model's own attention."""

from __future__ import annotations

import inspect

import torch
import transformers

BF16, FP32 = torch.bfloat16, torch.float32
VOCABULARY, LENGTH, WINDOW = 101, 12, 5
SIZES = {
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
    "initializer_range": 0.3,
}
MIXED = {
    "head_dim": 32,
    "sliding_window": WINDOW,
    "layer_types": ["sliding_attention", "full_attention"],
}
# Configurations, and how many layers have a window.
MODELS = {
    "Llama": {},
    "Qwen3": {"head_dim": 16},
    "Mistral": {"head_dim": 16, "sliding_window": WINDOW},
    "Gemma2": MIXED | {"query_pre_attn_scalar": 20, "attn_logit_softcapping": 2.0},
    "Gemma3Text": MIXED | {"query_pre_attn_scalar": 20},
    # All experts, as a rounding error may lead a token to another one.
    "GptOss": MIXED | {"num_local_experts": 2, "num_experts_per_tok": 2},
    "Phi": {"partial_rotary_factor": 0.5},
}
PADDING = {  # tokens before and after those of each of three rows
    "left": ((0, 0), (3, 0), (7, 0)),
    "both": ((2, 1), (0, 7), (7, 0)),
}
MODEL_CLASSES = {"Gemma3Text": "Gemma3ForCausalLM"}


def save(folder, name):
    """The path of a model in a folder, where it is saved at the first call."""
    path = folder / name
    if not path.exists():
        torch.manual_seed(0)
        config = getattr(transformers, f"{name}Config")(**SIZES | MODELS[name])
        kind = MODEL_CLASSES.get(name, f"{name}ForCausalLM")
        getattr(transformers, kind)(config).save_pretrained(path)
    return path


def load(path, device, implementation="thunderkittens", dtype=None):
    dtype = dtype or (BF16 if device == "cuda" else FP32)
    options = {"attn_implementation": implementation, "dtype": dtype}
    return transformers.AutoModelForCausalLM.from_pretrained(path, **options).to(device)


def batch(padding, device):
    """Tokens and their mask."""
    torch.manual_seed(1)
    rows = PADDING[padding]
    tokens = torch.randint(2, VOCABULARY, (len(rows), LENGTH))
    mask = torch.ones_like(tokens)
    for row, (before, after) in zip(mask, rows, strict=True):
        row[:before] = 0
        row[LENGTH - after :] = 0
    return (tokens * mask).to(device), mask.to(device)


def named_cache(function, cache):
    """A cache as the keyword that a model's forward, or a function for masks, has for it. Releases
    of transformers name it differently, and a forward ignores a keyword that it does not know."""
    (name,) = {"cache", "past_key_values"} & set(inspect.signature(function).parameters)
    return {name: cache}


def results(model, tokens, mask, keep):
    """Logits of the tokens that are no padding, and the gradients of a loss of them."""
    logits = model(tokens, attention_mask=mask).logits[keep]
    logits.float().log_softmax(-1)[:, 7].sum().backward()
    return [logits.detach(), *(p.grad for p in model.parameters())]


def assert_as_good(actual, eager, exact):
    """Errors are those of the model's own attention at the same precision, at most twice. Those of
    a few values may be small by chance: each counts as at least the mean of all."""
    norms = torch.stack([z.norm() for z in exact])
    own = torch.stack([(y.float() - z).norm() for y, z in zip(eager, exact, strict=True)])
    mean = (own / norms.clamp(min=1e-6)).square().mean().sqrt()
    for x, z, error, norm in zip(actual, exact, own, norms, strict=True):
        assert x.isfinite().all()
        assert (x.float() - z).norm() <= 2 * max(error, mean * norm) + 1e-4 * norm + 1e-6
