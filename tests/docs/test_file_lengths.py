"""A file that has grown too long is taken apart before it gets longer."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).parents[2]
LONGEST = {"client_sdk": 500, "server": 500, "tests": 800}
"""Lines; the aim is fewer than 400 in the packages."""
GENERATED = "wire/v1"


def test_no_file_is_too_long() -> None:
    lengths = {
        path.relative_to(ROOT).as_posix(): len(path.read_text().splitlines())
        for folder in LONGEST
        for path in (ROOT / folder).rglob("*.py")
        if GENERATED not in path.as_posix()
    }
    assert lengths
    assert [f"{path}: {lines}" for path, lines in lengths.items() if lines > LONGEST[path.split("/")[0]]] == []
