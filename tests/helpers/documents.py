"""The documents, and the blocks of code in them.

A block may need what the reader has from elsewhere. A comment before it says what, with the line
<block> where it stands; the reader of the page does not see it. An indentation of that line is the
block's, so that one that cannot run, as it needs nvcc, can be in a function that nobody calls:

    <!-- around the block:
    def build():
        <block>
    -->
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = [
    *(ROOT / f"{name}.md" for name in ("README", "CHANGELOG", "CONTRIBUTING")),
    *sorted((ROOT / "docs").rglob("*.md")),
    *sorted((ROOT / "csrc").rglob("*.md")),
    *sorted((ROOT / "examples").rglob("*.md")),
]
BLOCK = re.compile(
    r"(?:^[ ]*<!-- around the block:\n(?P<around>.*?)^[ ]*-->\n)?"
    r"^(?P<indent>[ ]*)```(?P<language>\w*)\n(?P<code>.*?)^[ ]*```$",
    re.DOTALL | re.MULTILINE,
)


@dataclass(frozen=True)
class Block:
    """A block of code, and where it is."""

    path: Path
    line: int
    language: str
    code: str
    around: str  # with the line <block>

    @property
    def name(self) -> str:
        return f"{self.path.relative_to(ROOT).as_posix()}:{self.line}"

    @property
    def whole(self) -> str:
        """The block within what is around it."""
        return "\n".join(
            textwrap.indent(self.code, line.removesuffix("<block>"))
            if line.strip() == "<block>"
            else line
            for line in self.around.split("\n")
        )


def blocks(path: Path) -> Iterator[Block]:
    text = path.read_text()
    for match in BLOCK.finditer(text):
        around = textwrap.dedent(match["around"] or "<block>\n")
        line = text.count("\n", 0, match.start("code")) + 1
        yield Block(path, line, match["language"], textwrap.dedent(match["code"]), around)


def all_blocks(*languages: str) -> list[Block]:
    return [b for path in DOCUMENTS for b in blocks(path) if b.language in languages]
