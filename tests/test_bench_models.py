"""`bench --model`: the shapes of published models, and how far a run is on a terminal."""

from __future__ import annotations

import argparse
import io
import itertools
import json
from dataclasses import replace

import pytest
import torch

from thunderkittens import bench
from thunderkittens.bench import cli, models, progress
from thunderkittens.bench.suites import attention, fp8_gemm, gemm, grouped_gemm

BF16 = torch.bfloat16


def run(*options: str) -> int:
    parser = argparse.ArgumentParser()
    bench.add_arguments(parser)
    return bench.main(parser.parse_args(options))


def layers(cases: list[bench.Case], *names: str) -> dict[str, tuple]:
    return {c.parameters["layer"]: tuple(c.parameters[n] for n in names) for c in cases}


def test_a_dense_model():
    work = models.find("llama3-8b", 4096)
    forward = models.cases(gemm, work, dtype=BF16, options={"layouts": ("NT",)})
    assert layers(forward, "m", "n", "k") == {
        "qkv": (4096, 6144, 4096),
        "o": (4096, 4096, 4096),
        "gate_up": (4096, 28672, 4096),
        "gate_up, fused": (4096, 28672, 4096),
        "down": (4096, 4096, 14336),
        "head": (4096, 128256, 4096),
    }
    fused = next(case for case in forward if case.parameters["layer"] == "gate_up, fused")
    assert fused.exponentials == 4096 * 14336
    # The gradients are products of the same three sizes.
    for layout, sizes in (("NN", (4096, 4096, 6144)), ("TN", (6144, 4096, 4096))):
        backward = models.cases(gemm, work, dtype=BF16, options={"layouts": (layout,)})
        assert layers(backward, "m", "n", "k")["qkv"] == sizes
        assert "gate_up, fused" not in layers(backward)


def test_attention():
    cases = models.cases(attention, models.find("gpt-oss-20b", 2048, 2), dtype=BF16)
    found = {case.parameters["layer"]: case for case in cases}
    forward, window = found["forward"], found["window"]
    p = forward.parameters
    assert (p["batch"], p["heads"], p["kv_heads"], p["length"], p["head_dim"]) == (
        2,
        64,
        8,
        1024,
        64,
    )
    assert forward.flops == 4 * 2 * 64 * 1024**2 / 2 * 64
    assert forward.exponentials == 2 * 64 * 1024**2 / 2
    # 128 tokens are seen, the token itself among them.
    assert window.exponentials == 2 * 64 * sum(min(i + 1, 128) for i in range(1024))
    assert found["decode"].flops == 4 * 2 * 64 * 1024 * 64


def test_a_mixture_of_experts():
    work = models.find("qwen3-30b-a3b", 1024)
    grouped = models.cases(grouped_gemm, work, dtype=BF16, options={"forms": ("forward",)})
    assert layers(grouped, "experts", "tokens", "n", "k") == {
        "experts' gate_up": (128, 8192, 1536, 2048),
        "experts' down": (128, 8192, 2048, 768),
    }
    quantised = models.cases(fp8_gemm, work, dtype=BF16, options={"kinds": ("grouped_row",)})
    assert layers(quantised, "groups", "m", "n", "k")["experts' down"] == (128, 64, 2048, 768)
    assert "down" not in layers(models.cases(gemm, work, dtype=BF16))
    with pytest.raises(ValueError, match="the model has no experts"):
        models.cases(grouped_gemm, models.find("llama3-8b"), dtype=BF16)


def test_the_table():
    for name, model in models.MODELS.items():
        assert model.heads % model.kv_heads == 0, name
        assert all(size % 8 == 0 for size in (model.hidden, model.intermediate, model.head_dim))
        assert bool(model.experts) == bool(model.chosen), name
    # As many parameters as the names say, without norms: layers, and whether the embedding is also
    # the head.
    for name, depth, tied, billions in (
        ("llama2-7b", 32, 0, 6.74),
        ("llama3-8b", 32, 0, 8.03),
        ("llama3-70b", 80, 0, 70.55),
        ("llama3-405b", 126, 0, 405.85),
        ("llama3.2-1b", 16, 1, 1.24),
        ("llama3.2-3b", 28, 1, 3.21),
        ("mistral-7b", 32, 0, 7.25),
        ("mixtral-8x7b", 32, 0, 46.70),
        ("qwen2.5-7b", 28, 0, 7.62),
        ("qwen3-8b", 36, 0, 8.19),
        ("qwen3-32b", 64, 0, 32.76),
        ("qwen3-30b-a3b", 48, 0, 30.53),
        ("gemma2-9b", 42, 1, 9.24),
        ("phi-4", 40, 0, 14.66),
        ("gpt-oss-20b", 24, 0, 20.91),
        ("gpt-oss-120b", 36, 0, 116.83),
    ):
        model = models.MODELS[name]
        dense = models.weights(model)
        head = dense.pop("head")
        layer = sum(n * k for n, k in dense.values())
        layer += 3 * model.experts * model.hidden * model.intermediate
        count = depth * layer + (2 - tied) * head[0] * head[1]
        assert count / 1e9 == pytest.approx(billions, rel=4e-3), name


@pytest.mark.parametrize("op", cli.suite_names())
def test_every_suite_has_the_shapes_of_models(op):
    suite = cli.load_suite(op)
    model = "mixtral-8x7b" if op == "grouped_gemm" else "llama3-8b"
    cases = models.cases(suite, models.find(model, 512, 2), dtype=BF16)
    assert len({case.name for case in cases}) == len(cases) > 0
    sections = [case.groups[:1] for case in cases]
    assert len([s for i, s in enumerate(sections) if s not in sections[:i]]) == 1 + sum(
        a != b for a, b in itertools.pairwise(sections)
    )


SMALL = models.Model(64, 4, 2, 16, 96, 128, experts=2, chosen=1, window=5)


@pytest.mark.parametrize(
    "op", ["attention", "attention_varlen", "gemm", "grouped_gemm", "fp8_gemm"]
)
def test_command(op, device, tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(models.MODELS, "small", SMALL)
    file = tmp_path / "r.json"
    options = ["--device", device, "--model", "small", "--tokens", "32", "--sequences", "2"]
    assert run(op, *options, "--repetitions", "2", "--json", str(file)) == 0
    content = json.loads(file.read_text())
    assert content["settings"]["model"] == "small"
    assert (content["settings"]["tokens"], content["settings"]["shapes"]) == (32, None)
    for case in content["cases"]:
        assert case["results"]["thunderkittens"]["accuracy"]["passed"], case["name"]


def test_all_ops(device, tmp_path, monkeypatch, capsys):
    """Each with a file of its own; what the model does not have is named and left out."""
    monkeypatch.setattr(cli, "suite_names", lambda: ["gemm", "grouped_gemm", "mxfp8_quantize"])
    monkeypatch.setitem(models.MODELS, "small", replace(SMALL, experts=0))
    options = ["all", "--device", device, "--model", "small", "--tokens", "32"]
    assert run(*options, "--repetitions", "2", "--json", str(tmp_path)) == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["gemm.json", "mxfp8_quantize.json"]
    assert "== grouped_gemm\nthe model has no experts" in capsys.readouterr().out
    (tmp_path / "mxfp8_quantize.json").unlink()
    options = ["all", "--device", device, "--quick", "--compare", str(tmp_path)]
    assert run(*options) in (0, cli.REGRESSION)
    printed = capsys.readouterr().out
    assert "in all: " in printed
    assert "== mxfp8_quantize" not in printed
    assert run("all", "--device", "cpu", "--model", "llama9") == 2


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--model", "llama9"], "--model is 'llama9'; expected one of gpt2"),
        (["--model", "llama3-8b", "--sequences", "3"], "4096 are not 3 sequences"),
        (["--model", "llama3-8b", "--shapes", "tiny"], "--model and --shapes exclude each other"),
        (["--model", "llama3-8b", "--host"], "--host and --model exclude each other"),
    ],
)
def test_wrong_options(options, words, capsys):
    assert run("gemm", "--device", "cpu", *options) == 2
    assert words in capsys.readouterr().err


# Progress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("rich", [True, False])
def test_progress(rich, monkeypatch):
    if rich:
        pytest.importorskip("rich")
    monkeypatch.setattr(progress.importlib.util, "find_spec", lambda name: rich or None)
    monkeypatch.setenv("TERM", "xterm")
    stream = Terminal()
    assert list(progress.follow(iter("ab"), 2, "case [{}]".format, stream)) == ["a", "b"]
    text = stream.getvalue()
    assert "case [a]" in text
    assert "case [b]" in text
    if not rich:
        assert text == "1/2 case [a]\n2/2 case [b]\n"


def test_no_progress_without_a_terminal():
    stream = io.StringIO()
    assert list(progress.follow("ab", 2, str, stream)) == ["a", "b"]
    assert stream.getvalue() == ""
