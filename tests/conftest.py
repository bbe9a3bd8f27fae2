"""What every test shares: intensity, back ends, and a hostile environment.

A test that takes `device` runs once per back end: "cpu" is the reference implementation, called
through the op; "cuda" the kernels. In the suites of the ops with kernels there is "emulator"
besides: the kernels on CPU tensors (`tk.emulate`), under one of the two policies that together find
the most; and of the ops with kernels for every GPU "portable", the same of these. With
`helpers.cover.over` a test also takes `case`. Tests of a back end that is not there are deselected,
and the summary says so.

Such tests find fresh memory filled with NaN. Random numbers are seeded by the test's name.
"""

from __future__ import annotations

import fcntl
import gc
import os
import tempfile
import zlib
from collections import Counter, defaultdict
from typing import Any

import pytest

# Before CUDA starts: the kernels are deterministic, and so must be those that they are compared to.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
# Before OpenMP starts: its threads spin where they wait, which costs processes that share the cores
# most of their time. Each of several that test at once gets its part of them.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
if "PYTEST_XDIST_WORKER_COUNT" in os.environ:
    _share = len(os.sched_getaffinity(0)) // int(os.environ["PYTEST_XDIST_WORKER_COUNT"])
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, _share)))

import hypothesis
import torch

pytest.register_assert_rewrite("helpers")

from helpers import launched  # noqa: E402


class Emulated(str):
    """The device of tests on the emulator: it is the CPU, but a back end of its own."""


class Portable(Emulated):
    """That of tests of the portable kernels, on the emulator."""


BACK_ENDS = {
    "cpu": "cpu",
    "emulator": Emulated("cpu"),
    "portable": Portable("cpu"),
    "cuda": "cuda",
}
EMULATED_SUITES = (
    "test_activation_ranges",
    "test_attention",
    "test_attention_gradient",
    "test_attention_options",
    "test_append_kv",
    "test_attention_paged",
    "test_attention_prefill",
    "test_attention_varlen",
    "test_causal_conv1d",
    "test_causal_conv1d_gradient",
    "test_causal_conv1d_update",
    "test_compat",
    "test_compat_kvcache",
    "test_fp8_gemm",
    "test_fp8_quantize",
    "test_gated_delta_rule_gradient",
    "test_gemm",
    "test_gemm_backward",
    "test_gemm_few_rows",
    "test_gemm_fused",
    "test_gemm_short_k",
    "test_grouped_gemm",
    "test_layer_norm",
    "test_layer_norm_quantize",
    "test_merge_attention",
    "test_mxfp8_dequantize",
    "test_mxfp8_gemm",
    "test_mxfp8_groups",
    "test_mxfp8_prepare",
    "test_mxfp8_quantize",
    "test_nvfp4_cache",
    "test_nvfp4_dequantize",
    "test_nvfp4_gemm",
    "test_nvfp4_groups",
    "test_nvfp4_prepare",
    "test_nvfp4_quantize",
    "test_recurrent_gradient",
    "test_rms_norm",
    "test_rms_norm_quantize",
    "test_rotary",
    "test_zero_sizes",
)
PORTABLE_SUITES = (
    "test_append_kv",
    "test_attention",
    "test_attention_gradient",
    "test_attention_options",
    "test_attention_paged",
    "test_attention_prefill",
    "test_attention_varlen",
    "test_causal_conv1d",
    "test_causal_conv1d_gradient",
    "test_causal_conv1d_update",
    "test_compat_kvcache",
    "test_fp8_gemm",
    "test_fp8_quantize",
    "test_gated_delta_rule_gradient",
    "test_grouped_gemm",
    "test_layer_norm",
    "test_layer_norm_quantize",
    "test_linear_attention",
    "test_merge_attention",
    "test_mxfp8_dequantize",
    "test_mxfp8_gemm",
    "test_mxfp8_groups",
    "test_mxfp8_prepare",
    "test_mxfp8_quantize",
    "test_nvfp4_cache",
    "test_nvfp4_dequantize",
    "test_nvfp4_gemm",
    "test_nvfp4_groups",
    "test_nvfp4_prepare",
    "test_nvfp4_quantize",
    "test_recurrent_gradient",
    "test_rms_norm",
    "test_rms_norm_quantize",
    "test_rotary",
    "test_ssd",
)
EMULATION_POLICIES = ("on_wait", "late_mma")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--intensity",
        type=int,
        choices=(1, 2, 3, 4),
        default=2,
        help="1: every feature and shape once; 2 (default): every pair of them; 3: every three; "
        "4: all combinations",
    )


def pytest_configure(config: pytest.Config) -> None:
    if "THUNDERKITTENS_CACHE" not in os.environ:
        # What is compiled for the emulator is that of this session: one folder for the processes
        # that test side by side, which inherit the variable.
        cache = tempfile.TemporaryDirectory(prefix="thunderkittens_cache_")
        os.environ["THUNDERKITTENS_CACHE"] = cache.name
        config.add_cleanup(cache.cleanup)
    for line in (
        "all_twins: is run with all of its twins at every intensity",
        "cases(function): the cases of a test, from the device and the intensity",
        "gpu: needs a CUDA device that the kernels are built for",
        "intensity(n): is left out below this intensity",
        "large: needs some 40 GB of GPU memory",
    ):
        config.addinivalue_line("markers", line)
    examples = {1: 25, 2: 75, 3: 300, 4: 2000}[config.getoption("intensity")]
    hypothesis.settings.register_profile(
        "tests",
        deadline=None,
        derandomize=True,
        database=None,
        max_examples=examples,
        suppress_health_check=[
            hypothesis.HealthCheck.function_scoped_fixture,
            hypothesis.HealthCheck.too_slow,
        ],
    )
    hypothesis.settings.load_profile("tests")


def missing_back_ends() -> dict[str, str]:
    """The back ends that cannot run here, with the reason."""
    from thunderkittens import _load, emulation

    missing = {}
    if emulation.problem is not None:
        missing["emulator"] = missing["portable"] = emulation.problem
    if not torch.cuda.is_available():
        missing["cuda"] = "torch sees no CUDA device"
    elif _load.cuda_problem is not None:
        missing["cuda"] = _load.cuda_problem
    return missing


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "device" not in metafunc.fixturenames:
        return
    names = list(BACK_ENDS)
    if metafunc.definition.get_closest_marker("gpu") is not None:
        names = ["cuda"]
    else:
        if metafunc.module.__name__ not in EMULATED_SUITES:
            names.remove("emulator")
        if metafunc.module.__name__ not in PORTABLE_SUITES:
            names.remove("portable")
    marker = metafunc.definition.get_closest_marker("cases")
    if marker is None:
        metafunc.parametrize("device", [BACK_ENDS[name] for name in names], ids=names)
        return
    intensity = metafunc.config.getoption("intensity")
    pairs, ids = [], []
    for name in names:
        for case in marker.args[0](BACK_ENDS[name], intensity):
            pairs.append((BACK_ENDS[name], case))
            ids.append(f"{name}-{case_id(case)}")
    metafunc.parametrize(("device", "case"), pairs, ids=ids)


def case_id(case: object) -> str:
    if isinstance(case, dict):
        return "-".join(case_id(value) for value in case.values())
    if isinstance(case, tuple):
        return "x".join(case_id(value) for value in case)
    return str(case).removeprefix("torch.")


_ran: Counter[str] = Counter()
_deselected: Counter[str] = Counter()
_record = launched.Record()
_not_launched: list[str] = []


def pytest_sessionstart() -> None:
    _record.install()


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """Of pytest-xdist: a process that ran tests has ended."""
    _record.launched |= set(map(tuple, getattr(node, "workeroutput", {}).get("launched", ())))


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Of a session of the whole suite: it fails where kernels have not run on the emulator."""
    config = session.config
    if hasattr(config, "workeroutput"):
        config.workeroutput["launched"] = sorted(_record.launched)
        return
    stopped = session.shouldstop or session.shouldfail
    if launched.is_whole_suite(config) and not stopped and "emulator" not in missing_back_ends():
        _not_launched[:] = launched.missing(_record.launched)
        if _not_launched and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED


def device_of(item: pytest.Item) -> str | None:
    """The name of the back end that a test needs."""
    device = item.callspec.params.get("device") if hasattr(item, "callspec") else None
    if item.get_closest_marker("gpu"):
        return "cuda"
    if isinstance(device, Portable):
        return "portable"
    if isinstance(device, Emulated) or item.get_closest_marker("emulator"):
        return "emulator"
    return device


def spared_by_turns(items: list[pytest.Item]) -> set[pytest.Item]:
    """The tests that the lowest intensity is spared. An emulated case may have twins: on the
    portable kernels, with the other of the 16-bit types, under another policy. It runs with half of
    them, as the squares of one colour on a chess-board, under the two policies that find the most;
    which colour is as good as drawn, but always the same."""
    cases: defaultdict[str, list[tuple[bool, int, pytest.Item]]] = defaultdict(list)
    numbers: defaultdict[tuple[str, str], dict[int, int]] = defaultdict(dict)  # of values
    for item in items:
        parameters = item.callspec.params if hasattr(item, "callspec") else {}
        if device_of(item) not in ("emulator", "portable") and "policy" not in parameters:
            continue
        if item.get_closest_marker("all_twins"):
            continue
        function, colour, further = item.nodeid.partition("[")[0], 0, False
        words = [function]
        for name, value in parameters.items():
            if name == "device":
                colour += isinstance(value, Portable)
            elif name == "portable" and isinstance(value, bool):
                colour += value
            elif name == "dtype" and value in (torch.bfloat16, torch.float16):
                colour += value is torch.float16
            elif name == "policy":
                further = value not in EMULATION_POLICIES
                colour += 0 if further else EMULATION_POLICIES.index(value)
            elif name == "case":
                words.append(case_id(value))
            else:
                seen = numbers[function, name]
                words.append(f"{name} {seen.setdefault(id(value), len(seen))}")
        cases["|".join(words)].append((further, colour % 2, item))
    spared = set()
    for case, twins in cases.items():
        chosen = [twin for twin in twins if not twin[0]] or twins
        if len({colour for _, colour, _ in chosen}) == 2:
            own = zlib.crc32(case.encode()) % 2
            chosen = [twin for twin in chosen if twin[1] == own]
        spared |= {item for *_, item in twins} - {item for *_, item in chosen}
    return spared


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    missing = missing_back_ends()
    memory = 0 if "cuda" in missing else torch.cuda.mem_get_info()[1]
    kept = []
    intensity = config.getoption("intensity")
    for item in items:
        device = device_of(item)
        if device in missing:
            _deselected[f"{device}: {missing[device]}"] += 1
        elif any(x.args[0] > intensity for x in item.iter_markers("intensity")):
            continue
        elif item.get_closest_marker("large") and memory < 60e9:
            _deselected["tests of large tensors: less than 60 GB of GPU memory"] += 1
        else:
            kept.append(item)
    if intensity == 1:
        spared = spared_by_turns(kept)
        kept = [item for item in kept if item not in spared]
    if len(kept) < len(items):
        chosen = set(kept)
        config.hook.pytest_deselected(items=[item for item in items if item not in chosen])
        items[:] = kept


def pytest_collection_finish() -> None:
    # Some twenty thousand tests, which the collector need not look at again.
    gc.collect()
    gc.freeze()


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.when == "call":
        parameters = report.nodeid.partition("[")[2].partition("]")[0].split("-")
        _ran[next((name for name in BACK_ENDS if name in parameters), "no back end needed")] += 1


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    terminalreporter.section("back ends")
    intensity = terminalreporter.config.getoption("intensity")
    terminalreporter.write_line(f"intensity {intensity}, torch {torch.__version__}")
    for device, count in sorted(_ran.items()):
        name = f" ({torch.cuda.get_device_name()})" if device == "cuda" else ""
        terminalreporter.write_line(f"{device}{name}: ran {count} tests")
    for reason, count in sorted(_deselected.items()):
        terminalreporter.write_line(f"deselected {count} tests of {reason}")
    if _record.launched:
        terminalreporter.write_line(f"emulated {len(_record.launched)} of the kernels")
    for kernel in _not_launched:
        terminalreporter.write_line(f"no test has run {kernel} on the emulator")


@pytest.fixture
def intensity(request: pytest.FixtureRequest) -> int:
    return request.config.getoption("intensity")


@pytest.fixture(autouse=True)
def shared_gpu(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory):
    """Processes that test side by side leave each other memory: none keeps much that it does not
    use, and only one at a time runs a test of large tensors."""
    if request.node.get_closest_marker("large") is None:
        yield
    else:
        folder = tmp_path_factory.getbasetemp()
        folder = folder.parent if "PYTEST_XDIST_WORKER" in os.environ else folder
        with (folder / "large").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield
            torch.cuda.empty_cache()
    if torch.cuda.is_initialized() and torch.cuda.memory_reserved() > 1 << 30:
        torch.cuda.empty_cache()


@pytest.fixture(autouse=True)
def hostile_environment(request: pytest.FixtureRequest):
    """Random numbers are reproducible, and fresh memory is NaN."""
    torch.manual_seed(zlib.crc32(request.node.nodeid.encode()))
    if "device" not in request.fixturenames:
        yield
        return
    torch.utils.deterministic.fill_uninitialized_memory = True
    torch.use_deterministic_algorithms(True, warn_only=True)
    device = request.getfixturevalue("device")
    if isinstance(device, Emulated):
        import thunderkittens as tk

        number = zlib.crc32(request.node.nodeid.encode())
        policy = EMULATION_POLICIES[number % len(EMULATION_POLICIES)]
        with tk.emulate(policy, seed=number, portable=isinstance(device, Portable)):
            yield
    else:
        yield
    torch.use_deterministic_algorithms(False)
