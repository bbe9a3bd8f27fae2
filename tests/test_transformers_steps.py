"""Steps of generation by `attn_implementation="thunderkittens"`: that they run the kernel for few
queries over caches in place, with one schedule for all layers of a window, eager and compiled.

On a CPU a formula takes the place of `tk.attention_decode`, in float32, so that generation agrees
with `eager` token by token, and the compiler traces it. The models are those of
test_transformers.py, where they generate without a compiler.
"""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace

import pytest
import torch

import thunderkittens as tk
from thunderkittens.integrations import _steps

transformers = pytest.importorskip("transformers")

from transformers import masking_utils as masking  # noqa: E402
from transformers.masking_utils import create_masks_for_generate  # noqa: E402

import thunderkittens.integrations.transformers as integration  # noqa: E402
from helpers import hf_models  # noqa: E402
from helpers.hf_models import (  # noqa: E402
    BF16,
    FP32,
    LENGTH,
    SIZES,
    assert_as_good,
    batch,
    load,
    named_cache,
)
from helpers.numerics import assert_accurate  # noqa: E402

STEPS = 4


CALLS = []  # windows of calls of the kernel, or of what is traced in its place


@torch.compiler.assume_constant_result
def called(window):
    CALLS.append(window)
    return 0


@pytest.fixture(autouse=True)
def nothing_is_compiled():
    """What other tests have compiled of a model's forward counts against the compiler's limit."""
    torch._dynamo.reset()


@pytest.fixture
def kinds(monkeypatch):
    """A formula in the kernels' place; the windows of its calls."""
    integration.register()
    CALLS.clear()
    monkeypatch.setattr(integration, "attention_decode", decode_formula)
    monkeypatch.setattr(integration, "attention_varlen", tk.reference.attention_varlen)
    monkeypatch.setattr(integration, "attention", tk.reference.attention)
    monkeypatch.setattr(integration, "_takes", lambda *operands: True)
    monkeypatch.setattr(integration, "_serves", lambda *kind: True)
    return CALLS


def decode_formula(
    q,
    k_cache,
    v_cache,
    lengths,
    *,
    cache_leftpad,
    schedule,
    causal,
    window_size,
    softcap,
    scale,
    sink,
):
    called(window_size[0])
    assert schedule is not None
    i, j = torch.arange(q.shape[1])[:, None], torch.arange(k_cache.shape[1])
    diagonal = i + (lengths - q.shape[1])[:, None, None]
    seen = (j >= cache_leftpad[:, None, None]) & (j < lengths[:, None, None])
    if causal:
        seen = seen & (j <= diagonal)
    if window_size[0] >= 0:
        seen = seen & (j >= diagonal - window_size[0])
    seen = (seen | ~seen.any(-1, keepdim=True))[:, None]
    heads_first = (x.transpose(1, 2) for x in (q, k_cache, v_cache))
    out = integration._formula(*heads_first, seen, 0.0, scale, softcap, sink, None)
    return out.transpose(1, 2)


def greedy(model, tokens, mask, step, inside=False, between=list):
    """So many tokens behind prompts, with a static cache. Masks are made as `generate` makes them,
    before the step, or inside of it."""
    cache = transformers.StaticCache(config=model.config, max_cache_len=LENGTH + STEPS)
    position = (mask.cumsum(1) - 1).clamp(min=0)
    forward, made = model.forward, []
    to_model, to_masks = (named_cache(f, cache) for f in (forward, create_masks_for_generate))
    with torch.no_grad():
        for _ in range(STEPS):
            given = mask
            if forward is model.forward or not inside:
                given = create_masks_for_generate(
                    config=model.config,
                    inputs_embeds=torch.empty(*tokens.shape, 0, dtype=model.dtype),
                    attention_mask=mask,
                    position_ids=position,
                    **to_masks,
                )
            out = forward(tokens, attention_mask=given, position_ids=position, **to_model)
            tokens = out.logits[:, -1:].argmax(-1)
            made.append(tokens)
            mask = torch.cat([mask, torch.ones_like(tokens)], 1)
            position = position[:, -1:] + 1
            if forward is model.forward:
                between()
            forward = step
    return torch.cat(made, 1)


more = pytest.mark.intensity(2)


@pytest.mark.parametrize(
    ("name", "inside"),
    [
        ("Gemma2", True),
        ("Gemma2", False),
        pytest.param("Llama", True, marks=more),
        *(pytest.param(name, False, marks=more) for name in ("Llama", "Mistral", "GptOss")),
    ],
)
def test_compiled_steps(name, inside, tmp_path, kinds):
    """A whole step is one graph, whose layers share schedules; tokens are those of `eager`."""
    tokens, mask = batch("left", "cpu")
    path = hf_models.save(tmp_path, name)
    model = load(path, "cpu")
    step = torch.compile(model.forward, fullgraph=True, backend="eager")
    made = greedy(model, tokens, mask, step, inside, kinds.clear)
    eager = load(path, "cpu", "eager")
    options = {"max_new_tokens": STEPS, "do_sample": False, "disable_compile": True}
    expected = eager.generate(tokens, attention_mask=mask, **options)
    assert torch.equal(made, expected[:, LENGTH:])
    windows = {-1, hf_models.WINDOW - 1} if name in ("Gemma2", "GptOss") else {kinds[0]}
    assert set(kinds) == windows
    assert len(kinds) >= model.config.num_hidden_layers


@pytest.mark.parametrize("inside", [True, False])
def test_compiled_steps_of_the_formula(inside, tmp_path):
    """In float32, a softcap and windows are left to it: it is traced without a guard on the values
    of a tensor."""
    integration.register()
    tokens, mask = batch("left", "cpu")
    path = hf_models.save(tmp_path, "Gemma2")
    model, eager = (load(path, "cpu", name) for name in ("thunderkittens", "eager"))
    step = torch.compile(model.forward, fullgraph=True, backend="eager")
    made = greedy(model, tokens, mask, step, inside)
    assert torch.equal(made, greedy(eager, tokens, mask, eager.forward))


def test_windows_in_a_graph(kinds):
    """A window to which something is added is another mask, also where it is compiled."""
    config = SimpleNamespace(num_attention_heads=4, num_key_value_heads=2, head_dim=32)
    step = {"batch_size": 1, "q_length": 1, "kv_length": 9, "local_size": 3, "dtype": BF16}

    @torch.compile(fullgraph=True, backend="eager")
    def made(blocks, offset):
        function = masking.sliding_window_causal_mask_function(3)
        if blocks is not None:
            function = masking.or_masks(function, masking.blockwise_overlay(blocks))
        options = {"mask_function": function, "q_offset": offset, "config": config}
        return integration.attention_mask(**step, **options)

    offset = torch.tensor(6)
    assert made(None, offset).dtype is torch.int32
    mask = made(torch.tensor([[0, 0, 0, 1, 1, 0, 0, 2, 2]]), offset)
    assert mask.tolist() == [[[[True, True, True, False, True, True, True, False, False]]]]


def test_layers_share_a_schedule(tmp_path, kinds):
    """Those of a window one, the others another one: two for the four layers of a step."""
    path = hf_models.save(tmp_path, "Gemma2")
    model = load(path, "cpu")
    tokens, mask = batch("left", "cpu")
    greedy(model, tokens, mask, model.forward)
    windows = Counter(kinds[-2 * (STEPS - 1) :])
    assert set(windows) == {-1, hf_models.WINDOW - 1}
    config = model.config
    other = SimpleNamespace(**{**SIZES, "num_key_value_heads": 4})
    keys, padding = torch.tensor([9, 7], dtype=torch.int32), torch.zeros(2, dtype=torch.int32)
    packed = _steps.pack(keys, padding, 1, True, -1, config)
    rows, causal = _steps.unpack(packed, 2)
    q, k = torch.zeros(2, 4, 1, 32), torch.zeros(2, 2, 16, 32)
    found = _steps.of_layer(rows, causal, q, k, -1, config)
    assert torch.equal(found.seq_lens, keys)
    assert torch.equal(found.leftpad, padding)
    assert found.schedule.data_ptr() == packed.data_ptr()
    made = tk.attention_schedule(keys, 4, 2, 32, cache_leftpad=padding)
    assert found.schedule.shape == made.shape
    # Another window, other heads, or no configuration: the call makes its own.
    for window, heads, said in (
        (3, q, config),
        (-1, q[:, :2], config),
        (-1, q, other),
        (-1, q, None),
    ):
        assert _steps.of_layer(rows, causal, heads, k, window, said).schedule is None


def test_the_kernel_for_few_queries():
    """It has one tile of 64 rows for each head of keys, and keys before the queries."""
    config = SimpleNamespace(num_attention_heads=8, num_key_value_heads=2, hidden_size=64)
    assert _steps.heads_of(config) == (8, 2, 8)
    assert _steps.is_step(config, 1, 16, 17)
    assert not _steps.is_step(config, 1, 17, 100)
    assert not _steps.is_step(config, 1, 1, 1)
    assert _steps.is_step(None, 3, 1, 2)
    assert not _steps.is_step(None, 3, 2, 9)
    step = {"batch_size": 1, "q_length": 1, "kv_length": 9, "q_offset": 8, "dtype": BF16}
    masks = pytest.importorskip("transformers.masking_utils")
    step |= {"mask_function": masks.causal_mask_function, "config": config}
    assert integration.attention_mask(**step) is None  # no kernel would run on this tensor
    if tk.emulation.problem is None:
        with tk.emulate():
            assert integration.attention_mask(**step).shape[2:] == (1, 1)
            assert integration.attention_mask(**step | {"dtype": FP32}) is None


@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_without_padding(cache, tmp_path, kinds):
    """Caches with windows and without, past the window, of one sequence and of two."""
    path = hf_models.save(tmp_path, "Gemma3Text")
    for rows in (1, 2):
        tokens = batch("left", "cpu")[0][:rows].clamp(min=2)
        made = []
        for implementation in ("thunderkittens", "eager"):
            options = {"max_new_tokens": STEPS, "do_sample": False, "disable_compile": True}
            model = load(path, "cpu", implementation)
            made.append(model.generate(tokens, cache_implementation=cache, **options))
        assert torch.equal(*made)
    assert len(kinds) >= 2 * 2 * (STEPS - 1)


def test_gradients_behind_a_cache(tmp_path, kinds):
    """There is no gradient of the kernel for caches; other ops take such calls."""
    path = hf_models.save(tmp_path, "Llama")
    tokens, mask = batch("left", "cpu")
    gradients = []
    for implementation in ("thunderkittens", "eager"):
        model = load(path, "cpu", implementation)
        cache = named_cache(model.forward, transformers.DynamicCache(config=model.config))
        with torch.no_grad():
            model(tokens[:, :-1], attention_mask=mask[:, :-1], **cache)
        logits = model(tokens[:, -1:], attention_mask=mask, **cache).logits
        logits.log_softmax(-1)[..., 7].sum().backward()
        gradients.append([p.grad for p in model.parameters()])
    assert not kinds
    for ours, theirs in zip(*gradients, strict=True):
        torch.testing.assert_close(ours, theirs, atol=2e-5, rtol=2e-4)


def test_encoder_and_decoder(kinds):
    """A decoder's steps over the keys of padded inputs see all of them but the padding."""
    integration.register()
    torch.manual_seed(0)
    sizes = {"d_model": 64, "vocab_size": hf_models.VOCABULARY, "pad_token_id": 0}
    for part in ("encoder", "decoder"):
        sizes |= {f"{part}_layers": 1, f"{part}_attention_heads": 2, f"{part}_ffn_dim": 64}
    sizes |= {"max_position_embeddings": 64, "init_std": 0.3, "decoder_start_token_id": 1}
    config = transformers.BartConfig(**sizes, bos_token_id=1, eos_token_id=None)
    model = transformers.BartForConditionalGeneration(config).eval()
    tokens, mask = batch("both", "cpu")
    made = []
    for implementation in ("eager", "thunderkittens"):
        model.set_attn_implementation(implementation)
        options = {"max_new_tokens": STEPS, "do_sample": False}
        made.append(model.generate(tokens, attention_mask=mask, **options))
    assert torch.equal(*made)
    assert len(kinds) >= 2 * (STEPS - 1)  # of itself and across, of each step


@pytest.mark.emulator
def test_the_kernel_on_the_emulator(tmp_path):
    """What runs in a step of layers of two heads of 64 columns on one of keys."""
    integration.register()
    torch.manual_seed(0)
    sizes = {**SIZES, "hidden_size": 128, "num_attention_heads": 2, "num_key_value_heads": 1}
    config = transformers.LlamaConfig(**sizes)
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path)
    tokens, mask = batch("left", "cpu")
    logits = []
    for implementation, dtype in (("thunderkittens", BF16), ("eager", BF16), ("eager", FP32)):
        model = load(tmp_path, "cpu", implementation, dtype)
        cache = transformers.StaticCache(config=model.config, max_cache_len=200)
        cache = named_cache(model.forward, cache)
        with torch.no_grad():
            model(tokens[:, :-1], attention_mask=mask[:, :-1], **cache)
            if implementation == "eager":
                out = model(tokens[:, -1:], attention_mask=mask, **cache)
            else:
                with tk.emulate() as run:
                    out = model(tokens[:, -1:], attention_mask=mask, **cache)
                ran = [x["kernel"] for x in run.kernels]
        logits.append([out.logits])
    assert ran == ["decode_bf16_d64"] * 2
    assert_as_good(*logits)


@pytest.mark.emulator
@pytest.mark.parametrize("window", [None, 100])
def test_a_layer_on_the_emulator(window):
    """32 heads on 8 of 128 columns over a static cache, padded on the left: the schedule comes with
    the mask, and keys and values are read where they are."""
    torch.manual_seed(0)
    heads, kv_heads, dim, capacity, used = 32, 8, 128, 320, 260
    sizes = {"num_attention_heads": heads, "num_key_value_heads": kv_heads, "head_dim": dim}
    config = SimpleNamespace(**sizes)
    layer = SimpleNamespace(config=config, is_causal=True)
    masks = pytest.importorskip("transformers.masking_utils")
    padding = torch.tensor([0, 37])
    real = torch.arange(used) >= padding[:, None]
    function = masks.causal_mask_function
    if window is not None:
        function = masks.sliding_window_causal_mask_function(window)
    asked = {"batch_size": 2, "q_length": 1, "kv_length": capacity, "mask_function": function}
    asked |= {"q_offset": torch.tensor(used - 1), "attention_mask": real, "local_size": window}
    q = torch.randn(2, heads, 1, dim).to(BF16)
    k, v = (torch.randn(2, kv_heads, capacity, dim).to(BF16) for _ in range(2))
    for x in (k, v):
        x[:, :, used:] = torch.nan
    with tk.emulate() as run:
        mask = integration.attention_mask(**asked, config=config, dtype=BF16)
        out, _ = integration.attention_forward(layer, q, k, v, mask, sliding_window=window)
    (call,) = run.kernels
    assert call["kernel"] == "decode_bf16_d128"
    lengths = torch.full((2,), used, dtype=torch.int32)
    options = {"cache_leftpad": padding.int(), "window_size": (window - 1 if window else -1, -1)}
    exact, plain = (
        tk.reference.attention_paged(
            *(x.to(dtype).transpose(1, 2) for x in (q, k, v)), None, lengths, **options
        )
        for dtype in (torch.float64, BF16)
    )
    assert_accurate(out, exact, plain)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["Llama", "Gemma2", "GptOss"])
def test_graphs(name, tmp_path):
    """`generate` compiles its steps, which become CUDA graphs, over a static cache."""
    integration.register()
    path = hf_models.save(tmp_path, name)
    tokens, mask = batch("left", "cuda")
    options = {"max_new_tokens": 16, "do_sample": False, "cache_implementation": "static"}
    options |= {"output_logits": True, "return_dict_in_generate": True}
    model = load(path, "cuda")
    ours = model.generate(tokens, attention_mask=mask, **options)
    again = model.generate(tokens, attention_mask=mask, **options)
    assert torch.equal(ours.sequences, again.sequences)
    full = torch.cat([mask, mask.new_ones(len(mask), 16)], 1)
    steps = torch.stack(ours.logits, 1).float()
    eager, exact = (
        load(path, "cuda", "eager", dtype)(ours.sequences, attention_mask=full)
        .logits[:, LENGTH - 1 : -1]
        .float()
        for dtype in (BF16, FP32)
    )
    assert_as_good([steps], [eager], [exact])
    kinds = [torch.profiler.ProfilerActivity.CUDA, torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=kinds) as profile:
        model.generate(tokens, attention_mask=mask, **options)
    assert any("decode_kernel" in event.key for event in profile.key_averages())
