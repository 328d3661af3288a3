"""Golden bytes: today's code reads and writes every message as it was recorded, byte for byte.

A failure here means that a message on the wire has changed. `golden/make.py` records all messages again.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest
from google.protobuf import text_format
from google.protobuf.message import Message


def _load(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location("golden_make", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


make = _load(Path(__file__).parent / "golden" / "make.py")
MESSAGES: dict[str, type[Message]] = make.messages()
RECORDED = sorted(make.FOLDER.glob("*.bin"))


def _class_of(path: Path) -> type[Message]:
    return MESSAGES[path.stem.split("-")[0]]


def test_every_message_of_the_wire_is_known() -> None:
    assert {"Identity", "UploadHeader", "Receipt", "Chunk", "Contract", "Part"} <= MESSAGES.keys()


def test_golden_bytes_cover_every_message_with_every_field() -> None:
    samples = {name: one.SerializeToString(deterministic=True) for name, one in make.files().items()}
    assert {path.stem: path.read_bytes() for path in RECORDED} == samples


@pytest.mark.parametrize("path", RECORDED, ids=lambda path: path.stem)
def test_golden_bytes_keep_meaning_and_are_written_again_same(path: Path) -> None:
    message = _class_of(path).FromString(path.read_bytes())
    expected = text_format.Parse(path.with_suffix(".textproto").read_text(), _class_of(path)())
    assert message == expected
    assert message.SerializeToString(deterministic=True) == path.read_bytes()
    assert expected.SerializeToString(deterministic=True) == path.read_bytes(), "the text says all that the bytes say"


def test_a_changed_field_number_or_type_is_found(tmp_path: Path) -> None:
    """What makes these tests worth their name: bytes under another number are not the recorded ones."""
    identity = MESSAGES["Identity"]
    path = next(item for item in RECORDED if item.stem == "Identity")
    swapped = path.read_bytes().replace(b"\x0a", b"\x12", 1)
    assert swapped != path.read_bytes()
    assert identity.FromString(swapped) != identity.FromString(path.read_bytes())
