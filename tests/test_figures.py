"""The pictures of the documents: the script that draws them runs, every picture that it draws is in
a document, and every picture of a document is there."""

from __future__ import annotations

import re
import runpy
from pathlib import Path
from xml.etree import ElementTree

import pytest

ROOT = Path(__file__).resolve().parents[1]
PICTURES = {path.name for path in (ROOT / "docs" / "figures").glob("*.svg")}
DOCUMENTS = "".join(path.read_text() for path in sorted((ROOT / "docs").glob("*.md")))


@pytest.fixture(scope="module")
def drawn(tmp_path_factory):
    folder = tmp_path_factory.mktemp("figures")
    script = runpy.run_path(str(ROOT / "tools" / "draw_figures.py"), run_name="draw_figures")
    script["main"](folder)
    return folder


def test_every_picture_is_drawn(drawn):
    assert {path.name for path in drawn.iterdir()} == PICTURES != set()
    for path in drawn.iterdir():
        assert ElementTree.parse(path).getroot().tag.endswith("}svg")


def test_every_picture_is_in_a_document():
    shown = set(re.findall(r"\]\(figures/(\w+\.svg)\)", DOCUMENTS))
    assert shown == PICTURES
    for name in PICTURES:
        assert (ROOT / "docs" / "figures" / name).stat().st_size < 200_000
