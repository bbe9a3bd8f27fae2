"""Makes the site of the documents: `python tools/make_site.py`, into .build/site/html.

The documents are Markdown that reads on its own, with links relative to their files. The site has
the same tree below one folder: the README is its first page, sources that a document links to
become pages of code, and tools/reference_pages.py writes the pages of the reference. Zensical
(docs/requirements.txt) makes HTML of it; a warning is an error, and so is a link that leads to no
page or heading.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import reference_pages as reference

ROOT = Path(__file__).resolve().parents[1]
WORK = ROOT / ".build" / "site"
LINK = re.compile(r"(\]\()(?!https?:|#)([^)\s#]+)((?:#[^)\s]*)?\))")
LANGUAGES = {".cu": "cuda", ".cuh": "cuda", ".h": "cpp", ".cpp": "cpp", ".py": "python"}

#: The order of the pages, by title; a list of names is a part. REFERENCE stands for the op's pages.
REFERENCE = "docs/reference"
NAV: list[tuple[str, str | list[tuple[str, str]]]] = [
    ("Home", "README.md"),
    ("Quickstart", "docs/quickstart.md"),
    ("Tour", "docs/tour.md"),
    ("What each op supports", "docs/ops.md"),
    ("Serving", "docs/serving.md"),
    ("Reference", []),
    ("Troubleshooting", "docs/troubleshooting.md"),
    ("Numerics", "docs/numerics.md"),
    (
        "Writing kernels",
        [
            ("Manual of kittens", "docs/manual.md"),
            ("From Python and CMake", "docs/own_kernels.md"),
            ("The GEMM ladder", "examples/gemm/README.md"),
            ("Contributing", "CONTRIBUTING.md"),
        ],
    ),
    (
        "How it works",
        [
            ("Architecture", "docs/architecture.md"),
            ("GEMM kernels", "docs/gemm.md"),
            ("Attention kernels", "docs/attention.md"),
            ("Family: attention", "csrc/attention/README.md"),
            ("Family: gemm", "csrc/gemm/README.md"),
            ("Family: linear attention", "csrc/linear_attention/README.md"),
            ("Family: recurrent", "csrc/recurrent/README.md"),
        ],
    ),
    (
        "Performance",
        [("Figures", "docs/performance.md"), ("Benchmarks", "docs/benchmarks.md")],
    ),
    ("Changelog", "CHANGELOG.md"),
]


def documents() -> list[Path]:
    """All pages of the repository, relative to it."""
    found = [*ROOT.glob("*.md")]
    for folder in ("docs", "csrc", "examples"):
        found += (ROOT / folder).rglob("*.md")
    return sorted(path.relative_to(ROOT) for path in found)


def place(path: Path) -> Path:
    """Where a file of the repository is in the site."""
    if path.name == "README.md":
        return path.with_name("index.md")
    if path.suffix in (".md", ".png", ".svg"):
        return path
    return path.with_name(f"{path.name.replace('.', '_')}.md")


def rewritten(text: str, path: Path) -> tuple[str, set[Path]]:
    """A page with its links as the site has them, and the files that it links to."""
    linked: set[Path] = set()

    def replace(match: re.Match[str]) -> str:
        target = Path(os.path.normpath(path.parent / match[2]))
        linked.add(target)
        where = os.path.relpath(place(target), place(path).parent)
        return f"{match[1]}{where}{match[3]}"

    return LINK.sub(replace, text), linked


def dialect(text: str) -> str:
    """The same text for Python-Markdown, which asks for more than GitHub does: an empty line before
    a list, and four spaces before what belongs to an item of one with numbers. Comments, which are
    for the tests, go."""
    text = re.sub(r"^ *<!--.*?-->\n", "", text, flags=re.DOTALL | re.MULTILINE)
    lines: list[str] = []
    fence = numbered = inside = False  # of code, of an item with a number, of a list's lines
    for line in text.split("\n"):
        fence ^= line.lstrip().startswith("```")
        item = not fence and bool(re.match(r"- |\d+\. ", line))
        if item and not inside and lines and lines[-1]:
            lines.append("")
        inside = item or (inside and bool(line.strip()))
        if line and not line.startswith(" "):
            numbered = item and line[0].isdigit()
        lines.append(f" {line}" if numbered and line.startswith("   ") else line)
    return "\n".join(lines)


def code_page(path: Path) -> str:
    """A source as a page."""
    text = (ROOT / path).read_text()
    language = LANGUAGES.get(path.suffix, "text")
    return f"# {path.name}\n\n`{path.as_posix()}`\n\n````{language}\n{text}\n````\n"


def assemble(source: Path) -> None:
    """Writes the tree that the site is made of."""
    shutil.rmtree(source, ignore_errors=True)
    pages = documents()
    others: set[Path] = set()
    for path in pages:
        text, linked = rewritten((ROOT / path).read_text(), path)
        others |= linked - set(pages)
        write(source / place(path), dialect(text))
    for path in sorted(others):
        if path.suffix in (".png", ".svg"):
            (source / path).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / path, source / path)
        else:
            write(source / place(path), code_page(path))
    for name in reference.pages():
        write(source / REFERENCE / f"{name}.md", reference.page(name))


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def nav() -> list[tuple[str, str | list[tuple[str, str]]]]:
    """The order of all pages: those that NAV does not name are parts of Performance."""
    ops = [name for name in reference.pages() if name in reference.ops()]
    others = [name for name in reference.pages() if name not in reference.ops()]
    entries = [(f"tk.{name}", f"{REFERENCE}/{name}.md") for name in ops]
    entries += [(name, f"{REFERENCE}/{name}.md") for name in sorted(others)]
    known = {page for _, part in NAV for page in (part_pages(part))}
    rest = [p for p in documents() if p.as_posix() not in known]
    result: list[tuple[str, str | list[tuple[str, str]]]] = []
    for title, part in NAV:
        if title == "Reference":
            part = entries
        elif title == "Performance" and isinstance(part, list):
            part = part + [(title_of(path), path.as_posix()) for path in rest]
        result.append((title, part))
    return result


def part_pages(part: str | list[tuple[str, str]]) -> Iterator[str]:
    yield from [part] if isinstance(part, str) else (page for _, page in part)


def title_of(path: Path) -> str:
    """The first heading of a page, and whether it is a log of experiments."""
    heading = re.search(r"^# (.*)$", (ROOT / path).read_text(), re.MULTILINE)
    assert heading is not None, path
    return f"Log: {path.stem}" if "experiments" in path.parts else heading[1].replace("`", "")


def configuration(source: Path, html: Path) -> str:
    """The file that Zensical reads."""

    def quoted(text: str) -> str:
        return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'

    def item(title: str, page: str) -> str:
        return f"{{ {quoted(title)} = {quoted(place(Path(page)).as_posix())} }}"

    lines = []
    for title, part in nav():
        if isinstance(part, str):
            lines.append(f"  {item(title, part)},")
        else:
            inside = ",\n".join(f"    {item(*entry)}" for entry in part)
            lines.append(f"  {{ {quoted(title)} = [\n{inside},\n  ] }},")
    return f"""[project]
site_name = "thunderkittens"
site_description = "Fast GPU kernels for PyTorch, and the tile library that they are written on"
docs_dir = {quoted(source.name)}
site_dir = {quoted(html.name)}
nav = [
{chr(10).join(lines)}
]

[project.theme]
language = "en"
font = false
features = [
  "content.code.copy",
  "navigation.footer",
  "navigation.indexes",
  "navigation.path",
  "navigation.top",
  "search.highlight",
]

[[project.theme.palette]]
media = "(prefers-color-scheme: light)"
scheme = "default"
toggle.icon = "lucide/sun"
toggle.name = "Dark"

[[project.theme.palette]]
media = "(prefers-color-scheme: dark)"
scheme = "slate"
toggle.icon = "lucide/moon"
toggle.name = "Light"

[project.markdown_extensions]
admonition = {{}}
attr_list = {{}}
tables = {{}}
toc.permalink = true
pymdownx.betterem = {{}}
pymdownx.details = {{}}
pymdownx.highlight.pygments_lang_class = true
pymdownx.inlinehilite = {{}}
pymdownx.saneheaders = {{}}
pymdownx.superfences.custom_fences = [
  {{ name = "mermaid", class = "mermaid", format = "pymdownx.superfences.fence_code_format" }},
]
"""


def broken(html: Path) -> list[str]:
    """Links of the site's pages that lead to no file, or to no heading of one."""
    texts = {path: path.read_text() for path in sorted(html.rglob("*.html"))}
    names = {path: set(re.findall(r'\bid="?([^"\s>]+)', text)) for path, text in texts.items()}
    wrong = []
    for path, text in texts.items():
        article = re.search(r"<article.*</article>", text, re.DOTALL)
        links = re.findall(r'<a [^>]*href="?([^"\s>]+)', article[0] if article else "")
        for link in set(links):
            where, _, anchor = link.partition("#")
            if ":" in where or where.startswith("/"):
                continue
            target = Path(os.path.normpath(path.parent / where)) if where else path
            target = target / "index.html" if target.is_dir() else target
            there = target in texts or target.is_file()
            if not there or (anchor and anchor not in names.get(target, {anchor})):
                wrong.append(f"{path.relative_to(html)}: {link}")
    return sorted(wrong)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--no-html", action="store_true", help="write the Markdown tree alone")
    options = parser.parse_args(arguments)
    source, html = WORK / "source", WORK / "html"
    assemble(source)
    config = WORK / "zensical.toml"
    config.write_text(configuration(source, html))
    if options.no_html:
        return 0
    command = [sys.executable, "-m", "zensical", "build", "--clean", "--strict", "-f", str(config)]
    if (status := subprocess.run(command, cwd=WORK).returncode) != 0:
        return status
    if wrong := broken(html):
        print("links that lead nowhere:", *wrong, sep="\n  ", file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
