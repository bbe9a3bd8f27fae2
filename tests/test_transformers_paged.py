"""Continuous batching of transformers on `attn_implementation="thunderkittens_flash3"`: its own
`generate_batch`, with its own cache, gives the tokens that `generate` gives.

On a CPU, in float32, the formulas of the ops take their place. There transformers makes no block
tables: a test has it make them.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from dataclasses import fields
from types import SimpleNamespace

import pytest
import torch

import thunderkittens as tk
from thunderkittens import reference
from thunderkittens.integrations import _paged

transformers = pytest.importorskip("transformers")
batching = pytest.importorskip("transformers.generation.continuous_batching")

import thunderkittens.integrations.transformers as integration  # noqa: E402
from helpers import hf_models  # noqa: E402
from helpers.hf_models import BF16, FP32, assert_as_good, load  # noqa: E402
from helpers.numerics import assert_accurate  # noqa: E402

NAME = "thunderkittens_flash3"
PROMPTS = [[5, 6, 7], list(range(8, 29)), [30], list(range(31, 47))]
STEPS = 4


@pytest.fixture(autouse=True)
def allowed(monkeypatch):
    """GPT-OSS has a list of implementations with "flash" in their names that it may have."""
    kind = transformers.GptOssPreTrainedModel
    monkeypatch.setattr(kind, "_compatible_flash_implementations", [NAME])


@pytest.fixture(autouse=True)
def memory(monkeypatch):
    """Up to release 5.17, transformers finds none on a CPU."""
    handler = getattr(batching.cache, "PagedAttentionMemoryHandler", None)
    if hasattr(handler, "get_available_memory") and not torch.cuda.is_available():
        monkeypatch.setattr(handler, "get_available_memory", lambda *_: 1 << 30)


@pytest.fixture
def counts(monkeypatch):
    """How often functions were called; formulas take the ops' place."""
    integration.register()
    found = Counter()

    def count(owner, name, function):
        def counted(*args, **options):
            found[name] += 1
            return function(*args, **options)

        monkeypatch.setattr(owner, name, counted)

    count(_paged, "attention_paged", reference.attention_paged)
    count(_paged, "attention_varlen", reference.attention_varlen)
    count(_paged, "attention_schedule", tk.attention_schedule)
    count(integration, "attention_forward", integration.attention_forward)
    return found


def generated(model, **options):
    """The requests' results, in the order of the prompts."""
    generation = transformers.GenerationConfig(
        max_new_tokens=STEPS, do_sample=False, eos_token_id=-1, pad_token_id=0
    )
    names = {field.name for field in fields(transformers.ContinuousBatchingConfig)}
    page_size = "page_size" if "page_size" in names else "block_size"  # up to release 5.17
    options |= {"num_blocks": 16, page_size: 16, "max_batch_tokens": 64}
    # Asynchronous batches of release 5.17 may read their indices before these are copied: beside
    # other processes its own gather then finds some that are out of range.
    options["use_async_batching"] = False
    if model.device.type == "cpu":
        options["use_cuda_graph"] = False
    config = transformers.ContinuousBatchingConfig(**options)
    results = model.generate_batch(
        inputs=PROMPTS,
        generation_config=generation,
        continuous_batching_config=config,
        progress_bar=False,
    )
    assert all(x.error is None for x in results.values())
    by_prompt = {tuple(x.prompt_ids): x for x in results.values()}
    return [by_prompt[tuple(prompt)] for prompt in PROMPTS]


def expected(path, prompt):
    """What `generate` makes of a prompt with the model's own attention."""
    model = load(path, "cpu", "eager")
    options = {"max_new_tokens": STEPS, "do_sample": False}
    return model.generate(torch.tensor([prompt]), **options)[0, len(prompt) :].tolist()


@pytest.mark.parametrize(
    ("name", "taken"), [("Llama", True), ("Llama", False), ("GptOss", True), ("GptOss", False)]
)
def test_gathered_keys(name, taken, tmp_path, counts, monkeypatch):
    """Packed sequences, with windows and sinks, by the op and by PyTorch."""
    monkeypatch.setattr(integration, "_takes", lambda *operands: taken)
    path = hf_models.save(tmp_path, name)
    # Beside a GPU there would be block tables, also for a model on the CPU.
    made = generated(load(path, "cpu", NAME), max_blocks_per_request=0)
    assert [x.generated_tokens for x in made] == [expected(path, prompt) for prompt in PROMPTS]
    used, other = ("attention_varlen", "attention_forward")[:: 1 if taken else -1]
    assert counts[used] > 0
    assert counts[other] == counts["attention_paged"] == 0


def test_block_tables(tmp_path, counts, monkeypatch):
    """A step of one token per sequence appends and attends in place; layers share a schedule."""
    monkeypatch.setattr(integration, "_takes", lambda *operands: True)
    module = pytest.importorskip("transformers.generation.continuous_batching.initialization")
    monkeypatch.setattr(module, "ensure_decode_fast_path_is_available", lambda *args: None)
    path = hf_models.save(tmp_path, "Llama")
    model = load(path, "cpu", NAME)
    made = generated(model, max_blocks_per_request=4, allow_block_sharing=False)
    assert [x.generated_tokens for x in made] == [expected(path, prompt) for prompt in PROMPTS]
    layers = model.config.num_hidden_layers
    assert counts["attention_paged"] == layers * counts["attention_schedule"]
    assert counts["attention_schedule"] == STEPS - 1
    assert counts["attention_varlen"] == layers


class CacheUpTo518:
    """Of layer 3, which is the first of the second group. Pages are of 8 tokens."""

    block_size, layer_index_to_group_indices = 8, {3: (1, 0)}
    key_cache, value_cache = torch.arange(2.0 * 2 * 48 * 2 * 16).reshape(2, 2, 48, 2, 16)

    def update(self, key, value, layer, read_index, write_index):
        assert (layer, read_index, write_index) == (3, "read", "write")
        return tuple(x[0].transpose(0, 1) + 1 for x in (key, value))


class CacheOf518(CacheUpTo518):
    def get_cache_for_block_table(self, layer):
        assert layer == 3
        return 1, *(x[0].reshape(6, 8, 2, 16) for x in (self.key_cache, self.value_cache))


class CacheUpTo523:
    def update(self, key, value, layer, told):
        assert layer == 3
        told["cu_seq_lens_k"], told["max_length_k"] = "edges", 7
        return key + 1, value + 1


@pytest.mark.parametrize("kind", ["full_attention", "sliding_attention"])
def test_caches_of_older_releases(kind):
    """They are updated by the layer, for which what is told to all layers becomes its own."""
    layer = SimpleNamespace(layer_idx=3, sliding_window=5 if kind[0] == "s" else None)
    key, value = torch.randn(2, 1, 2, 4, 16)
    lengths = {"full_attention": (torch.tensor([0, 9]), 9)}
    lengths["sliding_attention"] = torch.tensor([0, 5]), 5
    edges, longest = lengths[kind]
    by_kind = [{name: x[i] for name, x in lengths.items()} for i in range(2)]
    tables = torch.arange(8, dtype=torch.int32).reshape(2, 2, 2)
    for cache in (CacheUpTo518(), CacheOf518()):
        for each in (by_kind, (edges, longest)):
            told = {"cu_seq_lens_k": each[0], "max_seqlen_q": 2, "max_seqlen_k": each[1]}
            told |= {"read_index": "read", "write_index": "write", "block_table": None}
            found = _paged.update(cache, layer, key, value, told)
            assert torch.equal(torch.stack(found), torch.stack([key, value]) + 1)
            assert told["cu_seq_lens_k"] is edges
            assert (told["max_length_q"], told["max_length_k"]) == (2, longest)
            told |= {"cu_seq_lens_k": each[0], "max_seqlen_k": each[1], "block_table": tables}
            assert _paged.update(cache, layer, key, value, told) == (key, value)
            assert torch.equal(told["block_table"], tables[1])
            for name, x in (("k_cache", cache.key_cache), ("v_cache", cache.value_cache)):
                assert told[name].data_ptr() == x.data_ptr()
                assert told[name].shape == (6, 8, 2, 16)
    told = {"cu_seq_lens_k": by_kind[0], "max_length_k": by_kind[1], "max_length_q": 2}
    found = _paged.update(CacheUpTo523(), layer, key, value, told)
    assert torch.equal(torch.stack(found), torch.stack([key, value]) + 1)
    assert told == {"cu_seq_lens_k": "edges", "max_length_k": 7, "max_length_q": 2}


def test_calls_that_are_not_known():
    """They are refused: keys may be elsewhere. Without lengths, calls are those of any model."""
    layer = SimpleNamespace(layer_idx=0, is_causal=True)
    q, k, v = torch.randn(3, 1, 2, 4, 16)
    edges = torch.tensor([0, 3, 4], dtype=torch.int32)
    call, batched = integration.paged_attention_forward, integration._batched_attention_forward
    plain = integration.attention_forward(layer, q, k, v, None)[0]
    assert torch.equal(call(layer, q, k, v, None)[0], plain)
    given = {"cu_seq_lens_q": edges, "cu_seq_lens_k": edges}
    packed = call(layer, q, k, v, None, **given)[0]
    assert torch.equal(packed, batched(layer, q, k, v, None, **given)[0])
    assert torch.equal(packed[:, :3], plain[:, :3])
    assert not torch.equal(packed, plain)
    wrong = [
        ({"cu_seq_lens_k": {"full_attention": edges}}, "cu_seq_lens_k is a dict"),
        ({"cu_seq_lens_q": None}, "cu_seq_lens_q is a NoneType"),
        ({"block_table": edges[None, None]}, "block_table has 3 dimensions, expected 2"),
        ({"block_table": edges[None]}, "expected 2, with k_cache and v_cache"),
    ]
    for change, message in wrong:
        with pytest.raises(TypeError, match=message):
            call(layer, q, k, v, None, **given | change)
    with pytest.raises(ValueError, match="is for continuous batching alone"):
        batched(layer, q, k, v, None)


@pytest.mark.emulator
def test_rows_of_padding():
    """Of a batch that is padded for a CUDA graph: nothing is written, and results are 0."""
    torch.manual_seed(0)
    k_cache, v_cache = torch.randn(2, 6, 16, 1, 64, dtype=BF16)
    table = torch.tensor([[3, 1], [5, -1], [-1, -1]], dtype=torch.int32)
    edges = torch.tensor([0, 20, 21, 21], dtype=torch.int32)
    q, k, v = (torch.randn(1, heads, 3, 64, dtype=BF16) for heads in (2, 1, 1))
    results = []
    for dtype in (BF16, torch.float64, None):
        operands = [x.to(dtype or BF16) for x in (q, k, v)]
        caches = [x.to(dtype or BF16, copy=True) for x in (k_cache, v_cache)]
        with contextlib.ExitStack() as stack:
            if dtype is None:
                stack.enter_context(tk.emulate())
            else:
                patch = stack.enter_context(pytest.MonkeyPatch.context())
                patch.setattr(_paged, "attention_paged", reference.attention_paged)
            layer = SimpleNamespace(layer_idx=0)
            options = {"window_size": (-1, -1)}
            out = _paged.decode(layer, *operands, *caches, table, edges.clone(), options)
        results.append((out, *caches))
    (plain, *written), (exact, *_), (out, *caches) = results
    assert_accurate(out, exact, plain)
    assert not out[0, 2].any()
    places = [16 + 3, 5 * 16]  # 20 keys of the first sequence end in page 1, one is in page 5
    for cache, before, other in zip(caches, (k_cache, v_cache), written, strict=True):
        assert torch.equal(cache, other)
        changed = (cache != before).any(-1).flatten().nonzero().flatten()
        assert changed.tolist() == places


def test_masks_of_packed_sequences():
    """They are those that `tk.attention_varlen` has; tokens of padding come last."""
    torch.manual_seed(0)
    edges_q, edges_k = (torch.tensor(x, dtype=torch.int32) for x in ([0, 2, 2, 7], [0, 4, 4, 9]))
    q, k, v = (torch.randn(1, heads, n, 8) for heads, n in ((2, 8), (1, 11), (1, 11)))
    for left in (-1, 1):
        mask = _paged.packed_mask(edges_q, edges_k, 8, 11, True, left)
        k2, v2 = (x.expand(1, 2, -1, -1) for x in (k, v))
        by_mask = torch.nn.functional.scaled_dot_product_attention(q, k2, v2, attn_mask=mask)
        tokens = (x[0].transpose(0, 1) for x in (q, k, v))
        options = {"causal": True, "window_size": (left, -1)}
        packed = reference.attention_varlen(*tokens, edges_q, edges_k, 5, 5, **options)
        torch.testing.assert_close(by_mask[0, :, :7].transpose(0, 1), packed[:7])
        assert by_mask.isfinite().all()


def test_other_implementations(monkeypatch):
    """Names of others go where they went before."""
    module = pytest.importorskip("transformers.modeling_flash_attention_utils")
    monkeypatch.setattr(module, "_lazy_imports", lambda name, wrapper=None: ("theirs", name))
    integration.register()
    provided = module._lazy_imports
    integration.register("again")
    assert module._lazy_imports is provided
    assert provided("flash_attention_3", None) == ("theirs", "flash_attention_3")
    assert provided(None) == ("theirs", None)
    for name in (NAME, "again_flash3"):
        assert provided(name)[2] is tk.compat.flash_attn_with_kvcache


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["Llama", "GptOss", "Gemma2"])
def test_on_a_gpu(name, tmp_path):
    """With block tables where transformers makes them, in CUDA graphs."""
    integration.register()
    path = hf_models.save(tmp_path, name)
    kinds = [torch.profiler.ProfilerActivity.CUDA, torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=kinds) as profile:
        made = generated(load(path, "cuda", NAME, BF16), return_logprobs=True)
    ran = " ".join(event.key for event in profile.key_averages())
    assert ("decode_kernel" in ran) == (name == "Llama")
    for prompt, result in zip(PROMPTS, made, strict=True):
        tokens = torch.tensor([prompt + result.generated_tokens], device="cuda")
        found = []
        for dtype in (BF16, FP32):
            logits = load(path, "cuda", "eager", dtype)(tokens).logits[0, len(prompt) - 1 : -1]
            picked = logits.float().log_softmax(-1).gather(1, tokens[0, len(prompt) :, None])
            found.append([picked.flatten()])
        assert_as_good([torch.tensor(result.logprobs, device="cuda")], *found)
