"""The pages of the reference, written from what is there: signatures and docstrings of the public
functions, the definition in `reference/`, the op's rows in docs/ops.md, and its result files.

Reads sources alone, and imports nothing of the package, so that the site needs no build of it.
tools/make_site.py calls it; nothing that it writes is kept in the repository.
"""

from __future__ import annotations

import ast
import json
import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "python" / "thunderkittens"
RESULTS = ROOT / "benchmarks" / "results" / "h200"
Definition = ast.FunctionDef | ast.ClassDef
HEADINGS = ("Args", "Returns", "Raises", "Yields", "Example", "Attributes")
#: Titles of the pages that are of no op, by the module that defines what is on them.
OTHER_PAGES = {
    "integrations/sdpa_hook": "sdpa",
    "emulation": "emulate",
    "support": "is_supported",
    "__init__": "package",
}
NUMERICS = {
    "attention": "attention",
    "gemm": "gemm",
    "based": "based",
    "gated": "gated-delta-rule",
    "lolcats": "lolcats",
    "mxfp8": "mxfp8-and-nvfp4",
    "nvfp4": "mxfp8-and-nvfp4",
    "rms_norm": "norms-and-rotary-embedding",
    "layer_norm": "norms-and-rotary-embedding",
    "rms_norm_quantize": "norms-and-rotary-embedding",
    "layer_norm_quantize": "norms-and-rotary-embedding",
    "rotary": "norms-and-rotary-embedding",
}


# ---- what is public, and where ----


@cache
def _module(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def _file(module: str, folder: Path = PACKAGE) -> Path:
    path = folder / module.replace(".", "/")
    return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")


def _listed(path: Path) -> list[str]:
    """A module's __all__, or the functions and classes that it defines without an underscore."""
    for node in _module(path).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            return list(ast.literal_eval(node.value))
    kinds = (ast.FunctionDef, ast.ClassDef)
    return [n.name for n in _module(path).body if isinstance(n, kinds) and n.name[0] != "_"]


@cache
def public() -> dict[str, Path]:
    """Every name of `thunderkittens.__all__`, and the file that defines it."""
    init = PACKAGE / "__init__.py"
    found = dict.fromkeys(_listed(init), init)
    for node in ast.walk(_module(init)):
        if not isinstance(node, ast.ImportFrom) or node.level != 1:
            continue
        for alias in node.names:
            name = alias.asname or alias.name
            if name in found and node.module:
                found[name] = _definer(_file(node.module), alias.name)
            elif name in found:
                found[name] = _file(alias.name)
    return found


@cache
def modules() -> set[str]:
    """The names of `thunderkittens.__all__` that are modules: `from . import nn`."""
    nodes = [n for n in ast.walk(_module(PACKAGE / "__init__.py")) if isinstance(n, ast.ImportFrom)]
    imported = {a.name for n in nodes if n.level == 1 and not n.module for a in n.names}
    return imported & set(public())


def _definer(path: Path, name: str) -> Path:
    """The file that defines a name which another imports from it."""
    for node in _module(path).body:
        if isinstance(node, ast.ImportFrom) and node.level == 1 and node.module:
            names = [alias.asname or alias.name for alias in node.names]
            if name in names:
                return _definer(_file(node.module, path.parent), name)
    return path


def _stem(path: Path) -> str:
    """The page that what a file defines is on."""
    inside = path.relative_to(PACKAGE).with_suffix("").as_posix().removesuffix("/__init__")
    if inside in OTHER_PAGES:
        return OTHER_PAGES[inside]
    return inside.split("/")[-1].lstrip("_")


def ops() -> list[str]:
    return sorted(p.stem for p in (PACKAGE / "ops").glob("*.py") if p.stem[0] != "_")


@cache
def pages() -> dict[str, list[str]]:
    """The pages, and what each documents: names, those of a module as `nn.BasedAttention`."""
    found: dict[str, list[str]] = {op: [] for op in ops()}
    for name, path in public().items():
        members = [f"{name}.{n}" for n in _listed(path)] if name in modules() else []
        found.setdefault(_stem(path), []).extend([name, *members])
    # The op itself comes first on its page.
    return {page: sorted(names, key=lambda n: n != page) for page, names in found.items()}


def _definition(dotted: str) -> Definition | ast.Module | None:
    """What a name is in the source: the last of its definitions, behind the overloads."""
    first, _, rest = dotted.partition(".")
    path = public()[first]
    if first in modules() and not rest:
        return _module(path)
    name = rest or first
    path = _definer(path, name)
    found = [n for n in _module(path).body if isinstance(n, Definition) and n.name == name]
    return found[-1] if found else None


def _comment(dotted: str) -> str:
    """What stands above an assignment in lines with "#:"."""
    lines = public()[dotted].read_text().splitlines()
    at = next(i for i, line in enumerate(lines) if line.startswith(f"{dotted}:"))
    first = at
    while lines[first - 1].startswith("#: "):
        first -= 1
    return " ".join(line.removeprefix("#: ") for line in lines[first:at])


# ---- docstrings ----


@dataclass(frozen=True)
class Doc:
    """A docstring by its sections; what comes before and after them is text."""

    text: str
    sections: dict[str, str]
    after: str


def parsed(docstring: str) -> Doc:
    text, sections, after, current = [], {}, [], None
    for line in docstring.splitlines():
        heading = re.fullmatch(r"(\w+):", line)
        if heading and heading[1] in HEADINGS:
            current = heading[1]
            sections[current] = ""
        elif current and (line.startswith("    ") or not line):
            sections[current] += line[4:] + "\n"
        else:
            current = None
            (after if sections else text).append(line)
    return Doc(
        "\n".join(text).strip(),
        {k: v.rstrip() for k, v in sections.items()},
        "\n".join(after).strip(),
    )


def _entries(section: str) -> list[tuple[str, str]]:
    """(name, text) of a section whose entries are "name: text", with lines that go on below."""
    found: list[tuple[str, str]] = []
    for line in section.splitlines():
        match = re.match(r"([\w*]+(?: \([^)]*\))?): (.*)", line)
        if match:
            found.append((match[1], match[2]))
        elif found:
            found[-1] = (found[-1][0], f"{found[-1][1]} {line.strip()}")
    return found


def _example(section: str) -> str:
    lines = ["```pycon", *section.strip().splitlines(), "```"]
    return "\n".join(lines)


def markdown_of(doc: Doc) -> str:
    parts = [doc.text]
    for heading, title in (("Args", "Arguments"), ("Attributes", "Attributes")):
        if heading in doc.sections:
            rows = [f"- **`{name}`**: {text}" for name, text in _entries(doc.sections[heading])]
            parts.append(f"**{title}**\n\n" + "\n".join(rows))
    for heading in ("Returns", "Yields"):
        if heading in doc.sections:
            parts.append(f"**{heading}**\n\n{doc.sections[heading].strip()}")
    if "Raises" in doc.sections:
        rows = [f"- `{name}`: {text}" for name, text in _entries(doc.sections["Raises"])]
        rows.append("\nThe sentences are explained in [troubleshooting](../troubleshooting.md).")
        parts.append("**Errors**\n\n" + "\n".join(rows))
    if "Example" in doc.sections:
        parts.append(_example(doc.sections["Example"]))
    parts.append(doc.after)
    return "\n\n".join(part for part in parts if part)


def _signature(dotted: str, node: Definition) -> str:
    """As one would write the call, one argument a line where it is long."""
    function: ast.FunctionDef | None = node if isinstance(node, ast.FunctionDef) else None
    if isinstance(node, ast.ClassDef):
        inits = [n for n in node.body if isinstance(n, ast.FunctionDef) and n.name == "__init__"]
        function = inits[0] if inits else None
        if function is None:
            fields = [ast.unparse(n) for n in node.body if isinstance(n, ast.AnnAssign)]
            return f"class tk.{dotted}" + "".join(f"\n    {field}" for field in fields)
    assert function is not None
    arguments = ast.unparse(function.args)
    parts = re.split(r", (?![^\[(]*[\])])", arguments)
    parts = [re.sub(r"^(\w+: [^=]+)=", r"\1 = ", part) for part in parts if part != "self"]
    returns = f" -> {ast.unparse(function.returns)}" if function.returns else ""
    if isinstance(node, ast.ClassDef):
        returns = ""
    line = f"tk.{dotted}({', '.join(parts)}){returns}"
    if len(line) <= 88:
        return line
    return f"tk.{dotted}(\n" + "".join(f"    {part},\n" for part in parts) + f"){returns}"


def entry(dotted: str, level: int) -> str:
    """A name's part of a page."""
    node = _definition(dotted)
    title = f"{'#' * level} `tk.{dotted}`"
    if node is None:
        return f"{title}\n\n{_comment(dotted)}"
    text = markdown_of(parsed(ast.get_docstring(node) or ""))
    if isinstance(node, ast.Module):
        return f"{title}\n\n{text}"
    return f"{title}\n\n```python\n{_signature(dotted, node)}\n```\n\n{text}"


# ---- an op's further parts ----


def support(op: str) -> str:
    """The tables of docs/ops.md that stand below a paragraph which names the op."""
    text = (ROOT / "docs" / "ops.md").read_text()
    found = [
        table
        for section in re.split(r"^#+ .*$", text, flags=re.MULTILINE)
        for paragraph, table in re.findall(
            r"((?:^[^|\n].*\n)+)\n((?:^\|.*\n)+)", section, re.MULTILINE
        )
        if re.search(rf"`tk\.{op}\b", paragraph)
    ]
    # The tables' links are relative to docs/.
    paragraphs = re.split(r"\n\n+", text)
    followed = zip(paragraphs, [*paragraphs[1:], ""], strict=True)
    found += [f"{a}\n" for a, b in followed if a.startswith(f"`tk.{op}(") and b[:1] != "|"]
    tables = re.sub(r"\]\((?!https?:|#)", "](../", "\n".join(found))
    return (
        f"{tables}\nWhat holds for every op is in [ops](../ops.md).\n"
        if tables
        else ("See [ops](../ops.md).\n")
    )


def definition(op: str) -> str:
    """The formula: the op in plain PyTorch, which the tests compare with."""
    path = PACKAGE / "reference" / f"{op}.py"
    for node in _module(path).body:
        if isinstance(node, ast.FunctionDef) and node.name == op:
            lines = path.read_text().splitlines()[node.lineno - 1 : node.end_lineno]
            document = ast.get_docstring(node)
            if document:  # what it says is above
                first, last = node.body[0].lineno - node.lineno, node.body[0].end_lineno
                assert last is not None
                lines[first : last - node.lineno + 1] = []
            return "```python\n" + "\n".join(lines) + "\n```\n"
    return f"`tk.reference.{op}`.\n"


@cache
def results() -> dict[str, dict[str, Any]]:
    files = sorted(RESULTS.glob("*.json"))
    return {path.name: json.loads(path.read_text()) for path in files}


def _of_op(op: str) -> dict[str, dict[str, Any]]:
    return {name: r for name, r in results().items() if r["op"] == op and r.get("cases")}


def accuracy(op: str) -> str:
    """Errors relative to float64, as they were measured before each timing."""
    rows = []
    for name, result in _of_op(op).items():
        ours = [c["results"].get(result["subject"]) for c in result["cases"]]
        checked = [x["accuracy"] for x in ours if x and x.get("accuracy")]
        known = [a for a in checked if a.get("relative") is not None and a.get("yardstick")]
        if known:
            worst = max(known, key=lambda a: a["relative"])
            row = (
                f"| {len(known)} | {worst['relative']:.2e} | {worst['yardstick']:.2e} | `{name}` |"
            )
            rows.append(row)
    link = next((a for start, a in NUMERICS.items() if op.startswith(start)), "")
    where = f"../numerics.md#{link}" if link else "../numerics.md"
    text = f"[Numerics]({where}) says what is rounded where.\n"
    if not rows:
        return text
    head = "| cases | largest relative error | the formula's in plain PyTorch | file |\n"
    head += "|---|---|---|---|\n"
    return f"{text}\n{head}" + "\n".join(rows) + "\n"


def speed(op: str) -> str:
    """The medians of each case, and the ratios to its peers."""
    parts = []
    for name, result in _of_op(op).items():
        peers = [p for p in result["geometric_means"] or {} if isinstance(p, str)]
        peers = sorted({p for case in result["cases"] for p in case["ratios"]} | set(peers))
        peers = [p for p in peers if any(case["ratios"].get(p) for case in result["cases"])]
        head = f"| case | us | TFLOP/s | GB/s | {' | '.join(f'over {p}' for p in peers)} |"
        rows = [head, "|---|---|---|---|" + "---|" * len(peers)]
        for case in result["cases"]:
            ours = case["results"].get(result["subject"])
            if not ours or case["failed"]:
                continue
            ratios = [case["ratios"].get(p) for p in peers]
            cells = [case["name"], f"{ours['time_us']['median']:.1f}"]
            cells += [_number(ours.get("tflops")), _number(ours.get("gigabytes_per_second"))]
            cells += [f"{ratio:.3f}" if ratio else "" for ratio in ratios]
            rows.append(f"| {' | '.join(cells)} |")
        machine = result["machine"]
        title = f"`{name}`: {machine['device']}, PyTorch {machine['torch']}, {machine['date'][:10]}"
        body = "\n".join(f"    {row}" for row in rows)
        parts.append(f'??? note "{title.replace(chr(96), "")}"\n\n{body}\n')
    if not parts:
        return "There is no result file of this op.\n"
    text = (
        "A ratio is the peer's time divided by ours; above 1, thunderkittens is faster. How it is "
        "measured, and what is behind it, is in [performance](../performance.md).\n"
    )
    return text + "\n" + "\n".join(parts)


def _number(value: float | None) -> str:
    return "" if not value else f"{value:.4g}"


def page(name: str) -> str:
    """The text of a page."""
    names = [entry(dotted, 2) for dotted in pages()[name]]
    if name not in ops():
        return f"# {name}\n\n" + "\n\n".join(part for part in names if part) + "\n"
    parts = [f"# {name}", *names, "## Formula", definition(name), "## Support", support(name)]
    parts += ["## Accuracy", accuracy(name), "## Measured speed", speed(name)]
    return "\n\n".join(part for part in parts if part) + "\n"
