"""`attn_implementation="thunderkittens"`: small models of transformers, made here, saved, and
loaded as users load them, against their own `eager` attention.

On a CPU the formulas of the ops take their place, in float32, so that results agree to rounding and
greedy generation token by token; which of them ran is counted. On a GPU, and once on the emulator,
it is the ops themselves, in bfloat16.
"""

from __future__ import annotations

import inspect
from collections import Counter
from functools import partial

import pytest
import torch

import thunderkittens as tk
from thunderkittens import emulation, reference
from thunderkittens.integrations import _padding

transformers = pytest.importorskip("transformers")

import thunderkittens.integrations.transformers as integration  # noqa: E402
from helpers import hf_models  # noqa: E402
from helpers.hf_models import (  # noqa: E402
    BF16,
    FP32,
    LENGTH,
    MODELS,
    SIZES,
    WINDOW,
    assert_as_good,
    batch,
    load,
    named_cache,
    results,
)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """The folder of a model, by its name."""
    return partial(hf_models.save, tmp_path_factory.mktemp("models"))


@pytest.fixture
def calls(device, monkeypatch):
    """How often each function was called; on a CPU the formulas are called in place of the ops."""
    integration.register()
    counts = Counter()

    def count(owner, name, function):
        def counted(*args, **options):
            counts[name] += 1
            return function(*args, **options)

        monkeypatch.setattr(owner, name, counted)

    of_ops = integration if device == "cuda" else reference
    count(integration, "attention", of_ops.attention)
    count(integration, "attention_varlen", of_ops.attention_varlen)
    decode = integration.attention_decode if device == "cuda" else reference_decode
    count(integration, "attention_decode", decode)
    count(
        torch.nn.functional,
        "scaled_dot_product_attention",
        integration.F.scaled_dot_product_attention,
    )
    count(integration, "_formula", integration._formula)
    if device == "cpu":
        monkeypatch.setattr(integration, "_takes", lambda *operands: True)
        monkeypatch.setattr(integration, "_serves", lambda *kind: True)
    return counts


def reference_decode(q, k_cache, v_cache, lengths, **options):
    return reference.attention_paged(q, k_cache, v_cache, None, lengths, **options)


@pytest.mark.parametrize(
    ("name", "padding"),
    [*((name, "both") for name in MODELS), ("Mistral", None), ("Gemma2", None), ("GptOss", None)],
)
def test_logits_and_gradients(device, name, padding, saved, calls):
    tokens, mask = batch(padding or "left", device)
    keep = mask.bool() if padding else torch.ones_like(mask, dtype=torch.bool)
    mask = mask if padding else None
    path = saved(name)
    actual = results(load(path, device), tokens, mask, keep)
    assert calls == {"attention_varlen" if padding else "attention": 2}
    eager = results(load(path, device, "eager"), tokens, mask, keep)
    exact = results(load(path, device, "eager", FP32), tokens, mask, keep)
    assert_as_good(actual, eager, exact)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["Llama", "Gemma2"])
def test_no_synchronisation(device, name, saved, calls):
    """A padded batch is not unpadded, and its mask not read by the host. Without the release's
    cache, which copies from the host when it is made."""
    tokens, mask = batch("both", device)
    model = partial(load(saved(name), device), attention_mask=mask, use_cache=False)
    model(tokens).logits.float().sum().backward()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        model(tokens).logits.float().sum().backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert calls == {"attention_varlen": 4}


@pytest.mark.parametrize(
    ("name", "cache"),
    [*((name, "dynamic") for name in MODELS), ("Llama", "static"), ("Gemma2", "static")],
)
def test_generation(device, name, cache, saved, calls):
    """Greedy, from prompts padded on the left, past the window."""
    tokens, mask = batch("left", device)
    options = {"max_new_tokens": 4, "do_sample": False, "cache_implementation": cache}
    options |= {"output_logits": True, "return_dict_in_generate": True, "disable_compile": True}
    path = saved(name)
    ours = load(path, device).generate(tokens, attention_mask=mask, **options)
    # Steps read keys and values where the cache has them, and so does a short prompt where a static
    # cache has more room than that.
    prompts = {"dynamic": 0, "static": {"Llama": 2, "Gemma2": 1}.get(name)}[cache]
    assert calls == Counter(attention_varlen=2 - prompts, attention_decode=6 + prompts)
    if device == "cpu":
        eager = load(path, device, "eager").generate(tokens, attention_mask=mask, **options)
        assert torch.equal(ours.sequences, eager.sequences)
        return
    # In bfloat16, logits that are close may change places: each step is judged by the exact ones.
    full = torch.cat([mask, mask.new_ones(len(mask), 4)], 1)
    steps = torch.stack(ours.logits, 1).float()
    eager, exact = (
        load(path, device, "eager", dtype)(ours.sequences, attention_mask=full)
        .logits[:, LENGTH - 1 : -1]
        .float()
        for dtype in (BF16, FP32)
    )
    assert_as_good([steps], [eager], [exact])


def test_what_goes_to_pytorch(device, saved, calls, monkeypatch):
    """Dropout, dtypes and masks of the full size; windows, softcap and sinks hold there too."""
    monkeypatch.setattr(integration, "_takes", lambda *operands: False)
    tokens, mask = batch("both", device)
    keep = mask.bool()
    for name in ("Mistral", "Gemma2", "GptOss"):
        for given in (mask, None):
            path = saved(name)
            actual = results(load(path, device, dtype=FP32), tokens, given, keep)
            exact = results(load(path, device, "eager", FP32), tokens, given, keep)
            assert_as_good(actual, exact, exact)
    assert calls == {"scaled_dot_product_attention": 4, "_formula": 8}


def test_padding_between_tokens(device, saved, calls):
    """It is taken where the host may look, and after `register(padding="any")`."""
    tokens, mask = batch("left", device)
    mask[0, 4:6] = 0
    keep = mask.bool()
    path = saved("Llama")
    exact = results(load(path, device, "eager", FP32), tokens, mask, keep)
    if device == "cpu":
        assert_as_good(results(load(path, device), tokens, mask, keep), exact, exact)
        assert calls == {"scaled_dot_product_attention": 2}
    integration.register("thunderkittens_any", padding="any")
    model = load(path, device, "thunderkittens_any", FP32)
    assert_as_good(results(model, tokens, mask, keep), exact, exact)
    with pytest.raises(ValueError, match="padding is 'some'"):
        integration.register(padding="some")


def test_several_tokens_behind_a_cache(device, saved, calls):
    """Chunks of a prompt: their queries see all keys up to their own."""
    tokens, mask = batch("left", device)
    for given in (None, mask):
        logits = []
        for implementation in ("thunderkittens", "eager"):
            model = load(saved("Gemma3Text"), device, implementation, FP32)
            cache, parts = transformers.DynamicCache(config=model.config), []
            with torch.no_grad():
                for begin, end in ((0, 7), (7, 10), (10, 12)):
                    seen = None if given is None else given[:, :end]
                    named = named_cache(model.forward, cache)
                    out = model(tokens[:, begin:end], attention_mask=seen, **named)
                    parts.append(out.logits)
            logits.append(torch.cat(parts, 1)[mask.bool() if given is not None else ...])
        torch.testing.assert_close(*logits, atol=2e-4, rtol=2e-4)


def test_encoder(device, calls):
    """Bidirectional attention: all queries see the tokens of their row."""
    torch.manual_seed(0)
    sizes = {k: v for k, v in SIZES.items() if k != "num_key_value_heads"}
    model = transformers.BertModel(transformers.BertConfig(**sizes)).to(device).eval()
    tokens, mask = batch("both", device)
    for given in (None, mask):
        hidden = []
        for implementation in ("eager", "thunderkittens"):
            model.set_attn_implementation(implementation)
            hidden.append(model(tokens, attention_mask=given).last_hidden_state)
        keep = mask.bool() if given is not None else ...
        torch.testing.assert_close(*(x[keep] for x in hidden), atol=1e-4, rtol=1e-4)
    expected = {"attention": 2, "attention_varlen": 2}
    assert calls == (expected if device == "cpu" else {"scaled_dot_product_attention": 4})


def test_compiled(device, saved, calls, monkeypatch):
    """The mask of a model with a window, and the attention of a layer: one graph, for which no
    value of the mask is read."""
    model = load(saved("Mistral"), device)
    mask = batch("both", device)[1]
    q = torch.randn(3, 4, LENGTH, 16, device=device, dtype=BF16)
    k, v = torch.randn(2, 3, 2, LENGTH, 16, device=device, dtype=BF16)
    # The formula reads the lengths, the op does not.
    monkeypatch.setattr(integration, "attention_varlen", tk.attention_varlen)
    create = transformers.masking_utils.create_sliding_window_causal_mask
    no_cache = named_cache(create, None)
    if "cache_position" in inspect.signature(create).parameters:
        no_cache["cache_position"] = torch.arange(LENGTH, device=device)

    def layer(q, k, v, mask):
        given = {"config": model.config, "inputs_embeds": q[:, 0], "attention_mask": mask}
        edges = create(**given, **no_cache)
        return integration.attention_forward(model, q, k, v, edges, sliding_window=WINDOW)[0]

    expected = layer(q, k, v, mask)
    compiled = torch.compile(layer, fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(q, k, v, mask), expected)


@pytest.mark.skipif(emulation.problem is not None, reason="no emulator")
def test_on_the_emulator(saved):
    """The kernels themselves, of a padded batch with windows and a softcap."""
    integration.register()
    tokens, mask = batch("both", "cpu")
    keep = mask.bool()
    path = saved("Gemma2")
    with tk.emulate():
        actual = results(load(path, "cpu", dtype=BF16), tokens, mask, keep)
    eager, exact = (
        results(load(path, "cpu", "eager", d), tokens, mask, keep) for d in (BF16, FP32)
    )
    assert_as_good(actual, eager, exact)


def test_edges_are_those_of_the_mask():
    """Sequences of queries and keys, and back to a mask, for random padding."""
    generator = torch.Generator().manual_seed(0)
    for _ in range(50):
        queries, keys = (int(x) for x in torch.randint(1, 9, (2,), generator=generator))
        keys += queries
        begin = torch.randint(0, keys, (3,), generator=generator)
        end = begin + (torch.rand(3, generator=generator) * (keys - begin + 1)).long()
        place = torch.arange(keys)
        real = (place >= begin[:, None]) & (place < end[:, None])
        found = _padding.token_range(real, 3, keys, keys, "cpu")
        assert not found[2].any()
        assert torch.equal(found[1] - found[0], real.sum(1))
        edges = _padding.packed_edges(*found[:2], keys - queries, queries, keys)
        lengths = edges.diff()
        assert lengths.shape == (2, 12)
        assert edges[0, -1] == 3 * queries
        for some, most in zip(lengths, (queries, keys), strict=True):
            assert some.min() >= 0
            assert some.max() <= most
        mask = _padding.dense_mask(edges, 3, queries, keys, True, (2, -1), torch.device("cpu"))
        diagonal = torch.arange(queries)[:, None] + keys - queries
        expected = real[:, None] & real[:, keys - queries :, None]
        expected &= (place <= diagonal) & (place >= diagonal - 2)
        expected |= ~expected.any(-1, keepdim=True)
        assert torch.equal(mask[:, 0], expected)


def test_unknown_masks():
    """A mask function that is not known gives a mask of the full size."""
    masks = pytest.importorskip("transformers.masking_utils")
    window = masks.sliding_window_causal_mask_function(3)
    chunks = masks.chunked_causal_mask_function(3, torch.zeros(1, dtype=torch.int))
    other = masks.and_masks(window, masks.causal_mask_function)
    assert integration._is_window(masks, window, 3, {})
    assert not any(integration._is_window(masks, f, 3, {}) for f in (chunks, other, torch.where))
    assert not integration._is_window(masks, window, 4, {})
    sizes = {"batch_size": 1, "q_length": 5, "kv_length": 5, "local_size": 3}
    assert integration.attention_mask(**sizes, mask_function=window) is None
    mask = integration.attention_mask(**sizes, mask_function=chunks)
    assert mask.shape == (1, 1, 5, 5)
