"""The table of docs/reference/wire-format.md on refused statistics, and a refusal's sentence in its form."""

from __future__ import annotations

import re
from pathlib import Path

_PAGE = (Path(__file__).parents[2] / "docs/reference/wire-format.md").read_text(encoding="utf-8")


def documented_refusals(title: str) -> set[tuple[str, str]]:
    """Sentence, with numbers and names left out, and code of each row of the section with this title."""
    section = re.split(r"^#+ ", _PAGE.split(f"### {title}\n")[1], flags=re.MULTILINE)[0]
    rows = re.findall(r"^\| .* \| `([a-z-]+)` \| (.*) \|$", section, re.MULTILINE)
    return {(documented(sentence), code) for code, sentence in rows}


def documented(sentence: str) -> str:
    """A sentence without its numbers and the name of the method that hand-made contracts have."""
    return re.sub(r"-?\d[\d.]*", "0", sentence.replace("feddkc", "METHOD"))
