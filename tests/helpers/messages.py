"""The sentences that errors say, collected from the sources: `python -m helpers.messages` in tests/
lists them.

A sentence is text with HOLE for every value that a call fills in. In Python it is what follows a
`raise`, what is returned by a function that says what is wrong, and what is assigned to a `problem`
or a `reason`. In C++ it is what TK_CHECK, a throw, the emulator's `fail` and a kernel's `require`
say, what is returned by the functions that say why a problem is not supported, and what the tile
library asserts while a kernel is compiled; in CMake, what ends a build or warns. The benchmark and
the demo, whose errors are those of command lines, are left out.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
HOLE = "\0"
#: What an op or a part of the package says before its sentence.
PREFIX = re.compile(rf"^(?:tk\.[\w.{HOLE}]+|thunderkittens(?:::[\w{HOLE}]+)?|kittens|{HOLE}+): ")
#: Functions that return a sentence, or nothing where all is well.
PYTHON_SOURCES = re.compile(r"(_fault|problem|problem_of|_missing|refusal|refused|_unsupported)$")
LITERALS = r'\breturn ((?:"(?:\\.|[^"\\])*"\s*)+);'
CPP_SOURCES = re.compile(r"\bstd::string (unsupported\w*|no_(?:native_)?code_for)\(")


@dataclass(frozen=True)
class Message:
    """A sentence, and where it stands."""

    text: str
    place: str

    @property
    def sentence(self) -> str:
        """Without the name of who says it."""
        return PREFIX.sub("", self.text)


# ---- Python ----


def _template(node: ast.expr | None) -> str:
    """The text of an expression, with HOLE for what is not known before it runs."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(_template(part) for part in node.values)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return _template(node.left) + _template(node.right)
    return HOLE


def _texts(node: ast.expr | None) -> Iterator[str]:
    """The sentences that an expression may be."""
    if isinstance(node, ast.IfExp):
        yield from _texts(node.body)
        yield from _texts(node.orelse)
    elif isinstance(node, ast.BoolOp):
        for value in node.values:
            yield from _texts(value)
    elif node is not None:
        yield _template(node)


def python_messages() -> Iterator[Message]:
    package = ROOT / "python" / "thunderkittens"
    for path in sorted(package.rglob("*.py")):
        name = path.relative_to(package).as_posix()
        if name.startswith("bench/") or name in ("demo.py", "__main__.py"):
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            found: list[ast.expr | None] = []
            if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call) and node.exc.args:
                if ast.unparse(node.exc.func) != "AssertionError":
                    found = [node.exc.args[0]]
            elif isinstance(node, ast.FunctionDef) and PYTHON_SOURCES.search(node.name):
                found = [n.value for n in ast.walk(node) if isinstance(n, ast.Return)]
            elif isinstance(node, ast.Assign) and re.search(
                r"\b(\w*problem|reason)$", ast.unparse(node.targets[0])
            ):
                found = [node.value]
            elif isinstance(node, ast.Call) and ast.unparse(node.func) == "_damaged":
                found = [node.args[0]]
            for value in found:
                for text in _texts(value):
                    yield Message(text, f"python/thunderkittens/{name}:{node.lineno}")


# ---- C++ ----


def _code(path: Path) -> str:
    """A file without comments; string literals are kept."""
    pattern = r'//[^\n]*|/\*.*?\*/|("(?:\\.|[^"\\\n])*")'
    return re.sub(pattern, lambda m: m[1] or "", path.read_text(), flags=re.DOTALL)


def _split(text: str, separators: str) -> list[str]:
    """Parts of an expression between separators that stand in no brackets and no literal."""
    parts, depth = [""], 0
    for token in re.findall(r'"(?:\\.|[^"\\])*"|\'(?:\\.|[^\'\\])\'|.', text, re.DOTALL):
        depth += (token in ("(", "[", "{")) - (token in (")", "]", "}"))
        if depth == 0 and token in separators:
            parts.append("")
        else:
            parts[-1] += token
    return [part.strip() for part in parts]


def _brackets(text: str, at: int, kind: str = "()") -> str:
    """What stands between a bracket and its partner."""
    depth = 0
    for match in re.compile(r'"(?:\\.|[^"\\])*"|\'(?:\\.|[^\'\\])\'|.', re.DOTALL).finditer(
        text, at
    ):
        depth += (match[0] == kind[0]) - (match[0] == kind[1])
        if depth == 0:
            return text[at + 1 : match.start()]
    raise ValueError("a bracket without partner")


def _literal(text: str) -> str | None:
    """The value of string and character literals behind each other, or None for other code."""
    inside = re.fullmatch(r"std::string\((.*)\)", text, re.DOTALL)
    tokens = re.findall(r'"((?:\\.|[^"\\])*)"|\'(.)\'|(\S)', inside[1] if inside else text)
    if not tokens or any(other for _, _, other in tokens):
        return None
    return "".join(string or char for string, char, _ in tokens).replace('\\"', '"')


def _cpp_text(arguments: list[str]) -> str:
    """The sentence that arguments make together."""
    text = ""
    for argument in arguments:
        for part in _split(argument, "+"):
            literal = _literal(part)
            if literal is None and (call := re.fullmatch(r"(?:\w+::)?concat\((.*)\)", part, re.S)):
                literal = _cpp_text(_split(call[1], ","))
            text += HOLE if literal is None else literal
    return re.sub(f"{HOLE}+", HOLE, text)


def cpp_messages() -> Iterator[Message]:
    says = re.compile(
        r"\b(TK_CHECK|check|require|static_assert|fail|throw (?:std::|py::)?\w+)\("
        r"|\breturn ((?:\w+::)?concat)\("
    )
    for folder in ("csrc", "kittens"):
        for path in sorted((ROOT / folder).rglob("*")):
            if path.suffix not in (".h", ".cuh", ".cpp"):
                continue
            code = _code(path)
            reasons = [
                range(m.end(), m.end() + len(_brackets(code, brace, "{}")) + 200)
                for m in CPP_SOURCES.finditer(code)
                if (brace := code.find("{", m.end())) < code.find(";", m.end()) and brace > 0
            ]
            for match in says.finditer(code):
                if match[2] and not any(match.start() in where for where in reasons):
                    continue
                arguments = _split(_brackets(code, match.end() - 1), ",")
                if match[1] == "static_assert":  # types have commas, too
                    arguments = arguments[-1:] if folder == "kittens" else []
                elif match[1] in ("TK_CHECK", "check", "require"):
                    arguments = arguments[1:]
                text = _cpp_text(arguments)
                line = code.count("\n", 0, match.start()) + 1
                yield Message(text, f"{path.relative_to(ROOT).as_posix()}:{line}")
            for where in reasons:
                for match in re.finditer(LITERALS, code[where.start : where.stop]):
                    yield Message(_cpp_text([match[1]]), path.relative_to(ROOT).as_posix())


def cmake_messages() -> Iterator[Message]:
    """What ends a build, or warns of one that is incomplete."""
    for path in sorted([ROOT / "CMakeLists.txt", *(ROOT / "cmake").glob("*.cmake")]):
        code = path.read_text()
        for match in re.finditer(r"\bmessage\(\s*(?:FATAL_ERROR|WARNING)\s", code):
            inside = _brackets(code, code.index("(", match.start()))
            text = "".join(re.findall(r'"((?:\\.|[^"\\])*)"', inside, re.DOTALL))
            line = code.count("\n", 0, match.start()) + 1
            yield Message(re.sub(r"\$\{\w+\}", HOLE, text), f"cmake/{path.name}:{line}")


def messages() -> list[Message]:
    """All of them. What passes on the sentence of another, with nothing of its own, is none."""
    found = [*python_messages(), *cpp_messages(), *cmake_messages()]
    return [m for m in found if re.search(r"[A-Za-z]{3}", m.sentence.replace(HOLE, " "))]


if __name__ == "__main__":
    for message in messages():
        print(f"{message.sentence.replace(HOLE, '...')}    [{message.place}]")
