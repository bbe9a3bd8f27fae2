"""The ladder of matrix products, examples/gemm: every step on the emulator, and its figures."""

from __future__ import annotations

import importlib.util
import json
import re
from pathlib import Path

import pytest
import torch

from thunderkittens import emulation

EXAMPLE = Path(__file__).resolve().parents[1] / "examples" / "gemm"


def load_example():
    spec = importlib.util.spec_from_file_location("examples_gemm_run", EXAMPLE / "run.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


example = load_example()

# Beside those of the script: fewer steps of k than the ring has stages and a tile has pieces, a
# ring that wraps twice, one row.
SHAPES = [*example.SHAPES, (130, 264, 8), (64, 256, 576), (1, 8, 8)]


@pytest.fixture(scope="module")
def ladder(tmp_path_factory):
    if emulation.cuda_headers() is None:
        pytest.skip(emulation.NO_HEADERS)
    folder = tmp_path_factory.mktemp("ladder")
    return example.Ladder(example.build_for_emulator(list(example.STEPS), folder))


@pytest.mark.timeout(600)  # the first one compiles
@pytest.mark.parametrize("step", example.STEPS)
def test_step_is_exact_on_integers(ladder, step, request, monkeypatch):
    quick = request.config.getoption("intensity") == 1
    for policy in ("on_wait", "random") if quick else emulation.POLICIES:
        monkeypatch.setenv("KITTENS_POLICY", policy)
        for shape in SHAPES:
            example.check(ladder, step, shape, "cpu")


def test_first_step_takes_any_size(ladder):
    example.check(ladder, 1, (37, 65, 21), "cpu")


@pytest.mark.parametrize("step", [s for s in example.STEPS if s > 1])
def test_sizes_that_a_step_does_not_take(ladder, step):
    def call(m, n, k):
        a, b, c = (torch.zeros(shape, dtype=torch.bfloat16) for shape in ((m, k), (n, k), (m, n)))
        ladder.run(step, a, b, c, 2)

    with pytest.raises(ValueError, match=rf"step_{step:02}: a has strides .12, 1.*multiples of 8"):
        call(16, 16, 12)
    with pytest.raises(ValueError, match=r"a has shape .0, 16., expected .* an element at least"):
        call(0, 16, 16)
    if step == 8:
        with pytest.raises(ValueError, match=r"c has strides .12, 1.*multiples of 8"):
            call(16, 12, 16)
    else:
        example.check(ladder, step, (16, 13, 16), "cpu")


def test_steps_are_those_of_the_readme():
    listed = re.findall(
        r"^\| \[(\w+)\]\((\w+)\.cu\) \| [^|]+ \|$", example.README.read_text(), re.M
    )
    assert [name for name, file in listed if name == file] == [
        p.stem for p in example.STEPS.values()
    ]
    assert list(example.STEPS) == list(range(1, len(listed) + 1))
    for path in example.STEPS.values():
        head = path.read_text().partition("#include")[0]
        assert re.match(rf"// Step {int(path.name[:2])}: ", head)
        assert "// Idea: " in head
        assert "// Sizes: " in head


def test_links_of_the_readme_lead_somewhere():
    for target in re.findall(r"\]\(([^)#]+)", example.README.read_text()):
        assert (EXAMPLE / target).exists(), target


def test_figures_of_the_readme_are_those_of_the_file():
    text = example.README.read_text()
    assert example.with_figures(text) == text


def test_table_has_every_step(tmp_path, monkeypatch):
    names = [path.stem for path in example.STEPS.values()]
    results = {name: {"tflops": 100.0 * (i + 1)} for i, name in enumerate([*names, example.PEER])}
    cases = [{"parameters": {"m": size}, "results": results} for size in example.SIZES]
    monkeypatch.setattr(example, "RESULTS", tmp_path / "results.json")
    example.RESULTS.write_text(json.dumps({"cases": cases}))
    text = example.with_figures(example.README.read_text())
    lines = text.split(example.MARKS[0])[1].split(example.MARKS[1])[0].strip().splitlines()
    assert len(lines) == len(names) + 3
    assert lines[-2] == f"| [{names[-1]}]({names[-1]}.cu) | 800 | 89% | 800 | 89% |"
    assert lines[-1] == f"| {example.PEER} | 900 | 100% | 900 | 100% |"
