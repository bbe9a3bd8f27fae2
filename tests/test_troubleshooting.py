"""docs/troubleshooting.md, and section 13 of the manual, have an entry for every sentence that an
error of the sources says, and none that nothing says any more."""

from __future__ import annotations

import re
from pathlib import Path

from helpers.messages import HOLE, messages

ROOT = Path(__file__).resolve().parents[1]
PAGE = (ROOT / "docs/troubleshooting.md").read_text()
MANUAL = (ROOT / "docs/manual.md").read_text()
MESSAGES = messages()


def entries() -> set[str]:
    """The sentences in the first column of the page's tables, and of the manual's."""
    start = MANUAL.index("### While compiling")
    section = MANUAL[start : MANUAL.index("### While running")]
    page = PAGE[: PAGE.index("## 14. ")]  # which is of what comes without a sentence
    first = [line.split(" | ")[0] for line in (page + section).splitlines() if line[:2] == "| "]
    return {sentence for cell in first for sentence in re.findall(r"`([^`]+)`", cell)}


# Sentences of ptxas and nvcc.
OTHERS = re.compile(r"Instruction 'wgmma|invalid narrowing|sm_90'")


def pattern(sentence: str) -> re.Pattern[str]:
    """What an entry covers: "..." is anything, and a sentence may follow who says it."""
    parts = [re.escape(part) for part in re.sub(r" \.\.\.$", "...", sentence).split("...")]
    return re.compile(rf"(?:.*: )?{'.*'.join(parts)}", re.DOTALL)


PATTERNS = {sentence: pattern(sentence) for sentence in entries()}


def covers(compiled: re.Pattern[str], message: str) -> bool:
    return bool(compiled.fullmatch(message.strip().replace("...", HOLE)))


def test_sentences_are_found():
    assert len(MESSAGES) > 450
    places = {message.place.split("/")[0] for message in MESSAGES}
    assert {"python", "csrc", "kittens", "cmake"} <= places


def test_an_entry_says_something():
    """An entry of values alone would cover everything."""
    assert not [s for s in PATTERNS if len(re.findall(r"[A-Za-z]", s)) < 4]


def test_every_sentence_has_an_entry():
    missing = {
        f"{m.text.replace(HOLE, '...')}  ({m.place})"
        for m in MESSAGES
        if not any(covers(p, m.sentence) or covers(p, m.text) for p in PATTERNS.values())
    }
    assert not missing, "\n".join(["without an entry:", *sorted(missing)])


def test_every_entry_is_said_somewhere():
    stale = {
        sentence
        for sentence, p in PATTERNS.items()
        if not any(covers(p, m.sentence) or covers(p, m.text) for m in MESSAGES)
    }
    stale = {s for s in stale if not OTHERS.search(s)}
    assert not stale, "\n".join(["said nowhere:", *sorted(stale)])
