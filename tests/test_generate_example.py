"""examples/generate.py: the caches and the ways give the same logits, and steps are measured; sizes
are tiny.

Nothing is asserted about speed.
"""

from __future__ import annotations

import json
import runpy
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import thunderkittens as tk
from thunderkittens import bench
from thunderkittens.bench import comparison

EXAMPLE = Path(__file__).resolve().parents[1] / "examples" / "generate.py"
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def example():
    name = "generate_example"
    module = sys.modules[name] = SimpleNamespace()  # where dataclasses look for annotations
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(EXAMPLE.parent))
        vars(module).update(runpy.run_path(str(EXAMPLE), run_name=name))
        yield module
    for loaded in (name, "llama"):
        sys.modules.pop(loaded, None)


def loop_of(example, kind, device=CPU, batch=2):
    generator = torch.Generator(device).manual_seed(0)
    return example.LOOPS[kind](example.SIZES["tiny"], batch, device, generator)


def test_sizes(example):
    """Those of the published models, and what a step reads and computes."""
    for name, count in (("1b", 1.236e9), ("8b", 7.505e9)):
        size = example.SIZES[name]
        with torch.device("meta"):
            model = example.Llama(size.sizes, size.layers, size.length)
        matrices = [p.numel() for p in model.parameters() if p.ndim == 2]
        assert size.parameters == sum(matrices) - model.embedding.weight.numel()
        assert size.parameters == pytest.approx(count, rel=1e-3)
        cached = 2 * 2 * size.layers * size.context * size.sizes.kv_heads * size.sizes.head_dim
        assert size.bytes(64) == 2 * size.parameters + 64 * cached
        pairs = 64 * size.context * size.layers
        products = 64 * size.parameters + 2 * pairs * size.sizes.heads * size.sizes.head_dim
        assert size.flops(64) == 2 * products


@torch.no_grad()
def test_the_caches_agree(example):
    """Behind a prompt, in fp64: the same logits of every step."""
    torch.manual_seed(0)
    size = example.SIZES["tiny"]
    sizes = size.sizes
    model = example.Llama(sizes, size.layers, 32).double()
    example.randomize(model, torch.Generator().manual_seed(0))
    shape = 2, 3, sizes.kv_heads, 32, sizes.head_dim
    static = example.StaticCache(*(list(torch.zeros(shape).double()) for _ in range(2)))
    place = size.layers, 3, sizes.kv_heads, sizes.head_dim
    paged = tk.nn.PagedCache(*place, max_length=32, page_size=8, dtype=torch.float64)
    tokens = torch.randint(sizes.vocabulary, (3, 9))
    for step in range(6):
        paged.reserve(tokens.shape[1])
        ours, theirs = (model(tokens, cache, prompt=step == 0) for cache in (paged, static))
        torch.testing.assert_close(ours, theirs)
        tokens = ours.argmax(-1, keepdim=True)


def test_four_bits(example):
    """The head is one of them, or it is not, as the names say."""
    loop = loop_of(example, "own")
    found = {}
    convert = tk.convert

    def keep(model, *args, **options):
        report = convert(model, *args, **options)
        assert len(report.converted) + len(report.left) == len(report.layers) == 4 * 2 + 1
        found[way] = [x.name for x in report.left]
        return report

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tk, "convert", keep)
        for way in (example.BITS_4, example.ALL_4_BITS):
            loop.prepare(way, compiled=False)
    assert found == {example.BITS_4: ["head"], example.ALL_4_BITS: []}
    assert type(loop.model.head) is torch.nn.Linear


@pytest.mark.parametrize(
    "kind", ["own", pytest.param("transformers", marks=pytest.mark.intensity(2))]
)
def test_layers_share_code(kind, example):
    """However many there are, one is compiled; the first of ours also makes the schedule."""
    if kind == "transformers":
        pytest.importorskip("transformers")
    size = replace(example.SIZES["tiny"], layers=4)
    generator = torch.Generator().manual_seed(0)
    loop = example.LOOPS[kind](size, 2, CPU, generator)
    graphs = {"own": [2, 1], "transformers": [1, 1]}[kind]
    for way, count in zip((example.WAYS[kind][0], "PyTorch"), graphs, strict=True):
        torch._dynamo.utils.counters.clear()
        first = loop.prepare(way).first
        assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == count
        assert torch.equal(first, loop.prepare(way, compiled=False).first)


def test_a_wrong_cache_is_found(example, monkeypatch):
    def wrong(self, layer, q, k, v):
        return torch.zeros_like(q)

    monkeypatch.setattr(tk.nn.PagedStep, "attend", wrong)
    ways = (example.OURS, "PyTorch")
    implementations = {
        way: bench.Prepared(lambda loop, way=way: loop.prepare(way, compiled=False)) for way in ways
    }
    case, timer = example.make_case("tiny", 1, "own"), bench.StepTimer(CPU, 3)
    (found,) = bench.compare([case], implementations, timer=timer, repetitions=1)
    assert found.failed
    assert "not accurate" in found.notes[example.OURS]


def run(example, monkeypatch, *options):
    monkeypatch.setattr(sys, "argv", ["generate.py", "--device", "cpu", *options])
    example.main()


def test_tokens_are_printed(example, monkeypatch, capsys):
    run(example, monkeypatch)
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert [row[0] for row in rows] == ["PyTorch"] * 2 + ["tk.nn.PagedCache"] * 2
    assert all(len(row) == 13 for row in rows)
    assert rows[0][1] == rows[2][1]


def test_measurement(example, tmp_path, monkeypatch, capsys):
    pytest.importorskip("transformers")
    file = tmp_path / "r.json"
    options = ["--sizes", "tiny", "--batches", "2", "--repetitions", "2", "--json", str(file)]
    run(example, monkeypatch, "--measure", *options)
    printed = capsys.readouterr().out
    content = json.loads(file.read_text())
    names = [f"tiny, batch 2, {loop}, {w}" for loop, ways in example.WAYS.items() for w in ways]
    assert [case["name"] for case in content["cases"]] == names
    for case in content["cases"]:
        ours, theirs = (case["results"][name] for name in ("thunderkittens", "PyTorch"))
        assert theirs["accuracy"]["passed"]
        rounded = case["parameters"]["way"].startswith("NVFP4")
        assert ours["accuracy"] is None if rounded else ours["accuracy"]["passed"]
        rate = 2 / ours["time_us"]["median"] * 1e6
        assert f"{case['name']}: thunderkittens {rate:.4g}, PyTorch" in printed
    assert not comparison.compare_files(content, content).regression


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["own", "transformers"])
def test_graphs(kind, example):
    """Each way as one CUDA graph per step: accurate, and the same tokens when repeated."""
    pytest.importorskip("transformers")
    found = example.measure("tiny", 2, kind, torch.device("cuda"), repetitions=2, seconds=1)
    assert [m.case.parameters["way"] for m in found] == list(example.WAYS[kind])
    assert not any(m.failed for m in found)
    generation = loop_of(example, kind, torch.device("cuda")).prepare(example.WAYS[kind][0])
    generation()
    tokens = generation.tokens.clone()
    generation()
    assert torch.equal(tokens, generation.tokens)
