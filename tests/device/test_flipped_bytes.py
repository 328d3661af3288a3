"""One byte of one field of a secure sum's messages is changed: it is refused with a sentence, or changes nothing."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import fields, is_dataclass, replace
from typing import Any

import numpy as np
import pytest
from support.long import long_except
from support.secure_fleet import SecureFleet

from fleetdistill.errors import QuorumNotReached, SecureSumError
from fleetdistill.knowledge import SecureMessage
from fleetdistill.secure.primitives import lift
from fleetdistill.wire.codec import encode

CHANGED = "device-1"
"""To or from which a message is changed."""
Path = tuple[str | int, ...]


def spots(value: Any, path: Path = ()) -> Iterator[Path]:
    """The first, a middle and the last byte of each field that a message has, as field names and indices."""
    if is_dataclass(value):
        for field in fields(value):
            yield from spots(getattr(value, field.name), (*path, field.name))
    elif isinstance(value, list):
        for index in sorted({0, 1, len(value) - 1} & set(range(len(value)))):
            yield from spots(value[index], (*path, index))
    elif isinstance(value, np.ndarray | bytes | str) and len(value):
        size = value.size if isinstance(value, np.ndarray) else len(value)
        yield from ((*path, place) for place in sorted({0, size // 2, size - 1}))
    elif isinstance(value, int) and (path[0] == "entries" or value):
        yield from ((*path, place) for place in range(4))


def flipped(value: Any, path: Path) -> Any:
    """The value with one bit of a byte changed."""
    place, *rest = path
    if is_dataclass(value) and not isinstance(value, type):
        return replace(value, **{str(place): flipped(getattr(value, str(place)), tuple(rest))})
    index = int(place)
    if isinstance(value, list):
        return [flipped(one, tuple(rest)) if number == index else one for number, one in enumerate(value)]
    if isinstance(value, int):
        return value ^ 1 << 8 * index
    if isinstance(value, str):
        return value[:index] + chr(ord(value[index]) ^ 1) + value[index + 1 :]
    data = np.array(np.frombuffer(value, np.uint8) if isinstance(value, bytes) else value)
    data.reshape(-1)[index] ^= 1
    return data.tobytes() if isinstance(value, bytes) else data


@pytest.mark.slow
@pytest.mark.parametrize("keys", long_except(["unsigned", "roster"], "unsigned"))
@pytest.mark.parametrize("way", long_except(["down", "up"], "up"))
def test_a_flipped_byte_is_refused_or_changes_nothing(tmp_path, keys, way):
    """Of whoever can compute the payload's digest again. But a device may add what it likes to its masked numbers."""
    messages: dict[str, SecureMessage] = {}

    def keep(step: str, name: str, message: SecureMessage) -> SecureMessage:
        return messages.setdefault(step, message) if name == CHANGED else message

    heard: dict[str, Any] = {way: keep}
    SecureFleet(tmp_path / "first", 5, keys=keys, min_in_sum=4).sum(**heard)
    places = [(step, path) for step, message in messages.items() for path in spots(message) if path[0] != "numbers"]
    assert {path[0] for _, path in places} >= (
        {"parameters", "nonce", "entries", "roster", "devices", "members", "boxes"}
        if way == "down"
        else {"keys", "boxes", "shares"}
    )
    refused, same = 0, 0
    for number, (step, path) in enumerate(places):
        fleet = SecureFleet(tmp_path / str(number), 5, keys=keys, min_in_sum=4)

        def change(at: str, name: str, message: SecureMessage, step: str = step, path: Path = path) -> SecureMessage:
            return flipped(message, path) if (at, name) == (step, CHANGED) else message

        changed: dict[str, Any] = {way: change}
        with suppress(QuorumNotReached, SecureSumError):  # there is no sum
            result = fleet.sum(**changed)
            total = lift(result.total, fleet.parameters().width)
            assert np.array_equal(total, fleet.plain_sum(result.devices)), (step, path)
            said = fleet.refused or fleet.cohort.events or result.wrong_shares
            refused, same = refused + bool(said), same + (not said)
        assert all(len(text.split()) > 5 for text in fleet.refused.values()), (step, path, fleet.refused)
        assert not fleet.opened(fleet.sid), (step, path)
    assert refused > same


@pytest.mark.parametrize("keys", ["unsigned", "roster"])
def test_a_flipped_byte_changes_the_payloads_digest(tmp_path, keys):
    """Of every message, the masked numbers included: front and device refuse a payload with another digest."""
    seen: list[SecureMessage] = []

    def keep(step: str, name: str, message: SecureMessage) -> SecureMessage:
        if name == CHANGED:
            seen.append(message)
        return message

    SecureFleet(tmp_path, 5, keys=keys, min_in_sum=4).sum(down=keep, up=keep)
    assert any(message.numbers is not None for message in seen)
    for message in seen:
        digest = encode({"session": message}).sha256
        assert all(encode({"session": flipped(message, path)}).sha256 != digest for path in spots(message))
