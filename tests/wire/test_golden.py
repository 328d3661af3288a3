"""Golden bytes: what earlier versions sent is what today's code reads, and writes again byte for byte.

`golden/make.py` adds what is missing; a test fails until it has, so no message is without golden bytes. What is there
is never rewritten: a failure here means that a message on the wire has changed its meaning.
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
    return MESSAGES[path.stem.split("-")[0].split("+")[0]]


def test_every_message_of_the_wire_is_known() -> None:
    assert {"Identity", "UploadHeader", "Receipt", "TensorChunk", "Contract", "Part"} <= MESSAGES.keys()
    assert len(RECORDED) >= len(MESSAGES)


@pytest.mark.parametrize("name", MESSAGES)
def test_every_message_has_golden_bytes_with_every_field(name: str) -> None:
    lacking = [file for file, _ in make.missing(name, MESSAGES[name])]
    assert not lacking, f"{lacking}: run tests/wire/golden/make.py, and look at what changed"


@pytest.mark.parametrize("path", RECORDED, ids=lambda path: path.stem)
def test_golden_bytes_mean_what_they_meant_and_are_written_again_as_they_were(path: Path) -> None:
    message = _class_of(path).FromString(path.read_bytes())
    expected = text_format.Parse(path.with_suffix(".textproto").read_text(), _class_of(path)())
    assert message == expected
    assert message.SerializeToString(deterministic=True) == path.read_bytes()
    assert expected.SerializeToString(deterministic=True) == path.read_bytes(), "the text says all that the bytes say"


@pytest.mark.parametrize("name", MESSAGES)
def test_no_recorded_bytes_hold_a_field_that_today_s_code_does_not_know(name: str) -> None:
    for path in make.recorded(name):
        message = MESSAGES[name].FromString(path.read_bytes())
        before = message.SerializeToString(deterministic=True)
        message.DiscardUnknownFields()
        assert message.SerializeToString(deterministic=True) == before


def test_a_changed_field_number_or_type_is_found(tmp_path: Path) -> None:
    """What makes these tests worth their name: bytes under another number are not the recorded ones."""
    identity = MESSAGES["Identity"]
    path = next(one for one in RECORDED if one.stem == "Identity")
    swapped = path.read_bytes().replace(b"\x0a", b"\x12", 1)
    assert swapped != path.read_bytes()
    assert identity.FromString(swapped) != identity.FromString(path.read_bytes())
