"""The source keeps the project's layout and rules.

An op's name is the key to all of its files; includes point one way; torch's headers, pybind11 and
inline assembly stay where they belong; kernels reach the hardware through the tile library alone;
and files stay readable. Needs the source tree only, nothing built.
"""

from __future__ import annotations

import ast
import graphlib
import re
from pathlib import Path

import pytest

from helpers.source import (
    CPP,
    CPP_FILES,
    DOCUMENTS,
    LIBRARY_FILES,
    PYTHON_FILES,
    ROOT,
    code_of,
    files,
    hits,
    includes,
    name,
)

MAX_LINES, MAX_COLUMNS = 600, 100


# ---- an op is one file of each kind ----


def schema_names() -> set[str]:
    text = (ROOT / "csrc/library.cpp").read_text()
    return set(re.findall(r'"(\w+)\(', text))


def ops() -> set[str]:
    """The ops: schema names without the twins `<op>_forward` and `<op>_backward`."""
    return {re.sub(r"_(forward|backward)$", "", schema) for schema in schema_names()}


def stems(folder: str, prefix: str = "") -> set[str]:
    """Names of the ops that have a file in a folder."""
    return {
        path.stem.removeprefix(prefix)
        for path in (ROOT / folder).glob(f"{prefix}*.py")
        if not path.stem.startswith("_")
    }


def families() -> list[Path]:
    """The folders of csrc/ that have a choose.cpp, themselves or in a room."""
    csrc = ROOT / "csrc"
    parts = {path.relative_to(csrc).parts[0] for path in csrc.rglob("choose.cpp")}
    return [csrc / part for part in sorted(parts)]


def family_sources() -> list[Path]:
    """Of each family the op files, beside which there are choose*.cpp, the choice of kernels, and
    emulated*.cpp, the op on the emulator."""
    return [
        p
        for family in families()
        for p in sorted(family.rglob("*.cpp"))
        if not p.name.startswith(("choose", "emulated"))
    ]


def test_every_op_has_a_schema():
    assert {"attention", "gemm"} <= ops() <= schema_names()


@pytest.mark.parametrize("folder", ["python/thunderkittens/ops", "python/thunderkittens/reference"])
def test_python_files_are_the_ops(folder):
    assert stems(folder) == ops()


def test_cpp_files_are_the_ops():
    """An op file has the name of an op or a schema, or of a direction; together they have all."""
    assert {path.stem for path in family_sources()} <= ops() | schema_names() | {"backward"}
    text = "".join(path.read_text() for path in family_sources())
    assert sorted(re.findall(r'm\.impl\("(\w+)"', text)) == sorted(schema_names())


def test_benchmarks_are_the_ops():
    assert stems("benchmarks", "bench_") == ops()


def test_every_op_has_a_test():
    assert ops() <= stems("tests", "test_")


def test_families_have_the_same_kinds_of_files():
    for family in families():
        present = {path.name for path in family.rglob("*")}
        assert {f"{family.name}.h", "choose.cpp", "instances.txt"} <= present, family.name
        assert not list(family.rglob("*.cu")), "instances are listed, not written by hand"


def test_modules_of_ops_import_one_way():
    """No module of ops/ imports, by others or within a function, one that imports it."""
    folder = ROOT / "python/thunderkittens/ops"
    modules = {path.stem: ast.parse(path.read_text()) for path in folder.glob("*.py")}
    graph = {
        module: {
            target
            for node in ast.walk(tree)
            if isinstance(node, ast.ImportFrom) and node.level == 1
            for target in ([node.module] if node.module else [name.name for name in node.names])
        }
        for module, tree in modules.items()
    }
    assert {"_registration", "_gemm_product"} <= set().union(*graph.values()) <= modules.keys()
    order = graphlib.TopologicalSorter(graph)
    order.prepare()  # CycleError names a circle


# ---- includes point one way ----


def layer(path: str) -> int:
    """Rank of a file of the source tree; a file includes its own layer and lower ones."""
    ranks = {
        "kittens/arch/": 0,
        "kittens/host/": 0,
        "kittens/types/": 1,
        "kittens/ops/": 2,
        "kittens/kittens.cuh": 3,
        "kittens/prototype.cuh": 5,
        "kittens/p": 4,  # pipeline and python
        "csrc/": 6,
    }
    return next(rank for start, rank in ranks.items() if path.startswith(start))


def test_includes_point_one_way():
    wrong = []
    for path in LIBRARY_FILES:
        for what, quoted in includes(path):
            if not quoted:
                continue
            beside = (path.parent / what).resolve()
            target = beside if beside.exists() else ROOT / what
            assert target.exists(), f"{name(path)} includes {what}, which does not exist"
            if layer(name(target)) > layer(name(path)):
                wrong.append(f"{name(path)} includes {name(target)}")
    assert not wrong


# The rooms of families, each after those whose files it includes.
ROOMS = {
    "gemm": {
        "common": set(),
        "quantize": {"common"},
        "dense": {"common"},
        "portable": {"common", "dense"},
        "backward": {"common", "dense", "portable"},
        "unaligned": {"common", "dense"},
        "grouped": {"common", "dense", "portable"},
        "fp8": {"common", "quantize", "dense", "portable"},
        "fused_dequant": {"common", "quantize", "dense"},
        "nvfp4": {"common", "quantize", "dense", "portable", "fused_dequant"},
        "mxfp8": {"common", "quantize", "dense", "grouped", "fp8", "fused_dequant", "nvfp4"},
        "swap_ab": {"common", "quantize", "dense", "fp8", "nvfp4", "mxfp8"},
    },
    "attention": {
        "common": set(),
        "forward": {"common"},
        "backward": {"common"},
        "decode": {"common", "forward"},
        "portable": {"common", "forward", "backward", "decode"},
    },
    "linear_attention": {"common": set(), "based": {"common"}, "lolcats": {"common", "based"}},
    "recurrent": {
        "common": set(),
        "gated_delta_rule": {"common"},
        "gated_delta_rule_backward": {"gated_delta_rule"},
        "ssd": {"common"},
        "linear_attention": {"common", "ssd"},
        "gradient": {"common", "ssd", "linear_attention"},
    },
}
ROOMS["linear_attention"]["lolcats_portable"] = {"common", "based", "lolcats"}
MAX_FILES_OF_A_ROOM = 30


def test_rooms_include_one_way():
    for rooms in ROOMS.values():
        before: set[str] = set()
        for room, others in rooms.items():
            assert others <= before, f"{room} includes rooms that come after it"
            before.add(room)
    wrong = []
    for path in LIBRARY_FILES:
        here = re.match(r"csrc/(\w+)/(?:(\w+)/)?", name(path))
        if here is None or here[1] not in ROOMS:
            continue
        assert here[2] in ROOMS[here[1]], f"{name(path)} is in no room"
        allowed = {here[2], *ROOMS[here[1]][here[2]]}
        for what, _ in includes(path):
            there = re.match(rf"csrc/{here[1]}/(\w+)/", what)
            if there and there[1] not in allowed:
                wrong.append(f"{name(path)} includes {what}")
    assert not wrong


@pytest.mark.parametrize("family", ROOMS)
def test_rooms_are_small(family):
    for room in ROOMS[family]:
        count = len([p for p in (ROOT / "csrc" / family / room).rglob("*") if p.is_file()])
        assert 0 < count <= MAX_FILES_OF_A_ROOM, f"{family}/{room} has {count} files"


@pytest.mark.parametrize("family", families(), ids=lambda family: family.name)
def test_readme_of_a_family_is_complete(family):
    """It names every file of kernels, and none that does not exist."""
    named = set(re.findall(r"[\w/*]+\.(?:cuh|cu|h|cpp|py)\b", (family / "README.md").read_text()))
    assert not [what for what in named if not any(any(r.glob(what)) for r in (family, ROOT))]
    kernels = {path.relative_to(family).as_posix() for path in family.rglob("*.cuh")}
    assert not kernels - named


def test_family_headers_are_plain_host_code():
    wrong = [
        f"{name(path)} includes {what}"
        for path in LIBRARY_FILES
        if re.match(r"csrc/(?!autograd/|python/)", name(path))
        and (path.suffix == ".h" or path.name == "choose.cpp")
        for what, _ in includes(path)
        if path.name != "tensor.h" and re.match(r"torch/|cuda|kittens/.*\.cuh|pybind11/", what)
    ]
    assert not wrong


# Of a library of its own, which is built for one version of torch.
AUTOGRAD = files(("csrc/autograd",), CPP)


def test_an_op_has_one_body():
    """In <op file>_body.h, a template over the back end: the op file and an emulated*.cpp beside it
    hand their arguments to it, and allocate, choose and launch nothing themselves."""
    sources = family_sources()
    bodies = {path.with_name(f"{path.stem}_body.h") for path in sources}
    assert bodies == {path for family in families() for path in family.rglob("*_body.h")}
    registrations = set(sources)
    for source in sources:
        body = (name(source.with_name(f"{source.stem}_body.h")), True)
        assert body in includes(source), name(source)
        emulated = [p for p in source.parent.glob("emulated*.cpp") if body in includes(p)]
        assert len(emulated) == 1, name(source)
        registrations.add(emulated[0])
    assert not hits(r"\b(unsupported|choose\w*|launch\w*|allocate)\(", sorted(registrations))


def test_torch_headers_are_only_in_op_files():
    allowed = {ROOT / "csrc/library.cpp", ROOT / "csrc/common/tensor.h", *family_sources()}
    allowed |= set(AUTOGRAD)
    # What the op files of a family share.
    allowed |= set((ROOT / "csrc").rglob("operands.h"))
    wrong = [
        f"{name(path)} includes {what}"
        for path in LIBRARY_FILES
        if path not in allowed
        for what, _ in includes(path)
        if re.match(r"(torch|ATen|c10|caffe2)/|csrc/common/tensor\.h", what)
    ]
    assert not wrong


def test_only_the_stable_part_of_torch_is_used():
    wrong = [
        f"{name(path)} includes {what}"
        for path in sorted({*LIBRARY_FILES} - {*AUTOGRAD})
        for what, _ in includes(path)
        if re.match(r"(torch|ATen|c10|caffe2)/", what)
        and not re.match(r"torch/(csrc/stable|headeronly|csrc/inductor/aoti_torch/c)/", what)
    ]
    assert not wrong


def test_libraries_use_no_streams():
    """Of C++: a library built by another compiler than torch ended in a segmentation fault where it
    used one, and every file that includes them compiles longer."""
    streams = r"<(sstream|iostream|fstream|iomanip|istream|ostream)>"
    assert not hits(rf"^\s*#\s*include\s*{streams}", LIBRARY_FILES)


def test_pybind11_is_only_in_the_module():
    wrong = [
        name(path)
        for path in LIBRARY_FILES
        if not name(path).startswith("csrc/python/")
        and any(what.startswith("pybind11/") for what, _ in includes(path))
    ]
    assert not wrong


def test_tile_library_includes_cuda_and_std_only():
    """The emulated back end may use the host's system too, the binding to Python that's header."""
    cuda_and_std = r"[a-z_]+|cuda[a-z0-9_]*\.h(pp)?"
    system = r"(ucontext|dlfcn|cxxabi|Python)\.h|(sys|sanitizer)/\w+\.h"
    wrong = [
        f"{name(path)} includes {what}"
        for path in LIBRARY_FILES
        if name(path).startswith("kittens/")
        for what, quoted in includes(path)
        if not quoted and not re.fullmatch(cuda_and_std, what)
        if not {"emulated", "python"} & {*path.parts} or not re.fullmatch(system, what)
    ]
    assert not wrong


# ---- the hardware is behind kittens/arch ----

OUTSIDE_ARCH = [p for p in LIBRARY_FILES if not name(p).startswith("kittens/arch/")]
DEVICE_CODE = [p for p in OUTSIDE_ARCH if p.suffix in (".cuh", ".cu")]


def test_inline_assembly_is_only_in_arch():
    assert not hits(r"\basm\b", OUTSIDE_ARCH)


def test_back_ends_have_the_same_functions():
    """A function that one back end alone has would compile on it alone."""
    pattern = (
        r"^(?:\[\[noreturn\]\] )?(?:__device__ __forceinline__|inline|constexpr)\b[^(=;]*?(\w+)\("
    )
    inside = {"allow_shared_bytes", "cache_policy_bits", "shuffle_words"}
    functions = [
        {
            function
            for path in (ROOT / "kittens/arch" / folder).glob("*.cuh")
            for part in code_of(path).split("namespace arch {")[1:]
            for function in re.findall(pattern, part, re.M)
        }
        for folder in ("cuda", "emulated")
    ]
    assert len(functions[0]) > 80
    assert functions[0] - functions[1] <= inside


def test_a_feature_of_the_hardware_is_a_pair_of_files():
    """One file in each of the two back ends, and nothing beside these but what includes them."""
    arch = ROOT / "kittens/arch"
    assert [path.name for path in arch.iterdir() if path.is_file()] == ["arch.cuh"]
    umbrella = [what for what, _ in includes(arch / "arch.cuh")]
    for folder in ("cuda", "emulated"):
        there = {f"{folder}/{path.name}" for path in (arch / folder).glob("*.cuh")}
        assert there == {what for what in umbrella if what.startswith(f"{folder}/")}
    assert [what.replace("cuda/", "emulated/") for what in umbrella if "cuda/" in what] == [
        what for what in umbrella if "emulated/" in what
    ]
    text = code_of(arch / "arch.cuh")
    assert not [line for line in text.split("\n") if line.strip() and line[0] != "#"]


def test_the_emulated_back_end_knows_its_machine_by_calls_alone():
    """The pairs of `cuda/` are thin; what they call is declared in calls.h, and behind that is the
    machine, which a library compiles once."""
    folder = ROOT / "kittens/arch/emulated"
    beside = {path.name for path in folder.iterdir() if path.suffix != ".cuh"}
    assert beside == {"calls.h", "machine", "platform.h"}
    wrong = [
        f"{name(path)} includes {what}"
        for path in sorted({*folder.glob("*.cuh"), folder / "platform.h"})
        for what, quoted in includes(path)
        if quoted and what not in ("calls.h", "platform.h") and not what.endswith(".cuh")
    ]
    assert not wrong
    assert not hits(r"\b(machine|self\(\)|Thread|Block|Warp|Cluster)\b", [*folder.glob("*.cuh")])
    heavy = {"functional", "map", "deque", "random", "mutex", "thread", "vector", "algorithm"}
    assert not heavy & {what for what, _ in includes(folder / "calls.h")}


def test_no_file_of_a_back_end_knows_the_other():
    assert not hits(
        r"__CUDACC__|\bKITTENS_BACKEND\b|\bon_cpu\b", files(("kittens/arch/cuda",), CPP)
    )
    assert not hits(r"\bKITTENS_BACKEND\b|\bon_gpu\b", files(("kittens/arch/emulated",), CPP))


def test_back_ends_are_told_apart_only_in_arch():
    assert not hits(r"#\s*(if|ifdef|ifndef|elif)\b.*(__CUDA_ARCH__|EMULAT)", OUTSIDE_ARCH)


def test_kernels_reach_memory_and_threads_through_the_library():
    builtins = (
        r"__shared__|__shfl|__sync(threads|warp)|__cvta|\batomic[A-Z]\w*\(|__nanosleep|__ld[cg]"
    )
    assert not hits(builtins, DEVICE_CODE)


def test_launches_go_through_the_library():
    assert not hits(r"<<<|cudaLaunchKernel(?!Ex)", OUTSIDE_ARCH)
    assert not hits(r"cudaLaunch|cuLaunch", [p for p in OUTSIDE_ARCH if "host" not in p.parts])


# Files whose grids have more than one dimension, and what keeps the others short.
SHORT_DIMENSIONS = {
    "csrc/attention/decode/append_sm90.cuh": "4 KB each of a token",
    "csrc/gemm/common/align_rows_sm90.cuh": "two operands",
    "csrc/gemm/dense/cluster_tile_types_sm90.cuh": "tiles, no more than multiprocessors",
    "csrc/gemm/common/reduce_workspace_sm90.cuh": "parts of k",
    "csrc/gemm/dense/prologue_sm90.cuh": "tiles, no more than multiprocessors",
    "csrc/gemm/unaligned/short_k_sm90.cuh": "rows of tiles and matrices, see fits_short_k()",
    "csrc/gemm/dense/single_wave_64x64_sm90.cuh": "tiles, no more than multiprocessors",
    "csrc/gemm/dense/single_wave_sm90.cuh": "tiles, no more than multiprocessors",
    "csrc/gemm/dense/split_k_sm90.cuh": "parts of k",
    "csrc/gemm/fp8/split_k_epilogue_sm90.cuh": "parts of k",
    "csrc/gemm/fp8/split_k_sm90.cuh": "parts of k",
    "csrc/gemm/fp8/split_k_types_sm90.cuh": "columns of tiles, see for_each_split_k()",
    "csrc/linear_attention/based/backward_prepost_sm90.cuh": "two results",
    "csrc/linear_attention/based/scan_sm90.cuh": "parts of a state",
    "csrc/linear_attention/lolcats/kv_cache_sm90.cuh": "parts of a cache",
    "csrc/linear_attention/lolcats/forward_sm90.cuh": "segments, at most 256",
    "csrc/linear_attention/lolcats/feature_map_gradient_sm90.cuh": "two maps",
    "csrc/linear_attention/lolcats/segment_states_sm90.cuh": "segments, at most 256",
}


def test_only_the_first_dimension_of_a_grid_counts_what_calls_bring():
    """The others end at 65535."""
    kernels = [p for p in DEVICE_CODE if p.relative_to(ROOT).parts[0] == "csrc"]
    found = hits(r"\b(blockIdx|gridDim)\s*\.\s*[yz]\b", kernels)
    assert {hit.partition(":")[0] for hit in found} == set(SHORT_DIMENSIONS)


def test_ops_allocate_in_one_place():
    """Where an exception of PyTorch's passes (tensor.h); within the stable ABI it would be lost."""
    creating = "empty|empty_like|new_empty|new_zeros|full|contiguous|clone|pad|sum|reshape|to"
    assert not hits(rf"torch::stable::({creating})\s*\(", LIBRARY_FILES)
    calls = hits(r"aoti_torch_empty_strided|torch_call_dispatcher|aoti_torch_clone", LIBRARY_FILES)
    assert {call.partition(":")[0] for call in calls} == {"csrc/common/tensor.h"}


def test_library_code_neither_waits_nor_exits_nor_prints():
    assert not hits(r"cuda(Device|Stream|Event)Synchronize", LIBRARY_FILES)
    assert not hits(r"\b(std::)?(exit|abort|_exit|quick_exit)\s*\(", LIBRARY_FILES)
    assert not hits(r"std::(cout|cerr|clog)|\bf?printf\s*\(", LIBRARY_FILES)


def test_no_kernel_is_instantiated_itself():
    """nvcc 13 makes explicit instantiations of kernels static: launchers are instantiated."""
    kernels = hits(r"\b__global__\b", LIBRARY_FILES)
    assert len(kernels) > 20
    text = "".join((family / "instances.txt").read_text() for family in families())
    assert not re.search(r"\w+_kernel\b", text)


# ---- a name means one thing ----


def definitions(path: Path) -> set[str]:
    """Types, functions (with the types of their parameters) and constants that a file defines for
    others: at the level of a namespace that has a name."""
    code = re.sub(r"^\s*#.*(?:\\\n.*)*", "", code_of(path), flags=re.MULTILINE)
    found, scopes, start = set(), [""], 0
    for mark in re.finditer(r"[{};]", code):
        header = " ".join(code[start : mark.start()].split())
        inside = scopes[-1]
        if mark[0] == "{":
            space = re.search(r"\bnamespace( [\w:]+|)$", header)
            scopes.append(f"{inside}{space[1].strip()}::" if space and inside is not None else None)
        elif mark[0] == "}" and len(scopes) > 1:
            scopes.pop()
        if inside is not None and "::::" not in f"::{inside}" and mark[0] != "}":
            found |= {inside + x for x in defined(header, mark[0] == "{")}
        start = mark.end()
    return found


def defined(header: str, opens: bool) -> set[str]:
    """What the text before an opening brace or a semicolon defines."""
    template = ""
    if header.startswith("template <"):
        end = len("template <")
        while header[:end].count("<") > header[:end].count(">"):
            end += 1
        template, header = header[:end], header[end:].strip()
    if re.match(r"(static|extern|using|friend|typedef|namespace)\b", header):
        return set()
    kind = re.match(r"(?:struct|class|union|enum(?: class| struct)?)\b((?:[^:]|::)*)", header)
    if kind:
        names = re.findall(r"[\w:]+(?:<.*>)?$", kind[1].removesuffix(" final").strip())
        return set(names) if opens else set()
    if re.search(r"\bconstexpr\b[^(]*=", header):
        return set(re.findall(r"(\w+)(?:\[\w*\])? = ", header))
    # A launch bound, an attribute and a requirement have parentheses, too.
    header = re.sub(r"__\w+__\((?:[^()]|\([^()]*\))*\)", "", header)
    function = re.search(r"([~\w]+(?: ?[^\w\s(]+)?) ?\((.*)\)", header)
    if not (opens and function) or function[1].isupper():  # a macro
        return set()
    parameters = re.sub(r" ?\b\w+(?= ?(,|$|=))", "", function[2])
    return {f"{template}{function[1]}({parameters})"}


def test_a_name_means_one_thing():
    """Of two definitions of one name that files compiled on their own see, the linker keeps one
    for both where they are templates or inline, without a word."""
    places: dict[str, list[str]] = {}
    for path in LIBRARY_FILES:
        if not name(path).startswith("kittens/arch/"):  # twice, in back ends' own namespaces
            for what in definitions(path):
                places.setdefault(what, []).append(name(path))
    assert len(places) > 500
    assert not {what: where for what, where in places.items() if len(where) > 1}


# ---- files stay readable ----


def faults(path: Path) -> list[str]:
    text = path.read_text()
    lines = text.split("\n")
    long = [number for number, line in enumerate(lines, 1) if len(line) > MAX_COLUMNS]
    markers = "|".join(("TO" + "DO", "FIX" + "ME", "XX" + "X", "HA" + "CK"))
    unfinished = re.search(rf"\b({markers})\b", text)
    found = {
        "characters that are not ASCII": not text.isascii(),
        f"{len(lines)} lines": len(lines) > MAX_LINES,
        f"lines over {MAX_COLUMNS} columns: {long}": long,
        "tabs": "\t" in text,
        "no newline at the end": text != "" and not text.endswith("\n"),
        f"unfinished: {unfinished}": unfinished,
    }
    return [f"{name(path)}: {fault}" for fault, there in found.items() if there]


def test_files_are_readable():
    assert not [fault for path in (*CPP_FILES, *PYTHON_FILES) for fault in faults(path)]


def test_cpp_files_say_what_they_are():
    """A file starts with a short paragraph."""
    files = [p for p in CPP_FILES if p.suffix != ".cu"]
    assert not [name(p) for p in files if not p.read_text().startswith("//")]


def test_python_files_say_what_they_are():
    """A module starts with a docstring."""
    texts = {p: p.read_text() for p in PYTHON_FILES if p.suffix == ".py"}
    assert not [
        name(p) for p, t in texts.items() if t.strip() and not ast.get_docstring(ast.parse(t))
    ]


# ---- documents lead somewhere ----


def links(path: Path) -> list[str]:
    """Targets of a document's links into this repository."""
    return re.findall(r"\]\((?!https?:)([^)\s]+)\)", path.read_text())


def anchors(path: Path) -> set[str]:
    """What a link may name behind a "#": the headings as GitHub writes them."""
    headings = re.findall(r"^#+ (.*)$", path.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("path", DOCUMENTS, ids=name)
def test_links_lead_somewhere(path):
    for link in links(path):
        where, _, anchor = link.partition("#")
        target = path.parent / where if where else path
        assert target.exists(), link
        assert not anchor or anchor in anchors(target), link


def test_every_part_of_the_performance_notes_is_listed():
    docs = ROOT / "docs"
    for folder in ("performance", "experiments"):
        parts = {f"{folder}/{path.name}" for path in (docs / folder).glob("*.md")}
        assert parts
        assert parts <= set(links(docs / "performance.md"))


def test_summaries_are_short_and_logs_are_marked():
    for path in (ROOT / "docs" / "performance").glob("*.md"):
        assert len(path.read_text().splitlines()) <= 120, name(path)
    for path in (ROOT / "docs" / "experiments").glob("*.md"):
        assert path.read_text().splitlines()[2].startswith("> A log, "), name(path)
