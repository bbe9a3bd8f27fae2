"""The benchmark's own logic: accuracy, reports, shapes, command line.

Nothing is asserted about speed. Its timers are tested in test_bench_timing.py, host times in
test_bench_host.py, steps of training in test_bench_training.py.
"""

from __future__ import annotations

import argparse
import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import thunderkittens as tk
from helpers.cover import alternate
from thunderkittens import bench
from thunderkittens.bench import attention_work, cli, machine
from thunderkittens.bench.accuracy import check
from thunderkittens.bench.cases import NotApplicableError
from thunderkittens.bench.host import every_kind
from thunderkittens.bench.suites import attention, attention_varlen, fp8_gemm, gemm

CPU = torch.device("cpu")


def run(*options: str) -> int:
    parser = argparse.ArgumentParser()
    bench.add_arguments(parser)
    return bench.main(parser.parse_args(options))


# Accuracy


def gemm_case(m: int = 16, n: int = 24, k: int = 32, layout: str = "NN") -> bench.Case:
    return gemm.make_case(m, n, k, layout, torch.bfloat16)


def make_inputs(case: bench.Case) -> dict:
    return case.make_inputs(CPU, torch.Generator().manual_seed(0))


@pytest.mark.parametrize(
    ("spoil", "passed"),
    [
        (lambda out: out, True),
        (lambda out: out * 1.02, False),
        (lambda out: out.index_fill(0, torch.tensor([3]), 0), False),
        (lambda out: out.index_fill(0, torch.tensor([3]), torch.nan), False),
        (lambda out: out.index_fill(0, torch.tensor([3]), torch.inf), False),
    ],
)
def test_accuracy_rule(spoil, passed):
    case = gemm_case()
    inputs = make_inputs(case)
    out = (inputs["a"].double() @ inputs["b"].double()).bfloat16()
    accuracy = check(case, inputs, {"op": (spoil(out),)})["op"]
    assert accuracy.passed is passed


@pytest.mark.parametrize(
    ("kind", "k", "passed"),
    [("fast", 4096, True), ("fast", 512, False), ("accurate", 4096, False)],
)
def test_fast_sums_may_lose_what_is_documented(kind, k, passed):
    """K * 2^-18 with fast sums, and no more than a rounding with promoted ones."""
    case = fp8_gemm.make_case(16, 24, k, kind, torch.bfloat16)
    inputs = make_inputs(case)
    operands = (inputs[name] for name in ("a", "b", "scale_a", "scale_b"))
    out = tk.reference.fp8_gemm(*operands, out_dtype=torch.float64) * (1 - 4096 * 2.0**-18)
    assert check(case, inputs, {"op": (out.bfloat16(),)})["op"].passed is passed


def test_orders_of_fp8_operands():
    """Each is measured, the same product, and cuBLAS copies what it cannot take."""
    names = [case.name for case in fp8_gemm.cases("majors")]
    assert len(names) == len(set(names)) == 2 * 3 * 4
    assert "accurate TN 16 x 8192 x 8192" in names
    for major in fp8_gemm.MAJORS:
        case = fp8_gemm.make_case(16, 48, 64, "fast", torch.bfloat16, major)
        inputs = make_inputs(case)
        assert (inputs["a"].stride(1) == 1) == major.startswith("N")
        assert (inputs["b"].stride(0) == 1) == major.endswith("T")
        out = tk.fp8_gemm(**inputs)
        assert check(case, inputs, {"op": (out,)})["op"].passed
        transposed = (16 * 64 if major[0] == "T" else 0) + (48 * 64 if major[1] == "N" else 0)
        for peer in (fp8_gemm._cublas_behind_copies, fp8_gemm._copy):
            if transposed == 0:
                with pytest.raises(NotApplicableError):
                    peer(**inputs)
        if transposed:
            with pytest.raises(NotApplicableError, match="behind copies"):
                fp8_gemm._cublas(**inputs)
            copied = fp8_gemm._cublas_behind_copies(**inputs)
            assert check(case, inputs, {"op": (copied,)})["op"].passed
            assert sum(x.numel() for x in fp8_gemm._copy(**inputs)()) == transposed


def test_wrong_shape_is_named():
    case = gemm_case()
    with pytest.raises(ValueError, match=r"op has \(2, 2\)"):
        check(case, make_inputs(case), {"op": (torch.zeros(2, 2, dtype=torch.bfloat16),)})


@pytest.mark.parametrize("causal", [False, True])
def test_attention_oracle_in_blocks(causal, monkeypatch):
    monkeypatch.setattr(attention_work, "SCORES", 3 * 20 * 20)
    case = attention.make_case(2, 5, 20, 8, causal, torch.bfloat16)
    inputs = make_inputs(case)
    whole = torch.full((2, 5, 20, 8), torch.nan)
    for piece in case.oracle(**inputs):
        whole[piece.index] = piece.exact
    q, k, v = (inputs[name].float() for name in "qkv")
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal)
    torch.testing.assert_close(whole, expected)


# Comparison


def product(a, b):
    return a @ b


def test_compare_reports_ratios_and_notes():
    def refuse(a, b):
        raise NotImplementedError("no kernel\nfor this")

    implementations = {
        "ours": product,
        "peer": product,
        "prepared": bench.Prepared(lambda a, b: lambda: a @ b),
        "refuses": refuse,
        "wrong": lambda a, b: (a @ b) * 2,
    }
    seen = []
    measurements = bench.compare(
        [gemm_case(), gemm_case(layout="TN")],
        implementations,
        device="cpu",
        repetitions=3,
        progress=seen.append,
    )
    assert seen == measurements
    first = measurements[0]
    assert not first.failed
    assert set(first.timings) == {"ours", "peer", "prepared", "wrong"}
    assert first.notes["refuses"] == "no kernel"
    assert first.notes["wrong"].startswith("not accurate")
    expected = first.timings["peer"].median / first.timings["ours"].median
    assert first.ratio("peer") == expected
    assert math.isnan(first.ratio("refuses"))
    assert math.isnan(first.ratio("wrong"))
    assert first.tflops("ours") == 2 * 16 * 24 * 32 / first.timings["ours"].median * 1e-6
    text = bench.table(measurements, peak=100.0)
    for words in ("ours", "peer", "TN 16 x 24 x 32", "refuses: no kernel", "geometric mean"):
        assert words in text


def test_what_runs_apart_is_timed_after_the_others():
    order = []

    def called(name):
        def call(a, b):
            order.append(name)
            return a @ b

        return call

    def prepare(a, b):
        return lambda: called("hot")(a, b)

    implementations = {
        "ours": called("ours"),
        "hot": bench.Prepared(prepare, another_problem=True, apart=True),
        "peer": called("peer"),
    }
    options = {"device": "cpu", "repetitions": 3, "checked": False}
    (measurement,) = bench.compare([gemm_case()], implementations, **options)
    assert set(measurement.timings) == set(implementations)
    rounds = order[3:]  # the first three try each once
    assert set(rounds[: rounds.index("hot")]) == {"ours", "peer"}
    assert set(rounds[rounds.index("hot") :]) == {"hot"}


def test_a_wrong_subject_is_not_timed():
    wrong = {"ours": lambda a, b: a @ b + 1, "peer": product}
    (measurement,) = bench.compare([gemm_case()], wrong, device="cpu", repetitions=2)
    assert measurement.failed
    assert "not accurate" in measurement.notes["ours"]
    assert "failed" in bench.table([measurement])
    (unchecked,) = bench.compare(
        [gemm_case()], wrong, device="cpu", repetitions=2, checked=False, subject="peer"
    )
    assert not unchecked.failed
    assert unchecked.subject == "peer"


def test_running_out_of_memory_skips_the_case():
    def fail(a, b):
        raise torch.OutOfMemoryError("out of memory, tried 1 TiB")

    (measurement,) = bench.compare([gemm_case()], {"ours": fail}, device="cpu")
    assert measurement.failed
    assert "1 TiB" in measurement.notes["ours"]
    assert "failed" in bench.table([measurement])


def test_a_broken_gpu_ends_the_run():
    def fail(a, b):
        raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered")

    measurements = bench.compare([gemm_case(), gemm_case()], {"ours": fail}, device="cpu")
    assert len(measurements) == 1
    assert "illegal memory access" in measurements[0].notes["ours"]
    peers = {"ours": product, "theirs": fail}
    (measurement,) = bench.compare([gemm_case(), gemm_case()], peers, device="cpu")
    assert measurement.failed
    assert measurement.notes["ours"].startswith("theirs: CUDA error: an illegal memory access")


def test_compare_refuses_nonsense():
    with pytest.raises(ValueError, match="no implementations"):
        bench.compare([], {})
    with pytest.raises(ValueError, match="subject is 'b'"):
        bench.compare([], {"a": product}, subject="b")


def measured(ours: float, **peers: float) -> bench.Measurement:
    times = {"ours": ours, **peers}
    timings = {name: bench.Timing.of([time]) for name, time in times.items()}
    return bench.Measurement(gemm_case(), "ours", timings)


def test_geometric_means():
    measurements = [measured(1.0, peer=2.0), measured(2.0, peer=1.0), measured(1.0, peer=8.0)]
    assert bench.geometric_means(measurements)["NN"]["peer"] == pytest.approx(2.0)
    assert bench.geometric_means([measured(1.0)]) == {}


# Reports


def test_json_document(tmp_path):
    measurements = [measured(10.0, peer=5.0), bench.Measurement(gemm_case(), "ours")]
    measurements[1].notes["ours"] = "no kernel"
    content = bench.document("gemm", measurements, machine=machine.record(CPU), settings={"s": 1})
    bench.write_json(tmp_path / "new" / "gemm.json", content)
    content = json.loads((tmp_path / "new" / "gemm.json").read_text())
    assert content["schema"] == 1
    assert content["op"] == "gemm"
    assert content["machine"]["torch"] == torch.__version__
    good, bad = content["cases"]
    assert good["results"]["ours"]["time_us"]["median"] == 10.0
    assert good["ratios"] == {"peer": 0.5}
    assert good["parameters"]["layout"] == "NN"
    assert not good["failed"]
    assert bad["failed"]
    assert bad["results"]["ours"]["tflops"] is None
    assert bad["results"]["ours"]["note"] == "no kernel"
    assert content["geometric_means"]["NN"]["peer"] == pytest.approx(0.5)


def test_record_names_no_host():
    import platform

    text = json.dumps(machine.record(CPU))
    assert platform.node() not in text.split('"')
    assert str(Path.home()) not in text or str(Path.home()) == "/"


@pytest.mark.parametrize(
    ("gpu", "folder", "peak"),
    [
        ("NVIDIA H200", "h200", 989.4),
        ("NVIDIA H100 80GB HBM3", "h100_80gb_hbm3", 989.4),
        ("NVIDIA H100 PCIe", "h100_pcie", 756.5),
        ("NVIDIA H20", "h20", 148.0),
        ("NVIDIA B200", "b200", 2250.0),
        ("NVIDIA GeForce GTX 1080", "geforce_gtx_1080", None),
    ],
)
def test_gpu_names(gpu, folder, peak):
    assert machine.slug(gpu) == folder
    assert machine.peak_tflops(gpu) == peak


def test_plot(tmp_path):
    pytest.importorskip("matplotlib")
    failed = bench.Measurement(gemm_case(), "ours")
    bench.plot([measured(1.0, peer=2.0), failed], tmp_path / "p.png", title="t", peak=1.0)
    assert (tmp_path / "p.png").read_bytes().startswith(b"\x89PNG")


# Shapes


def test_attention_points():
    cases = attention.cases()
    assert len(cases) == len({case.name for case in cases}) == 36
    for case in cases:
        p = case.parameters
        assert p["batch"] * p["length"] == 16384
        assert p["heads"] * p["head_dim"] == 2048
        flops = 4 * p["batch"] * p["heads"] * p["length"] ** 2 * p["head_dim"]
        assert case.flops == flops / (2 if p["causal"] else 1)
    rated = [case for case in cases if "D=128, N >= 2048" in case.groups]
    assert len(rated) == 8


def test_packed_lengths():
    for case in attention_varlen.cases():
        assert sum(case.parameters["lengths"]) == 16384
        assert min(case.parameters["lengths"]) > 0
    inputs = make_inputs(attention_varlen.cases()[0])
    assert inputs["edges"].tolist() == list(range(0, 16385, 2048))


def test_attention_work():
    """Operations and least traffic of the sets beside the grid."""
    cases = {case.name: case for shapes in attention.SAVED for case in attention.cases(shapes)}
    full = 4 * 16384 * 2048 * 512
    assert cases["D=64 full N=512"].flops == full
    assert cases["backward D=64 full N=512"].flops == 2.5 * full
    assert cases["deterministic backward D=64 causal N=2048"].flops == 2.5 * 4 * full / 2
    causal = cases["forward softcap"].flops
    assert causal == 4 * 4 * 16 * 4096**2 * 128 / 2
    # Of the scores, dP, dQ, dK and dV: three, four, two.
    for needs, products in (("q", 3), ("kv", 4), ("v", 2)):
        assert cases[f"backward of {needs} alone"].flops == causal / 2 * products
    window = cases["forward window 1024, N=16384"].flops / (4 * 16 * 128)
    assert window == sum(min(i, 1024) + 1 for i in range(16384))
    assert cases["forward 192/128 N=4096"].flops == 2 * 128 * 4096**2 / 2 * (192 + 128)
    one = cases["decode B=4, 1 row"]
    assert one.flops == 4 * 4 * 32 * 32768 * 128
    assert one.bytes == 2 * 4 * (8 * 32768 + 32) * 256


@pytest.mark.parametrize("shapes", [s for s in attention.SHAPES if s != "tiny"])
def test_attention_inputs_fit_the_op(shapes):
    """Every call that would be measured is one that the op takes, forward and backward."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    def fake_normal(*shape, dtype, generator):
        return torch.empty(shape, dtype=dtype)

    prepared = attention.implementations(CPU)["thunderkittens"]
    with FakeTensorMode(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention_work, "random_normal", fake_normal)
        for point in attention.SHAPES[shapes]:
            inputs = point.inputs(torch.bfloat16, torch.Generator())
            result = prepared.prepare(**inputs)()
            if point.backward:
                assert [x.shape for x in result] == [inputs[n].shape for n in point.needs]
            else:
                assert result.shape == (*inputs["q"].shape[:3], inputs["v"].shape[3])


def test_attention_peers_read_aligned_rows():
    """Operands and the gradient of the output alike; others get them as they are."""
    seen = []

    class Sum(torch.autograd.Function):
        @staticmethod
        def forward(ctx, q, k, v):
            seen.extend(x.stride() for x in (q, k, v))
            return q + k + v

        @staticmethod
        def backward(ctx, grad_out):
            seen.append(grad_out.stride())
            return grad_out, grad_out, grad_out

    def attend(q, k, v, causal, options):
        return Sum.apply(q, k, v)

    def rows():
        return torch.randn(1, 2, 3, 8 + 5, dtype=torch.float16)[..., :8]

    q, k, v, grad_out = (rows() for _ in range(4))
    for read, expected in ((attention_work.readable, 8), (attention_work.as_given, 13)):
        implementation = attention_work.work(attend, read)
        implementation.prepare(q, k, v, False, {}, grad_out)()
        assert [strides[2] for strides in seen] == [expected] * 4
        seen.clear()
        implementation.prepare(q, k, v, False, {})()
        assert [strides[2] for strides in seen] == [expected] * 3
        seen.clear()


def test_gemm_shapes():
    names = [case.name for case in gemm.cases()]
    assert len(names) == len(set(names)) == 14
    assert "NT 4096 x 11008 x 4096" in names
    assert "NN 4097 x 1003 x 777" in names
    large = gemm.cases("rated", layouts=("TT",), large=True)
    assert [case.parameters["m"] for case in large] == [2048, 4096, 8192, 16384]


@pytest.mark.parametrize("layout", gemm.LAYOUTS)
def test_gemm_layouts(layout):
    inputs = make_inputs(gemm_case(layout=layout))
    for operand, kind, shape in zip("ab", layout, [(16, 32), (32, 24)], strict=True):
        assert inputs[operand].shape == shape
        assert inputs[operand].t().is_contiguous() is (kind == "T")


def test_every_benchmark_has_a_suite():
    folder = Path(__file__).resolve().parents[1] / "benchmarks"
    files = sorted(path.stem.removeprefix("bench_") for path in folder.glob("bench_*.py"))
    assert files == cli.suite_names()


@pytest.mark.parametrize("op", cli.suite_names())
def test_every_suite_is_complete(op):
    suite = cli.load_suite(op)
    assert "default" in suite.SHAPES
    assert all(suite.cases(shapes) for shapes in suite.SHAPES)
    assert next(iter(suite.implementations(CPU))) == "thunderkittens"
    for call in every_kind(suite.host_calls(CPU))[0].values():
        call()


# Command line


@alternate(("op",), cli.suite_names(), other=True)
def test_command(op, device, tmp_path, capsys):
    pytest.importorskip("matplotlib")
    json_file, picture = tmp_path / "r.json", tmp_path / "r.png"
    options = ["--device", device, "--shapes", "tiny", "--repetitions", "3"]
    assert run(op, *options, "--json", str(json_file), "--plot", str(picture)) == 0
    printed = capsys.readouterr().out
    assert "geometric mean" in printed
    content = json.loads(json_file.read_text())
    assert content["subject"] == "thunderkittens"
    assert content["settings"]["repetitions"] == 3
    for case in content["cases"]:
        assert case["results"]["thunderkittens"]["accuracy"]["passed"], case["name"]
    assert picture.stat().st_size > 0


def test_a_failing_op_gives_exit_status_1(monkeypatch, capsys):
    monkeypatch.setattr(gemm, "implementations", lambda device: {"ours": lambda a, b: a @ b * 2})
    assert run("gemm", "--device", "cpu", "--quick") == 1
    assert "not accurate" in capsys.readouterr().out


def test_save(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    options = ["gemm", "--device", "cpu", "--repetitions", "2", "--save"]
    assert run(*options) == 2
    assert "root of a source tree" in capsys.readouterr().err
    (tmp_path / "benchmarks").mkdir()
    assert run(*options, "--shapes", "tiny") == 2
    assert "--save needs a full run" in capsys.readouterr().err
    assert run(*options, "--layouts", "NN") == 2
    assert "--save needs a full run" in capsys.readouterr().err
    assert run(*options) == 0
    assert (tmp_path / "benchmarks" / "results" / "cpu" / "gemm.json").exists()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["gemm"], "sees no CUDA GPU"),
        (["attention", "--host"], "sees no CUDA GPU"),
        (["gemm", "--device", "tpu"], "--device is 'tpu'; expected cuda"),
        (["gemm", "--shapes", "round"], "shapes 'round' is unknown; expected one of default"),
        (["attention", "--shapes", "round"], "shapes 'round' is unknown; expected one of default"),
        (["gemm", "--layouts", "NN,XY"], "layout 'XY' is unknown; expected a part of NN,NT,TN,TT"),
        (["gemm", "--device", "cpu", "--peers", "x"], "--peers has 'x'; expected one of PyTorch"),
        (["gemm", "--repetitions", "0"], "must be positive"),
    ],
)
def test_wrong_options(options, words, monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert run(*options) == 2
    message = capsys.readouterr().err
    assert message.startswith("thunderkittens bench: ")
    assert words in message
    assert len(message.splitlines()) == 1


def hide(package: str, monkeypatch) -> None:
    find_spec = cli.importlib.util.find_spec
    absent = lambda name: None if name == package else find_spec(name)  # noqa: E731
    monkeypatch.setattr("importlib.util.find_spec", absent)


def test_plot_without_matplotlib(monkeypatch, capsys):
    hide("matplotlib", monkeypatch)
    assert run("gemm", "--device", "cpu", "--plot", "p.png") == 2
    assert "--plot needs matplotlib: pip install" in capsys.readouterr().err


def test_table_without_rich(monkeypatch):
    measurements = [measured(10.0, peer=5.0), measured(1.0)]
    with_rich = bench.table(measurements, peak=100.0)
    hide("rich", monkeypatch)
    plain = bench.table(measurements, peak=100.0)
    assert plain != with_rich
    for text in (plain, with_rich):
        assert row_of(text).split()[-2:] == ["0.0", "0.500"]
    headings = plain.splitlines()[2]
    assert headings.split() == ["case", "us", "spread", "TFLOP/s", "of", "peak", "TFLOP/s", "ratio"]
    assert len(headings) == len(row_of(plain))


def test_table_of_what_multiplies_nothing():
    case = replace(measured(1.0).case, flops=0.0, bytes=5e5)
    text = bench.table([replace(measured(10.0, peer=5.0), case=case)], peak=100.0)
    assert "TFLOP/s" not in text
    assert row_of(text).split()[-4:] == ["0.0%", "50", "100", "0.500"]


def row_of(text: str) -> str:
    return next(line for line in text.splitlines() if "16 x 24 x 32" in line)
