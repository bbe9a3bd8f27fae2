"""The mutations of tools/mutate.py: where they are in a source, and how they get into it."""

from __future__ import annotations

import collections
import itertools
import re
import subprocess
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
CLASSES = ("wait", "phase", "early", "fence", "barrier", "bytes", "boundary", "index", "flag")

# ---- the mutations of a file ----


@dataclass
class Mutation:
    kind: str
    path: str
    line: int
    text: str  # the source's line
    what: str
    edits: list[tuple[int, int, str]]  # position, order at the same position, what is inserted
    number: int = -1
    occurrence: int = 0  # of the same in the same file

    @property
    def base(self) -> str:
        return f"{self.path} | {self.kind} | {self.what} | {self.text}"

    @property
    def key(self) -> str:
        """What names it, also after other lines have changed."""
        return self.base + (f" #{self.occurrence}" if self.occurrence else "")

    def rank(self, seed: int) -> int:
        return zlib.crc32(f"{seed} {self.key}".encode())


@dataclass
class Source:
    path: str
    text: str
    code: str = ""  # of the same length: comments, strings and preprocessor lines are blank
    constants: set[str] = field(default_factory=set)
    found: list[Mutation] = field(default_factory=list)

    def __post_init__(self) -> None:
        def blank(match: re.Match) -> str:
            return re.sub(r"[^\n]", " ", match[0])

        pattern = r'//[^\n]*|"(?:\\.|[^"\\\n])*"|^[ ]*#(?:[^\n]*\\\n)*[^\n]*'
        self.code = re.sub(pattern, blank, self.text, flags=re.MULTILINE)
        self.constants = set(re.findall(r"constexpr \w+ (\w+) =", self.code))

    def closing(self, at: int) -> int:
        """Behind the parenthesis that closes the one at `at`."""
        depth = 0
        for i in range(at, len(self.code)):
            depth += (self.code[i] in "([{") - (self.code[i] in ")]}")
            if depth == 0:
                return i + 1
        raise ValueError(f"{self.path}: a parenthesis without its end")

    def arguments(self, at: int) -> list[tuple[int, int]]:
        """Of the call whose parenthesis opens at `at`."""
        end = self.closing(at) - 1
        cuts, depth = [at], 0
        for i in range(at + 1, end):
            depth += (self.code[i] in "([{") - (self.code[i] in ")]}")
            if depth == 0 and self.code[i] == ",":
                cuts.append(i)
        cuts.append(end)
        spans = []
        for first, last in itertools.pairwise(cuts):
            piece = self.code[first + 1 : last]
            begin = first + 1 + len(piece) - len(piece.lstrip())
            spans.append((begin, first + 1 + len(piece.rstrip())))
        return spans

    def is_constant(self, at: int) -> bool:
        """Whether the place is in a constant expression or in a declaration of templates."""
        start = max(self.code.rfind(c, 0, at) for c in ";{}") + 1
        words = (
            r"\b(constexpr|static_assert|template|requires|using|enum|concept|struct|operator)\b"
        )
        return re.search(words, self.code[start:at]) is not None

    def before(self, at: int) -> str:
        return self.code[:at].rstrip()[-8:]

    def add(self, kind: str, at: int, what: str, *edits: tuple[int, int, str]) -> None:
        line = self.text.count("\n", 0, at) + 1
        text = self.text.splitlines()[line - 1].strip()
        self.found.append(Mutation(kind, self.path, line, text, what, list(edits)))

    def calls(self, names: str) -> Iterator[tuple[int, int, int]]:
        """Begin, parenthesis and end of calls."""
        pattern = rf"(?<![\w.:>])(?:\w+(?:\.|::|->))*?(?:{names})(?:<[^;(){{}}]*>)?\("
        for match in re.finditer(pattern, self.code):
            yield match.start(), match.end() - 1, self.closing(match.end() - 1)

    def statements(self, names: str) -> Iterator[tuple[int, int, int]]:
        """Calls that are statements, or all but operands of a comma."""
        for begin, opens, end in self.calls(names):
            before, after = self.before(begin), self.code[end:].lstrip()[:1]
            word = re.search(r"\b(else|return)$", before)
            ended = after == ";" or (after in ",)" and before.endswith((",", ";")))
            if ended and (before.endswith((";", "{", "}", ")", ",")) or word):
                yield begin, opens, end

    def drop(self, kind: str, names: str) -> None:
        for begin, _, end in self.statements(names):
            opening = (begin, 2, "(tk_mutant(@) ? (void)0 : (void)(")
            self.add(kind, begin, "left out", opening, (end, 0, "))"))


WAITS = (
    r"(?:kittens::)?wait|mbarrier_wait|cluster::wait|cluster_wait|wait_cluster|meet_cluster"
    r"|wait_for_\w+|mma_async_wait|wgmma_wait"
    r"|store_async(?:_read)?_wait|cp_async_wait|await\w*|next_stage|skip_block"
)
BARRIERS = r"warpgroup::sync|sync_block|named_barrier_\w+|cluster::sync|sync_own"
FENCES = r"fence_\w+|mbarrier_init_fence|mma_fence"
HANDS_BACK = r"release\w*|arrive|cluster::arrive|mbarrier_arrive\w*|named_barrier_arrive|pass_turn"
FLAGS = r"store_release_\w+|atomic_add_release\w*|mark"


def find_waits(s: Source) -> None:
    s.drop("wait", WAITS)


def find_fences(s: Source) -> None:
    s.drop("fence", FENCES)


def find_barriers(s: Source) -> None:
    s.drop("barrier", BARRIERS)
    s.drop("barrier", "sync_warp")


def find_phases(s: Source) -> None:
    for begin, opens, _ in s.statements("(?:kittens::)?wait|wait_cluster"):
        spans = s.arguments(opens)
        if len(spans) == 2:
            first, last = spans[1]
            s.add("phase", begin, "phase", (first, 3, "("), (last, 0, ") ^ tk_mutant(@)"))
    for match in re.finditer(r"phase \^= 1", s.code):
        s.add("phase", match.start(), "phase kept", (match.end(), 0, " ^ tk_mutant(@)"))
    index = r"(?<=[\w\])])\[((?:\w+\.)?(?:stage|slot|previous))\]"
    for match in re.finditer(index + r"|release\w*\((previous|ring\.stage|stage)\)", s.code):
        group = 1 if match[1] else 2
        if not s.is_constant(match.start()):
            opening = (match.start(group), 3, "tk_other(@, ")
            s.add(
                "phase", match.start(), f"stage {match[group]}", opening, (match.end(group), 0, ")")
            )
    s.drop("phase", r"advance")
    for match in re.finditer(r"\+\+\w+ == (?=[\w.:]*\bstages\b)", s.code):
        s.add("phase", match.start(), "a stage fewer", (match.end(), 3, "-tk_mutant(@) + "))


def find_early(s: Source) -> None:
    waits = [*s.statements(WAITS), *s.statements(BARRIERS), *s.statements(FENCES)]
    for begin, _, end in waits:
        if not s.before(begin).endswith((";", "{", "}")) or s.code[end] != ";":
            continue
        # One statement, with its condition, directly behind.
        pattern = rf"\s*((?:if \([^;{{}}]*\) )?(?:\w+(?:\.|::|->))*(?:{HANDS_BACK}|{FLAGS})\()"
        match = re.compile(pattern).match(s.code, end + 1)
        if not match:
            continue
        after = s.closing(match.end() - 1)
        if s.code[after] != ";" or s.code[after + 1 :].lstrip().startswith("else"):
            continue
        moved = s.code[match.start(1) : after + 1]
        kind = "flag" if re.search(FLAGS + r"\(", match[1]) else "early"
        first = (begin, 1, "{ if (tk_mutant(@)) { " + " ".join(moved.split()) + " } } ")
        what = "before " + " ".join(s.code[begin:end].split())
        s.add(kind, match.start(1), what, first, (match.start(1), 1, "if (!tk_mutant(@)) "))
    for match in re.finditer(r"\bmma_async_wait<([\w:]+)>\(", s.code):
        opening = s.code.rfind(" ", 0, match.start()) + 1
        end = s.closing(match.end() - 1)
        if not s.before(opening).endswith((";", "{", "}", ")", ",")) or s.code[end] != ";":
            continue
        other = (
            s.code[opening : match.start(1)] + match[1] + " + 1>" + s.code[match.end() - 1 : end]
        )
        wrap = (opening, 2, f"(tk_mutant(@) ? (void)({other}) : (void)(")
        s.add("early", opening, "one more product in flight", wrap, (end, 0, "))"))


def find_bytes(s: Source) -> None:
    for begin, opens, _ in s.statements(r"expect_bytes"):
        first, last = s.arguments(opens)[-1]
        sign = "-" if zlib.crc32(s.code[first:last].encode()) % 2 else ""
        s.add("bytes", begin, f"{sign}16", (first, 3, f"{sign}16 * tk_mutant(@) + "))
    s.drop("bytes", "tma::expect")
    for begin, opens, _ in s.statements("init_semaphore"):
        first, last = s.arguments(opens)[-1]
        if s.code[first:last] != "1":
            s.add("bytes", begin, "an arrival fewer", (first, 3, "-tk_mutant(@) + "))


def find_boundaries(s: Source) -> None:
    for match in re.finditer(r" (<|<=|>|>=) (?=([\w(:][\w:.]*))", s.code):
        constant = re.match(r"\d+$|[A-Z][A-Z_]+|(K|C|Kernel|\w+)(::|\.)\w+$", match[2])
        other = r"\d\.\d*f?$|(?!Kernel)[A-Z][a-z]\w+::"  # floating-point numbers, enumerations
        if s.is_constant(match.start()) or re.search(other, match[2]):
            continue
        line = s.code[s.code.rfind("\n", 0, match.start()) + 1 : match.start()]
        if "for (" in line and (match[2] in s.constants or (constant and match[1] == "<")):
            continue
        sign = "-" if zlib.crc32(match[2].encode() + line.encode()) % 2 else ""
        what = f"{match[1]} {sign or '+'}1"
        s.add("boundary", match.start(), what, (match.end(), 3, f"{sign}tk_mutant(@) + "))
    for begin, opens, _ in s.calls(r"(?<![\w:])(?:::)?(?:min|max)"):
        if not s.is_constant(begin) and "std::" not in s.code[begin - 5 : opens]:
            first, last = s.arguments(opens)[-1]
            sign = "-" if zlib.crc32(s.code[begin:last].encode()) % 2 else ""
            what = f"limit {sign or '+'}1"
            opening = (first, 3, f"tk_moved(@, {sign or '+'}1, ")
            s.add("boundary", begin, what, opening, (last, 0, ")"))


def find_indices(s: Source) -> None:
    for begin, opens, _ in s.calls("elements"):
        if "<" in s.code[begin:opens]:  # a type's name
            continue
        for i, (first, last) in enumerate(s.arguments(opens)):
            if s.code[first:last] != "0" and not s.is_constant(begin):
                s.add("index", begin, f"coordinate {i}", (first, 3, "tk_mutant(@) + "))
    for match in re.finditer(r"\bTmaCoordinates\{", s.code):
        for i, (first, last) in enumerate(s.arguments(match.end() - 1)):
            if s.code[first:last] != "0":
                s.add("index", first, f"coordinate {i}", (first, 3, "tk_mutant(@) + "))
    for _, opens, _ in s.calls(r"map_shared_rank|arrive_remote\w*"):
        first, last = s.arguments(opens)[-1]
        if not s.is_constant(opens):
            s.add("index", first, "block", (first, 3, "tk_other(@, "), (last, 0, ")"))
    for match in re.finditer(r"(?:\b1u|blocks|ends) (?:<<|>>) (?=[a-z(])", s.code):
        if not s.is_constant(match.start()):
            s.add("index", match.start(), "bit", (match.end(), 3, "tk_mutant(@) + "))
    for match in re.finditer(r" [/%] ([a-z]\w*(?:(?:\.|::)\w+)*)(?![\w(\[<.:])", s.code):
        if not s.is_constant(match.start()) and match[1] not in s.constants:
            wrap = (match.start(1), 3, "(tk_mutant(@) + ")
            s.add("index", match.start(), match[0].strip(), wrap, (match.end(1), 0, ")"))
    named = (
        r"\b(scales?|lse|sink|bias|slopes?|alpha|beta|maxima|denominators?|partial_\w+) \+ (?!=)"
    )
    for match in re.finditer(named, s.code):
        if not s.is_constant(match.start()):
            s.add("index", match.start(), f"into {match[1]}", (match.end(), 3, "tk_mutant(@) + "))


def find_flags(s: Source) -> None:
    for plain, names in (
        ("store", "arch::store_release_global"),
        ("load", "arch::load_acquire_global"),
    ):
        for begin, opens, end in s.calls(names):
            other = f"arch::{plain}_global{s.code[opens:end]}"
            wrap = (begin, 2, f"(tk_mutant(@) ? ({other}) : (")
            s.add("flag", begin, "no order", wrap, (end, 0, "))"))


FINDERS: tuple[Callable[[Source], None], ...] = (
    *(find_waits, find_phases, find_early, find_fences, find_barriers),
    *(find_bytes, find_boundaries, find_indices, find_flags),
)
HEADER = """// Which mutation is selected, and which are executed.
#pragma once
#include <cstdlib>
#include <fcntl.h>
#include <sys/mman.h>
#include <type_traits>
namespace tk_mutants {
inline const int selected = [] {
    const char* number = std::getenv("THUNDERKITTENS_MUTANT");
    return number ? std::atoi(number) : -1;
}();
inline unsigned char* const executed = [] {
    static unsigned char none[COUNT];
    const char* path = std::getenv("THUNDERKITTENS_MUTANTS_EXECUTED");
    if (!path) return none;
    void* file = mmap(nullptr, COUNT, PROT_READ | PROT_WRITE, MAP_SHARED, open(path, O_RDWR), 0);
    return file == MAP_FAILED ? none : static_cast<unsigned char*>(file);
}();
}  // namespace tk_mutants
constexpr int tk_mutant(int number) {
    if (std::is_constant_evaluated()) return 0;
    tk_mutants::executed[number] = 1;
    return tk_mutants::selected == number;
}
template <class T>
constexpr T tk_other(int number, T x) {
    return tk_mutant(number) ? (x > 0 ? x - 1 : x + 1) : x;
}
template <class T>
constexpr T tk_moved(int number, int by, T x) {
    return tk_mutant(number) ? x + by : x;
}
"""


def all_mutations() -> tuple[list[Source], list[Mutation]]:
    files = subprocess.check_output(["git", "ls-files", "csrc/*.cuh"], cwd=ROOT, text=True)
    sources, mutations = [], []
    for path in sorted(files.split()):
        source = Source(path, (ROOT / path).read_text())
        for finder in FINDERS:
            finder(source)
        source.found.sort(key=lambda m: m.line)
        seen: collections.Counter[str] = collections.Counter()
        for mutation in source.found:
            mutation.number = len(mutations)
            mutation.occurrence = seen[mutation.base]
            seen[mutation.base] += 1
            mutations.append(mutation)
        sources.append(source)
    return sources, mutations


def mutated(source: Source) -> str:
    edits = [
        (at, order, text.replace("@", str(m.number)))
        for m in source.found
        for at, order, text in m.edits
    ]
    pieces, last = [], 0
    for at, _, text in sorted(edits, key=lambda e: e[:2]):
        pieces += [source.text[last:at], text]
        last = at
    text = "".join([*pieces, source.text[last:]])
    return text.replace("#pragma once", '#pragma once\n#include "csrc/mutants.h"', 1)


def chosen(mutations: list[Mutation], per_file: int, seed: int, only: str = "") -> list[Mutation]:
    """Of each file `per_file`, of one class after the other: flags, which few files have, first.
    The choice in a file depends on that file alone."""
    by_file: dict[str, dict[str, list[Mutation]]] = {}
    for m in mutations:
        if re.search(only, m.key):
            by_file.setdefault(m.path, {}).setdefault(m.kind, []).append(m)
    result = []
    for path, kinds in by_file.items():
        queues = [sorted(kinds[k], key=lambda m: m.rank(seed)) for k in kinds]
        order = {k: zlib.crc32(f"{seed} {path} {k}".encode()) for k in kinds}
        queues.sort(key=lambda q: (q[0].kind != "flag", order[q[0].kind]))
        turns = [m for turn in range(per_file) for q in queues for m in q[turn : turn + 1]]
        result += turns[:per_file]
    return result
