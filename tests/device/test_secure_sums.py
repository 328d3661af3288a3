"""A device in a secure sum: a server or a device that lies, lost messages, crashes and restored directories."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import re
import shutil
import struct
import time
from typing import Any

import numpy as np
import pytest
from support.long import long_except
from support.secure_fleet import SecureFleet, signer_of
from support.secured import device_credentials, save_credentials

from fleetdistill import SecureTerms, Signer
from fleetdistill.device.events import DeviceLock, Events
from fleetdistill.device.secure import SecureSums, check_secure
from fleetdistill.errors import (
    CannotAnswer,
    ConfigurationError,
    PrivacyBudgetError,
    QuorumNotReached,
    SecureSumError,
    StateError,
    SumRefusedError,
)
from fleetdistill.knowledge import Plan, PrivateRows, SecureEntry, SecureMessage
from fleetdistill.methods import config_class, config_to_plan
from fleetdistill.methods.base import Answer, Ask
from fleetdistill.methods.classstats_secure.exchange import CHECK, INPUT, KEYS, SHARES, UNMASK
from fleetdistill.secure.certificate import certify
from fleetdistill.secure.member import endorse
from fleetdistill.secure.primitives import lift, sha256, tag, verification_key
from fleetdistill.secure.session import Roster, pack_members
from fleetdistill.state import failpoints
from fleetdistill.state.privacy_ledger import PrivacyBudget
from fleetdistill.state.secure_sessions import SecureSessions
from fleetdistill.wire.codec import encode
from fleetdistill.wire.v1 import contract_pb2
from fleetdistill_server.methods.secure.secure_sum import SecureSum
from fleetdistill_server.security.pki import Authority, make_authority

SUMMED = "classstats_summed"
METHODS = pytest.mark.parametrize("method", ["classstats_secure", SUMMED])
STEPS = {
    "unsigned": (KEYS, SHARES, INPUT, UNMASK),
    "certificates": (KEYS, SHARES, INPUT, CHECK, UNMASK),
    "roster": (KEYS, SHARES, INPUT, CHECK, UNMASK),
}
EVERY = pytest.mark.parametrize("keys", long_except(STEPS, "roster"))
SIGNED = pytest.mark.parametrize("keys", long_except(["certificates", "roster"], "roster"))
IN_RING = 16
"""Devices of a ring in which each has ten neighbours."""


def signed(fleet: SecureFleet, result: SecureSum) -> np.ndarray:
    return lift(result.total, fleet.parameters().width)


# --- drop-outs and lost messages


@EVERY
@METHODS
@pytest.mark.parametrize("step", ["nothing", KEYS, SHARES, INPUT, CHECK, UNMASK])
def test_a_device_may_vanish_at_every_step(tmp_path, keys, method, step):
    fleet = SecureFleet(tmp_path, 5, method=method, keys=keys, min_in_sum=4)
    result = fleet.sum(lost=[(step, "device-2")])
    members = [name for name in fleet.names if name != "device-2" or step in ("nothing", CHECK, UNMASK)]
    assert list(result.devices) == members or (keys == "unsigned" and step == CHECK)
    assert np.array_equal(signed(fleet, result), fleet.plain_sum(result.devices))
    assert not fleet.refused
    assert not fleet.opened(result.sid)


@EVERY
@pytest.mark.parametrize("step", [KEYS, SHARES, INPUT, UNMASK])
def test_no_sum_and_nothing_open_if_too_many_vanish(tmp_path, keys, step):
    fleet = SecureFleet(tmp_path, 5, keys=keys, min_in_sum=4)
    with pytest.raises(QuorumNotReached):
        fleet.sum(lost=[(step, "device-1"), (step, "device-3")])
    assert not fleet.opened(bytes(32))


def test_wrong_shares_are_named_and_the_sum_is_right(tmp_path):
    fleet = SecureFleet(tmp_path, 7, min_in_sum=5)

    def spoil(step, name, message):
        wrong = (step, name) == (UNMASK, "device-1")
        return dataclasses.replace(message, shares=message.shares ^ 1) if wrong else message

    result = fleet.sum(up=spoil)
    assert result.wrong_shares == ("device-1",)
    assert np.array_equal(signed(fleet, result), fleet.plain_sum(fleet.names))


def test_too_many_wrong_shares_give_no_sum(tmp_path):
    fleet = SecureFleet(tmp_path, 5, min_in_sum=4)

    def spoil(step, name, message):
        wrong = step == UNMASK and name < "device-2"
        return dataclasses.replace(message, shares=message.shares ^ 1) if wrong else message

    with pytest.raises(SecureSumError, match="no 4 shares of a secret of device-0 fit its keys"):
        fleet.sum(up=spoil)


# --- a ring


def in_ring(directory, **settings):
    return SecureFleet(directory, IN_RING, graph="ring", max_in_sum=IN_RING, **settings)


@pytest.mark.long
@METHODS
@pytest.mark.parametrize("step", STEPS["unsigned"])
def test_devices_of_a_ring_may_vanish_at_every_step(tmp_path, method, step):
    """Each device sees ten others, and the sum is number for number that of its members."""
    fleet = in_ring(tmp_path, method=method)
    result = fleet.sum(lost=[(step, "device-3"), (step, "device-11")])
    assert len(result.devices) == IN_RING - (0 if step == UNMASK else 2)
    assert signed(fleet, result).tolist() == fleet.plain_sum(result.devices).tolist()
    assert not fleet.refused
    assert not fleet.opened(fleet.sid)
    seen = {len(holders) for holders in fleet.holders.values()}
    assert seen == {11}


def test_a_ring_needs_two_thirds_of_its_devices(tmp_path):
    fleet = in_ring(tmp_path, min_in_sum=3)
    with pytest.raises(QuorumNotReached, match="10 devices answered, the quorum is 11"):
        fleet.sum(lost=[(INPUT, name) for name in fleet.names[:6]])
    assert not fleet.opened(fleet.sid)


def test_a_device_of_a_ring_holds_the_server_to_two_thirds(tmp_path):
    fleet = in_ring(tmp_path)
    with pytest.raises(QuorumNotReached):
        fleet.sum(least=10, honest=10)
    assert {text for (step, _), text in fleet.refused.items() if step == SHARES} == {
        "10 of 16 devices are enough for the sum; in a ring it must be two thirds"
    }


def of_fewer(message):
    """The list of a sum of one device less."""
    return dataclasses.replace(message, devices=message.devices - 1)


def of_another_neighbour(message):
    """The list with the first other device under another number, in order."""
    missing = min(set(range(IN_RING)) - {entry.index for entry in message.entries})
    moved = [dataclasses.replace(message.entries[0], index=missing), *message.entries[1:]]
    return dataclasses.replace(message, entries=sorted(moved, key=lambda entry: entry.index))


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (of_fewer, "not that of this device|this device has number 15 of 15"),
        (of_another_neighbour, "not that of this device"),
        (lambda message: dataclasses.replace(message, entries=message.entries[1:]), "not that of|own keys"),
        (lambda message: dataclasses.replace(message, devices=2**32 - 1), "at most 16 are allowed"),
        (lambda message: dataclasses.replace(message, devices=0), "only 0 devices sent keys"),
        (lambda message: dataclasses.replace(message, roster=b""), "the digest of a secure sum has 0 bytes"),
    ],
)
def test_another_list_than_the_neighbours_is_refused(tmp_path, change, says):
    fleet = in_ring(tmp_path)

    def forge(step, name, message):
        return change(message) if step == SHARES else message

    with pytest.raises(QuorumNotReached):
        fleet.sum(down=forge)
    assert len(fleet.refused) >= IN_RING - 5  # five are no neighbours of a device that is left out
    assert all(re.search(says, text) for text in fleet.refused.values()), fleet.refused


@pytest.mark.long
def test_a_ring_that_falls_apart_gives_no_sum(tmp_path):
    """Half a neighbourhood in a row is gone at two places, so that the masks of the rest cancel in two sums."""
    devices = 94
    fleet = SecureFleet(tmp_path, devices, graph="ring", max_in_sum=devices, method=SUMMED)
    half = fleet.parameters().degree // 2

    def lose(step, name, message):
        if step == INPUT:
            order = sorted(range(devices), key=lambda index: sha256(tag("graph"), fleet.sid, struct.pack("<I", index)))
            if order.index(fleet.indices[name]) % (devices // 2) < half:
                raise CannotAnswer("lost")
        return message

    with pytest.raises(SecureSumError, match="would give several sums"):
        fleet.sum(up=lose)
    assert not fleet.opened(fleet.sid)


# --- devices that lie


def test_a_box_that_does_not_open_names_its_sender(tmp_path):
    fleet = SecureFleet(tmp_path, 7, min_in_sum=5)

    def spoil(step, name, message):
        if (step, name) != (SHARES, "device-1"):
            return message
        boxes = message.boxes.copy()
        boxes[0] ^= 1  # for device-0
        return dataclasses.replace(message, boxes=boxes)

    result = fleet.sum(up=spoil)
    assert fleet.refused.keys() == {(INPUT, "device-0")}
    assert "device 'device-1'" in fleet.refused[INPUT, "device-0"]
    assert np.array_equal(signed(fleet, result), fleet.plain_sum(fleet.names[1:]))


def test_a_missing_box_leaves_its_sender_out(tmp_path):
    fleet = SecureFleet(tmp_path, 5, min_in_sum=4)

    def spoil(step, name, message):
        return (
            dataclasses.replace(message, boxes=message.boxes[1:]) if (step, name) == (SHARES, "device-1") else message
        )

    result = fleet.sum(up=spoil)
    assert "device-1" not in result.devices
    assert fleet.cohort.kinds == ["wrong-share"]
    assert fleet.cohort.events[0].text.endswith("left out of the sum (not yet reviewed by a cryptographer)")
    assert np.array_equal(signed(fleet, result), fleet.plain_sum(result.devices))


def test_two_devices_with_one_key_give_no_sum(tmp_path):
    fleet = SecureFleet(tmp_path, 5, min_in_sum=4)
    first: dict[str, SecureMessage] = {}

    def copy(step, name, message):
        return first.setdefault(step, message) if step == KEYS else message

    with pytest.raises(SecureSumError, match="same key"):
        fleet.sum(up=copy)


# --- a server that lies


def changed(**values):
    return lambda step, name, message: dataclasses.replace(message, **values) if values else message


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"least": 3}, "at least 4 devices, this one may have 3"),
        ({"epsilon": 6.0}, "not those of the run"),
        ({"delta": 1e-3}, "not those of the run"),
        ({"honest": 1}, None),
        ({"honest": 4}, "may add none"),
        ({"count_bits": 0}, "not those of the run"),
        ({"dimensions": 7}, "not those of the run"),
        ({"width": 8}, "not those of the run"),
        ({"keys": 2}, "not those of the run"),
        ({"most": 10}, "not those of the run"),
        ({"degree": 2}, "not those of the run"),
    ],
)
def test_a_device_refuses_other_terms_than_its_own(tmp_path, change, says):
    fleet = SecureFleet(tmp_path, 5, terms=SecureTerms(min_devices=4, colluders=1), colluders=1, min_in_sum=4)
    change = {"honest": min(3, change.get("least", 4)), **change}
    if says is None:
        assert len(fleet.sum(**change).devices) == 5, "fewer honest devices are assumed, so each adds more noise"
        return
    with pytest.raises(QuorumNotReached):
        fleet.sum(**change)
    assert len(fleet.refused) == 5
    assert all(says in text for text in fleet.refused.values())
    assert all(fleet.frozen(name) is None for name in fleet.names), "no noise was drawn"
    assert not list(tmp_path.rglob("privacy.json")), "no budget is spent"


@pytest.mark.parametrize(
    ("settings", "change", "says"),
    [
        ({"colluders": 1, "min_in_sum": 4}, {"honest": 4}, "1 may add none"),
        ({"keys": "roster", "min_in_sum": 10}, {"honest": 10}, "1 may add none"),
        ({"min_in_sum": 5}, {"least": 4, "honest": 4}, "at least 5 devices, this one may have 4"),
    ],
)
def test_a_device_holds_the_server_to_the_runs_settings(tmp_path, settings, change, says):
    fleet = SecureFleet(tmp_path, max(5, settings["min_in_sum"]), **settings)
    with pytest.raises(QuorumNotReached):
        fleet.sum(**change)
    assert all(says in text for text in fleet.refused.values()), fleet.refused
    assert fleet.sum(number=2).devices


@pytest.mark.long
def test_the_rule_for_colluders_is_of_those_that_take_part(tmp_path):
    """A tenth of 30 devices may add no noise, not of the 21 that suffice."""
    fleet = SecureFleet(tmp_path, 30, keys="roster")
    agreed = fleet.parameters()
    assert (agreed.least, agreed.honest) == (21, 18)
    with pytest.raises(QuorumNotReached):
        fleet.sum(honest=19)
    assert {step for step, _ in fleet.refused} == {SHARES}
    assert set(fleet.refused.values()) == {
        "the sum counts on the noise of 19 of 21 devices; this device requires that 3 may add none"
    }
    assert len(fleet.sum(number=2).devices) == 30


@EVERY
def test_q_is_at_least_the_threshold_of_shares(tmp_path, keys):
    """Whatever the run's min_in_sum: of five devices that sent keys, four must give shares."""
    fleet = SecureFleet(tmp_path, 5, keys=keys, min_in_sum=3)
    assert fleet.parameters().least == 4
    with pytest.raises(QuorumNotReached):
        fleet.sum(least=3, honest=3)
    assert {step for step, _ in fleet.refused} == {SHARES}
    assert set(fleet.refused.values()) == {"3 of 5 devices are enough for the sum; it must be 4"}
    assert not fleet.opened(fleet.sid)


@METHODS
@pytest.mark.parametrize(
    "change",
    [
        lambda config, contract: (dataclasses.replace(config, local_epochs=7), contract),
        lambda config, contract: (config, changed_contract(contract, extractor_file=b"x" * 32)),
        lambda config, contract: (config, changed_contract(contract, initial_weights=b"w" * 32)),
        lambda config, contract: (config, changed_contract(contract, classes=["a", "b", "d"])),
    ],
)
def test_devices_with_another_contract_are_in_no_sum(tmp_path, monkeypatch, method, change):
    """Else a server that gives all but one device a contract in which no row counts would learn that one's part."""
    fleet = SecureFleet(tmp_path, 5, method=method, keys="roster")
    usual, other = (fleet.config, fleet.contract), change(fleet.config, fleet.contract)
    real = fleet.answer

    def answer(name, *arguments):
        fleet.config, fleet.contract = usual if name == "device-3" else other
        try:
            return real(name, *arguments)
        finally:
            fleet.config, fleet.contract = usual

    monkeypatch.setattr(fleet, "answer", answer)
    with pytest.raises((QuorumNotReached, SecureSumError)):
        fleet.sum()
    assert not fleet.opened(fleet.sid)


def changed_contract(contract: contract_pb2.Contract, **changes: Any) -> contract_pb2.Contract:
    result = contract_pb2.Contract()
    result.CopyFrom(contract)
    for name in changes:
        result.ClearField(name)  # type: ignore[arg-type]
    result.MergeFrom(contract_pb2.Contract(**changes))
    return result


def test_two_rosters_end_in_refusals(tmp_path):
    """The server shows one device another key of a second device, as it must to read its boxes."""
    own = SecureFleet(tmp_path / "other", 5)
    own.sum()
    for keys, refusal in dict.fromkeys(STEPS, (SHARES, "device-0")).items():
        fleet = SecureFleet(tmp_path / keys, 5, keys=keys, min_in_sum=4)

        def forge(step, name, message):
            if (step, name) != (SHARES, "device-0"):
                return message
            entries = list(message.entries)
            forged = own.entries[1] + entries[1].keys[100:]
            entries[1] = dataclasses.replace(entries[1], keys=forged)
            return dataclasses.replace(message, entries=entries)

        result = fleet.sum(down=forge)
        assert fleet.refused.keys() == {refusal}
        assert "device-0" not in result.devices
        assert not fleet.opened(result.sid)


def test_a_forged_roster_with_its_digest_ends_at_the_boxes(tmp_path):
    """With unsigned keys the forgery is found when the two devices' boxes, sealed for two rosters, do not open."""
    own, fleet = SecureFleet(tmp_path / "other", 5), SecureFleet(tmp_path / "d", 5, min_in_sum=4)
    own.sum()
    sids = {}

    def forge(step, name, message):
        if (step, name) != (SHARES, "device-0"):
            return message
        session = SecureSessions(fleet.files(name)).open()
        assert session is not None
        sids["sid"] = session.sid
        entries = [dataclasses.replace(entry) for entry in message.entries]
        entries[1] = dataclasses.replace(entries[1], keys=own.entries[1])
        roster = Roster(sids["sid"], tuple(e.device for e in entries), tuple(e.keys for e in entries))
        return dataclasses.replace(message, entries=entries, roster=roster.digest)

    with pytest.raises(QuorumNotReached):
        fleet.sum(down=forge)
    assert {step for step, _ in fleet.refused} == {INPUT}
    assert not fleet.opened(sids["sid"])


def flipped(data):
    """The bytes with the last bit changed."""
    return data[:-1] + bytes([data[-1] ^ 1])


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda entries: entries[:-1], "own keys|not that of this device"),
        (lambda entries: entries[::-1], "not that of this device"),
        (
            lambda entries: [*entries[:-1], dataclasses.replace(entries[-1], endorsement=bytes(64))],
            "endorsed|certificate of device 'device-4' cannot be used: it cannot be read",
        ),
        (
            lambda entries: [*entries[:-1], dataclasses.replace(entries[-1], keys=flipped(entries[-1].keys))],
            "own keys|digest",
        ),
    ],
)
@SIGNED
def test_a_changed_list_of_devices_is_refused_by_all(tmp_path, change, says, keys):
    fleet = SecureFleet(tmp_path, 5, keys=keys, min_in_sum=5)

    def forge(step, name, message):
        return dataclasses.replace(message, entries=change(message.entries)) if step == SHARES else message

    with pytest.raises(QuorumNotReached):
        fleet.sum(down=forge)
    assert len(fleet.refused) == 5
    assert all(re.search(says, text) for text in fleet.refused.values()), fleet.refused


def test_a_server_cannot_invent_devices_without_roster_key(tmp_path):
    """A device that the server has made signs its keys, but nobody has endorsed them."""
    fleet = SecureFleet(tmp_path, 5, keys="roster", min_in_sum=4)
    invented, other = signer_of("device-4"), bytes(range(1, 33))
    forged = endorse(other, "device-4", verification_key(invented.key))

    def forge(step, name, message):
        if step != SHARES:
            return message
        entries = [*message.entries[:-1], dataclasses.replace(message.entries[-1], endorsement=forged)]
        return dataclasses.replace(message, entries=entries)

    with pytest.raises(QuorumNotReached):
        fleet.sum(down=forge)
    assert set(fleet.refused.values()) == {"the key of device 'device-4' is not endorsed by the roster's key"}


def endorsed_by(fleet, name, directory=None, **issued):
    """An endorsement of the key that a device has sent, by a certificate of the fleet's CA or of another one."""
    authority = Authority(fleet.files(".").directory / "pki") if directory is None else make_authority(directory)
    own = device_credentials(authority, issued.pop("names", name), **issued)
    return certify(own.key, own.chain, fleet.entries[fleet.names.index(name)][100:132])


@pytest.mark.parametrize(
    ("forge", "says"),
    [
        (lambda fleet, own, tmp_path: endorsed_by(fleet, "device-4"), None),
        (lambda fleet, own, tmp_path: endorsed_by(fleet, "device-4", tmp_path / "x"), "it is not from a CA that"),
        (
            lambda fleet, own, tmp_path: endorsed_by(fleet, "device-4", names="device-3"),
            "it is of fleetdistill:device:",
        ),
        (lambda fleet, own, tmp_path: endorsed_by(fleet, "device-3", names="device-4"), "has not signed the device's"),
        (lambda fleet, own, tmp_path: own[:-9], "it cannot be read"),
        (lambda fleet, own, tmp_path: own + bytes(2000), "bytes, at most 2048 are allowed"),
        (lambda fleet, own, tmp_path: b"", "it cannot be read"),
    ],
)
def test_every_device_refuses_a_wrong_certificate(tmp_path, forge, says):
    """The server or a device shows another endorsement of device-4's key; only the CA can make one that fits."""
    fleet = SecureFleet(tmp_path / "d", 5, keys="certificates", min_in_sum=4)

    def change(step, name, message):
        if step != SHARES:
            return message
        wrong = dataclasses.replace(
            message.entries[-1], endorsement=forge(fleet, message.entries[-1].endorsement, tmp_path / name)
        )
        return dataclasses.replace(message, entries=[*message.entries[:-1], wrong])

    if says is None:
        assert len(fleet.sum(down=change).devices) == 5
        return
    with pytest.raises(QuorumNotReached):
        fleet.sum(down=change)
    assert len(fleet.refused) == 5
    for text in fleet.refused.values():
        assert text.startswith("the certificate of device 'device-4' cannot be used: ")
        assert says in text


@pytest.mark.parametrize(("days", "expired"), [(0, False), (2, True)])
def test_a_device_with_an_expired_certificate_stays_out(tmp_path, days, expired):
    """It notices itself, so that the others have their sum; a day after the end it may still take part."""
    later = time.time() + days * 86_400
    fleet = SecureFleet(tmp_path, 5, keys="certificates", min_in_sum=4, now=lambda: later)
    save_credentials(tmp_path / "device-4", device_credentials(Authority(tmp_path / "pki"), "device-4", days=1e-5))
    result = fleet.sum()
    assert len(result.devices) == (4 if expired else 5)
    assert list(fleet.refused) == ([(KEYS, "device-4")] if expired else [])
    assert all("'device-4' cannot be used: it was valid until" in text for text in fleet.refused.values())
    assert np.array_equal(signed(fleet, result), fleet.plain_sum(result.devices))


def test_a_certificate_for_another_id_is_not_sent(tmp_path):
    """Otherwise all others would refuse, and one device that is set up wrongly would prevent every sum."""
    fleet = SecureFleet(tmp_path, 5, keys="certificates", min_in_sum=4)
    for name in fleet.names:
        save_credentials(tmp_path / name, device_credentials(Authority(tmp_path / "pki"), "device-9"))
    with pytest.raises(QuorumNotReached):
        fleet.sum()
    assert list(fleet.refused) == [(KEYS, name) for name in fleet.names]
    assert all("cannot be used: it is of fleetdistill:device:device-9" in text for text in fleet.refused.values())


@pytest.mark.parametrize("fault", ["another roster", "another device's endorsement", "keys that it did not sign"])
def test_the_server_leaves_out_a_device_that_others_would_refuse(tmp_path, fault):
    """With the roster's public key in the run, one device that is provisioned wrongly, or hostile, spoils no sum."""
    roster_key = signer_of("device-0").roster_key.hex()
    fleet = SecureFleet(tmp_path, 5, keys="roster", roster_key=roster_key, min_in_sum=4)
    key, other = signer_of("device-4").key, bytes(range(1, 33))
    forged = {
        "another roster": endorse(other, "device-4", verification_key(key)),
        "another device's endorsement": signer_of("device-3").endorsement,
    }

    def spoil(step, name, message):
        if (step, name) != (KEYS, "device-4"):
            return message
        keys = message.keys.copy()
        if fault in forged:
            keys[196:] = np.frombuffer(forged[fault], np.uint8)
        else:
            keys[0] ^= 1
        return dataclasses.replace(message, keys=keys)

    result = fleet.sum(up=spoil)
    assert np.array_equal(signed(fleet, result), fleet.plain_sum(fleet.names[:4]))
    assert fleet.cohort.kinds == ["not-endorsed"]
    assert fleet.cohort.events[0].device == "device-4"
    assert fleet.cohort.events[0].text.endswith("left out of the sum (not yet reviewed by a cryptographer)")
    assert not fleet.refused
    assert not releases(tmp_path / "device-4")


@pytest.mark.parametrize("fault", ["another CA", "another device's", "cut short"])
def test_the_server_leaves_out_a_wrong_certificate(tmp_path, fault):
    """It knows the CA that the devices trust, so one bad certificate does not make all others refuse."""
    fleet = SecureFleet(tmp_path / "d", 5, keys="certificates", min_in_sum=4)
    fleet.authorities = (tmp_path / "d" / "pki" / "ca.pem").read_bytes()
    authority = make_authority(tmp_path / "other") if fault == "another CA" else Authority(tmp_path / "d" / "pki")
    own = device_credentials(authority, "device-3" if fault == "another device's" else "device-4")

    def spoil(step, name, message):
        if (step, name) != (KEYS, "device-4"):
            return message
        keys = message.keys.tobytes()
        wrong = keys[:-9] if fault == "cut short" else keys[:196] + certify(own.key, own.chain, keys[100:132])
        return dataclasses.replace(message, keys=np.frombuffer(wrong, np.uint8))

    result = fleet.sum(up=spoil)
    assert np.array_equal(signed(fleet, result), fleet.plain_sum(fleet.names[:4]))
    (event,) = fleet.cohort.events
    assert (event.kind, event.device) == ("not-endorsed", "device-4")
    assert "its certificate cannot be used: it" in event.text
    assert not fleet.refused


def test_a_renewed_certificate_changes_no_answer(tmp_path):
    """The endorsement is stored with the step: a repeated ask gets the same bytes, and the sum goes on."""
    fleet = SecureFleet(tmp_path, 5, keys="certificates", min_in_sum=4)
    sent = []

    def renew(step, name, message):
        if name == "device-0":
            asked = {"session": message}
            sent.append((step, fleet.answer(name, step, asked), asked))
            save_credentials(tmp_path / name, device_credentials(Authority(tmp_path / "pki"), name))
            again = fleet.answer(name, step, asked)
            assert encode(again).sha256 == encode(sent[-1][1]).sha256
        return message

    result = fleet.sum(down=renew)
    assert [step for step, *_ in sent] == list(STEPS["certificates"])
    assert np.array_equal(signed(fleet, result), fleet.plain_sum(fleet.names))


def test_each_sum_has_a_signing_key_of_its_own(tmp_path):
    fleet = SecureFleet(tmp_path, 5, keys="certificates", min_in_sum=4, budget=PrivacyBudget(20.0, 1e-5))
    fleet.sum()
    first = {entry[100:132] for entry in fleet.entries.values()}
    fleet.sum(number=2)
    assert len(first | {entry[100:132] for entry in fleet.entries.values()}) == 10


@SIGNED
def test_two_lists_of_survivors_unmask_nothing_with_signatures(tmp_path, keys):
    """The server asks some devices for shares of device-4's own mask, and the others for those of its pair masks."""
    fleet = SecureFleet(tmp_path, 5, keys=keys, min_in_sum=4)

    def forge(step, name, message):
        if step in (CHECK, UNMASK) and name in ("device-0", "device-1"):
            return dataclasses.replace(message, members=pack_members(range(4), 5))
        return message

    with pytest.raises(QuorumNotReached):
        fleet.sum(down=forge)
    assert not fleet.seen[UNMASK], "no device has given a share"


@SIGNED
def test_another_list_than_the_signed_one_unmasks_nothing(tmp_path, keys):
    fleet = SecureFleet(tmp_path, 5, keys=keys, min_in_sum=4)

    def forge(step, name, message):
        return dataclasses.replace(message, members=pack_members(range(4), 5)) if step == UNMASK else message

    with pytest.raises(QuorumNotReached):
        fleet.sum(down=forge)
    assert not fleet.seen[UNMASK]
    assert {step for step, _ in fleet.refused} == {UNMASK}


@SIGNED
@pytest.mark.parametrize("signatures", [3, 4])
def test_four_of_five_signatures_of_a_list_are_needed(tmp_path, keys, signatures):
    """More than two thirds: two lists of survivors cannot both have so many, unless a third of the devices sign two."""
    fleet = SecureFleet(tmp_path, 5, keys=keys, min_in_sum=4)

    def leave_out(step, name, message):
        return dataclasses.replace(message, entries=message.entries[:signatures]) if step == UNMASK else message

    if signatures == 4:
        result = fleet.sum(down=leave_out)
        assert np.array_equal(signed(fleet, result), fleet.plain_sum(fleet.names))
        return
    with pytest.raises(QuorumNotReached):
        fleet.sum(down=leave_out)
    assert not fleet.seen[UNMASK], "no device has given a share"
    assert set(fleet.refused.values()) == {"3 devices have signed the same list as this device, 4 are needed"}


@EVERY
def test_both_kinds_of_share_are_never_given(tmp_path, keys):
    """After a sum, the server asks each device again, with one device fewer: conflict, and the session is destroyed."""
    fleet = SecureFleet(tmp_path, 5, keys=keys, min_in_sum=4)
    result = fleet.sum()
    for name in fleet.names[:4]:
        message = SecureMessage(members=pack_members(range(4), 5))
        with pytest.raises(SumRefusedError, match="another list"):
            fleet.answer(name, UNMASK, {"session": message})
        assert fleet.frozen(name) is None
        with pytest.raises(SumRefusedError, match="no open sum"):
            fleet.answer(name, UNMASK, {"session": message})
    conflicts = [event.text for event in fleet.events if event.kind == "secure-conflict"]
    text = "this sum was answered with another list (secure sums are not yet reviewed by a cryptographer)"
    assert conflicts == [f"round 1, step 'secure_unmask': {text}"] * 4
    assert not fleet.opened(result.sid)


@EVERY
def test_the_server_opens_what_all_others_forget(tmp_path, keys):
    """That `opened` finds an input at all: four devices are restored and asked for the other shares of the fifth."""
    fleet = SecureFleet(tmp_path / "d", 5, keys=keys, min_in_sum=4)
    last = STEPS[keys][STEPS[keys].index(INPUT) + 1]

    def back_up(step, name, message):
        if step == last:
            shutil.copytree(tmp_path / "d" / name, tmp_path / "before" / name)
        return message

    assert not fleet.opened(fleet.sum(down=back_up).sid)
    for name in fleet.names[:4]:
        shutil.rmtree(tmp_path / "d" / name)
        shutil.copytree(tmp_path / "before" / name, tmp_path / "d" / name)
    message = SecureMessage(members=pack_members(range(4), 5))
    signatures: dict[int, bytes] = {}
    for index, name in enumerate(fleet.names[:4] if last == CHECK else []):
        sent: Any = fleet.answer(name, CHECK, {"session": message})["signature"]
        signatures[index] = sent.signature.tobytes()
    entries = [SecureEntry(index=index, signature=signature) for index, signature in signatures.items()]
    message = dataclasses.replace(message, entries=entries)
    for name in fleet.names[:4]:
        assert not fleet.opened(fleet.sid), "fewer than four have forgotten"
        sent = fleet.answer(name, UNMASK, {"session": message})["shares"]
        fleet.keep(UNMASK, name, message, sent)
    assert fleet.opened(fleet.sid).keys() == {"device-4"}
    assert np.array_equal(fleet.opened(fleet.sid)["device-4"], fleet.frozen("device-4"))


@pytest.mark.parametrize("step", [SHARES, INPUT, UNMASK])
@pytest.mark.parametrize("members", [(0, 1, 2), (1, 2, 3, 4), ()])
def test_lists_with_too_few_or_without_the_device_are_refused(tmp_path, step, members):
    fleet = SecureFleet(tmp_path, 5, min_in_sum=4)

    def forge(at, name, message):
        if at != step:
            return message
        if step == SHARES:
            return dataclasses.replace(message, entries=[message.entries[index] for index in members])
        return dataclasses.replace(message, members=pack_members(members, 5))

    with pytest.raises((QuorumNotReached, SecureSumError)):
        fleet.sum(down=forge)
    assert {at for at, _ in fleet.refused} == {step}
    assert not fleet.opened(bytes(32)), "a list without one device is one that others must believe"


@EVERY
def test_steps_go_forward_only(tmp_path, keys):
    """Before each step, device-0 is asked for every later one: it refuses, and the sum goes on."""
    fleet = SecureFleet(tmp_path, 5, keys=keys, min_in_sum=4)
    order = (KEYS, SHARES, INPUT, CHECK, UNMASK)

    def skip(step, name, message):
        for one in order[order.index(step) + 1 :] if name == "device-0" else ():
            with pytest.raises(SumRefusedError, match=r"no open sum|one by one"):
                fleet.answer(name, one, {"session": message})
        return message

    result = fleet.sum(down=skip)
    assert np.array_equal(signed(fleet, result), fleet.plain_sum(fleet.names))


def test_a_second_sum_without_one_device_needs_budget(tmp_path):
    """Differencing: two sums over sets that differ by one device are both charged to each device's budget."""
    fleet = SecureFleet(tmp_path, 5, min_in_sum=4)
    fleet.sum()
    for name in fleet.names:
        learn(fleet, name, counted=True)
    with pytest.raises(QuorumNotReached):
        fleet.sum(number=2, devices=fleet.names[:4])
    assert set(fleet.refused.values()) == {"privacy budget used up"}


@EVERY
@METHODS
@pytest.mark.parametrize("sent", [KEYS, INPUT])
def test_a_second_sum_of_one_round_is_refused(tmp_path, keys, method, sent):
    """A server that lies begins another sum in the same round, or goes back a round: the open one stays, and is next.

    It costs nothing, whatever the budget. A later round says that the first sum has ended without the device.
    """
    fleet = SecureFleet(tmp_path, 5, method=method, keys=keys, min_in_sum=4, budget=PrivacyBudget(20.0, 1e-5))
    lost = STEPS[keys][STEPS[keys].index(sent) + 1]
    with pytest.raises(QuorumNotReached):
        fleet.sum(number=2, lost=[(lost, name) for name in fleet.names])
    charged = len(releases(tmp_path / "device-0"))
    assert charged == (method != SUMMED and sent == INPUT)
    before = root_of(fleet, "device-0")
    for number in (1, 2):
        with pytest.raises(SumRefusedError, match="of this round or of a later one, and joins no second one"):
            asked_again(fleet, "device-0", number=number)
    assert root_of(fleet, "device-0") == before
    assert len(releases(tmp_path / "device-0")) == charged
    if sent == KEYS or keys == "unsigned" or method != SUMMED:
        asked_again(fleet, "device-0", number=3)
        assert root_of(fleet, "device-0") != before


@SIGNED
def test_a_later_sum_beyond_the_budget_leaves_the_open_one(tmp_path, keys):
    """With a budget of one sum; the device may yet be told that the first sum contains it."""
    fleet = SecureFleet(tmp_path, 5, keys=keys, min_in_sum=4)
    fleet.sum()
    before = root_of(fleet, "device-0")
    with pytest.raises(PrivacyBudgetError):
        asked_again(fleet, "device-0")
    assert root_of(fleet, "device-0") == before
    assert len(releases(tmp_path / "device-0")) == 1


@EVERY
def test_a_sum_in_which_nothing_was_sent_is_not_charged(tmp_path, keys):
    """Until its masked input leaves, nothing that depends on the device's rows has left it."""
    fleet = SecureFleet(tmp_path, 5, keys=keys, min_in_sum=4)
    for number in range(1, 4):
        asked_again(fleet, "device-0", number=number)
    with pytest.raises(QuorumNotReached):
        fleet.sum(number=4, lost=[(SHARES, "device-1"), (SHARES, "device-2")])
    assert not releases(tmp_path / "device-0")
    result = fleet.sum(number=5)
    assert np.array_equal(signed(fleet, result), fleet.plain_sum(fleet.names))
    assert len(releases(tmp_path / "device-0")) == 1


def test_terms_with_more_colluders_than_devices_are_kept(tmp_path):
    fleet = SecureFleet(tmp_path, 5, terms=SecureTerms(min_devices=3, colluders=9))
    with pytest.raises(QuorumNotReached):
        fleet.sum()
    assert all("9 may add none" in text for text in fleet.refused.values())


@pytest.mark.parametrize(
    "boxes",
    [np.zeros((), np.uint8), np.zeros((4, 79), np.uint8), np.zeros((4, 80), np.float32), np.zeros(320, np.uint8)],
)
def test_boxes_of_another_form_are_refused(tmp_path, boxes):
    fleet = SecureFleet(tmp_path, 5)

    def forge(step, name, message):
        return dataclasses.replace(message, boxes=boxes) if step == INPUT else message

    with pytest.raises(QuorumNotReached):
        fleet.sum(down=forge)
    assert {step for step, _ in fleet.refused} == {INPUT}


@pytest.mark.parametrize("name", ["", "x" * 70_000, "../a"])
def test_a_list_with_an_id_that_is_none_is_refused(tmp_path, name):
    fleet = SecureFleet(tmp_path, 5)

    def forge(step, device, message):
        entries = (
            [*message.entries[:-1], dataclasses.replace(message.entries[-1], device=name)] if message.entries else []
        )
        return dataclasses.replace(message, entries=entries) if step == SHARES else message

    with pytest.raises(QuorumNotReached):
        fleet.sum(down=forge)
    assert {step for step, _ in fleet.refused} == {SHARES}


@EVERY
def test_each_sum_with_masked_input_is_charged(tmp_path, keys):
    """A device that has not sent its masked input knows that a sum which it is told was short does not contain it."""
    fleet = SecureFleet(tmp_path, 5, keys=keys, min_in_sum=4, budget=PrivacyBudget(20.0, 1e-5))
    with pytest.raises(QuorumNotReached):
        fleet.sum(lost=[(INPUT, "device-1"), (INPUT, "device-2")])
    before = {name: fleet.frozen(name) for name in fleet.names}
    result = fleet.sum(number=2)
    assert np.array_equal(signed(fleet, result), fleet.plain_sum(fleet.names))
    for name in fleet.names:
        assert not np.array_equal(before[name], fleet.frozen(name)), "new noise"
        assert len(releases(tmp_path / name)) == (1 if name in ("device-1", "device-2") else 2)


@EVERY
def test_a_sum_that_was_finished_without_ones_shares_is_charged(tmp_path, keys):
    """Its masked input and the shares of the others are enough; the device never learns that it was counted."""
    fleet = SecureFleet(tmp_path, 5, keys=keys, min_in_sum=4, budget=PrivacyBudget(20.0, 1e-5))
    first = fleet.sum(lost=[(UNMASK, "device-4")])
    assert first.devices == tuple(fleet.names)
    assert fleet.sum(number=2).devices == tuple(fleet.names)
    assert [len(releases(tmp_path / name)) for name in fleet.names] == [2] * 5


# --- sums without noise


def asked_again(fleet: SecureFleet, name: str, nonce: int = 9, number: int = 2) -> None:
    message = SecureMessage(parameters=fleet.parameters().pack(), nonce=bytes([nonce]) * 32)
    fleet.answer(name, KEYS, {"session": message}, number)


@EVERY
def test_without_noise_a_second_sum_of_a_run_is_refused(tmp_path, keys):
    """Differencing: a second sum over one device less would give that device's part."""
    fleet = SecureFleet(tmp_path, 5, method=SUMMED, keys=keys, min_in_sum=4)
    result = fleet.sum()
    assert np.array_equal(signed(fleet, result), fleet.plain_sum(fleet.names))
    for name in fleet.names:
        learn(fleet, name, counted=True)
    with pytest.raises(QuorumNotReached):
        fleet.sum(number=2, devices=fleet.names[:4])
    assert {text.split(",")[0] for text in fleet.refused.values()} == {"this device is in a sum of this run"}
    assert fleet.frozen("device-0") is None


def test_a_short_sum_without_noise_is_repeated_if_believed(tmp_path):
    fleet = SecureFleet(tmp_path, 5, method=SUMMED, min_in_sum=4)
    with pytest.raises(QuorumNotReached):
        fleet.sum(lost=[(UNMASK, name) for name in fleet.names])
    roots = {name: root_of(fleet, name) for name in fleet.names}
    result = fleet.sum(number=2)
    assert np.array_equal(signed(fleet, result), fleet.plain_sum(fleet.names))
    assert all(root_of(fleet, name) != roots[name] for name in fleet.names)


def test_a_sum_whose_shares_were_given_is_not_repeated(tmp_path):
    """The server may have unmasked it: shares that it says it lacks may have come late."""
    fleet = SecureFleet(tmp_path, 5, method=SUMMED, min_in_sum=4)

    def lose(step, name, message):
        if step == UNMASK and name > "device-2":
            raise CannotAnswer("lost")
        return message

    with pytest.raises(QuorumNotReached):
        fleet.sum(up=lose)
    with pytest.raises(QuorumNotReached):
        fleet.sum(number=2)
    text = "this device is in a sum of this run, or may be; without noise, a second one could show its part"
    assert [reason for (step, _), reason in fleet.refused.items() if step == KEYS] == [text] * 5


def test_a_second_sum_after_shares_were_given_is_charged(tmp_path):
    fleet = SecureFleet(tmp_path, 5, budget=PrivacyBudget(20.0, 1e-5))
    first = fleet.sum()
    fleet.sum(number=2)
    assert [len(releases(tmp_path / name)) for name in first.devices] == [2] * 5


def test_a_short_sum_without_noise_is_not_believed_if_signed(tmp_path):
    """The server may have unmasked the sum; a device whose masked input never left may be summed."""
    fleet = SecureFleet(tmp_path, 5, method=SUMMED, keys="roster", min_in_sum=4)
    with pytest.raises(QuorumNotReached):
        fleet.sum(lost=[(INPUT, "device-4"), *((CHECK, name) for name in fleet.names)])
    for name in fleet.names[:4]:
        with pytest.raises(SumRefusedError, match="or may be; without noise"):
            asked_again(fleet, name)
    asked_again(fleet, "device-4")


@SIGNED
def test_a_run_between_does_not_forget_a_signed_sum(tmp_path, keys):
    """The device is asked in another run, which ends the sum that may have been finished, and then again."""
    fleet = SecureFleet(tmp_path, 5, method=SUMMED, keys=keys, min_in_sum=4)
    with pytest.raises(QuorumNotReached):
        fleet.sum(lost=[(CHECK, name) for name in fleet.names])
    fleet.contract.run = "other"
    asked_again(fleet, "device-0")
    fleet.contract.run = "sums"
    with pytest.raises(SumRefusedError, match="or may be; without noise"):
        asked_again(fleet, "device-0", nonce=10)


@pytest.mark.parametrize("end", ["conflict", "expired"])
def test_a_sum_without_noise_that_ended_after_input_counts(tmp_path, end):
    fleet = SecureFleet(tmp_path, 5, method=SUMMED, min_in_sum=4)
    fleet.sum()
    sessions = SecureSessions(fleet.files("device-0"))
    session = sessions.open()
    assert session is not None
    sessions.end(session, end)
    with pytest.raises(SumRefusedError, match="this device is in a sum of this run, or may be"):
        asked_again(fleet, "device-0")


def test_the_sum_that_contains_a_device_is_never_forgotten(tmp_path):
    """However many sums in which nothing was sent a server begins in other runs."""
    fleet = SecureFleet(tmp_path, 3, method=SUMMED)
    fleet.sum()
    learn(fleet, "device-0", counted=True)
    sessions = SecureSessions(fleet.files("device-0"))
    fleet.contract.run = "other"
    for number in range(120):
        asked_again(fleet, "device-0", nonce=number)
        session = sessions.open()
        assert session is not None
        sessions.end(session, "conflict")
    fleet.contract.run = "sums"
    with pytest.raises(SumRefusedError, match="this device is in a sum of this run"):
        asked_again(fleet, "device-0", nonce=200)


def test_too_many_rows_for_a_sum_without_noise_are_refused(tmp_path):
    fleet = SecureFleet(tmp_path, 3, method=SUMMED, max_rows=1 << 20, max_in_sum=1000)
    assert fleet.parameters().max_rows == 1048
    many = PrivateRows(np.zeros((1049, 8)), np.zeros(1049, np.int64), 3)
    fleet.rows = lambda name: many  # type: ignore[method-assign]
    with pytest.raises(QuorumNotReached):
        fleet.sum()
    says = "the sum takes at most 1048 rows of one device; raise max_rows, or lower max_in_sum"
    assert set(fleet.refused.values()) == {says}


def test_clipped_features_are_told_to_the_app_only(tmp_path):
    fleet = SecureFleet(tmp_path, 3, method=SUMMED)
    large = PrivateRows(np.tile([[40.0] + [1.0] * 7], (12, 1)), np.arange(12) % 3, 3)
    fleet.rows = lambda name: large  # type: ignore[method-assign]
    fleet.sum()
    (text,) = {event.text for event in fleet.events if event.kind == "features-clipped"}
    assert text.startswith("round 1: 12.5% of the features are beyond 32, and count as 32")


def test_devices_join_sums_without_noise_only_if_allowed():
    contract = contract_pb2.Contract(run="plain", method=SUMMED)
    with pytest.raises(ConfigurationError, match=r"run 'plain': its sums have no noise.*_secure.*set without_noise"):
        check_secure(contract, SecureTerms())
    check_secure(contract, SecureTerms(without_noise=True))
    check_secure(contract, None)
    with pytest.raises(ConfigurationError, match="without_noise"):
        SecureTerms(without_noise=1)  # type: ignore[arg-type]


def root_of(fleet: SecureFleet, name: str) -> bytes:
    session = SecureSessions(fleet.files(name)).open()
    assert session is not None
    return session.root


def learn(fleet: SecureFleet, name: str, *, counted: bool) -> None:
    ask = Ask(round=1, step="learn", seed=0, parts={"plan": Plan(values={"counted": counted})})
    fleet.device(name).answer(Answer(parts={}, samples=1), ask, fleet.contract, fleet.config)


# --- what a device keeps, and for how long


def test_root_and_input_are_destroyed_when_counted(tmp_path):
    fleet = SecureFleet(tmp_path, 5)
    fleet.sum()
    learn(fleet, "device-0", counted=False)
    assert fleet.frozen("device-0") is not None
    learn(fleet, "device-0", counted=True)
    assert fleet.frozen("device-0") is None
    (kept,) = json.loads((tmp_path / "device-0" / "secure_ended.json").read_bytes())["sums"]
    assert (kept["outcome"], list(kept["digests"])) == ("counted", list(STEPS["unsigned"]))
    assert not (tmp_path / "device-0" / "secure_steps.json").exists()


def test_a_sum_is_forgotten_after_seven_days(tmp_path):
    now = 1e9
    fleet = SecureFleet(tmp_path, 5, now=lambda: now)
    fleet.sum()
    now += 7 * 86_400
    fleet.device("device-0").forget_expired()
    assert fleet.frozen("device-0") is not None
    now += 1
    fleet.device("device-0").forget_expired()
    assert fleet.frozen("device-0") is None


@pytest.mark.skipif(os.name != "posix", reason="permissions of POSIX")
def test_files_of_a_sum_are_readable_by_their_owner_only(tmp_path):
    fleet = SecureFleet(tmp_path, 5)
    fleet.sum()
    modes = {path.name: path.stat().st_mode & 0o777 for path in (tmp_path / "device-0").glob("secure*.json")}
    assert modes == {"secure.json": 0o600, "secure_steps.json": 0o600}


@pytest.mark.parametrize("file", ["secure.json", "secure_steps.json"])
def test_a_damaged_file_is_an_error_and_sends_nothing(tmp_path, file):
    fleet = SecureFleet(tmp_path, 5)
    path = tmp_path / "device-0" / file

    def damage(step, name, message):
        if (step, name) == (INPUT, "device-0"):
            path.write_bytes(path.read_bytes().replace(b"0", b"1", 1))
        return message

    with pytest.raises(StateError, match="damaged"):
        fleet.sum(down=damage)


class Crash(BaseException):
    """The device's process dies."""


POINTS = ("secure.before-freeze", "secure.after-freeze", "privacy.after-record", "secure.after-step")
CRASHES = [("classstats_secure", point) for point in POINTS] + [
    (SUMMED, point) for point in POINTS if point.startswith("secure")
]


@EVERY
@pytest.mark.parametrize(("method", "point"), CRASHES)
def test_a_crash_at_every_failpoint_of_every_step(tmp_path, monkeypatch, keys, method, point):
    """A device that dies at a failpoint of a step answers the repeated ask, with one input for each session."""
    fleet = SecureFleet(tmp_path, 5, method=method, keys=keys, min_in_sum=4)
    died, inputs = [], set()

    def die(step, name, message):
        def hit(name: str) -> None:
            if name == f"device.{point}":
                raise Crash

        with monkeypatch.context() as patch:
            patch.setattr(failpoints, "hit", hit)
            try:
                fleet.answer(name, step, {"session": message})
            except Crash:
                died.append((step, name))
        if (session := SecureSessions(fleet.files(name)).open()) is not None:
            inputs.add((name, session.sid, session.numbers))
        return message

    result = fleet.sum(down=die)
    assert not fleet.refused
    assert np.array_equal(signed(fleet, result), fleet.plain_sum(fleet.names))
    assert len({(name, sid) for name, sid, _ in inputs}) == len(inputs), "one input for a session"
    charged = (INPUT,) if point == "privacy.after-record" else (KEYS,)
    expected = STEPS[keys] if point == "secure.after-step" else charged
    assert {step for step, _ in died} == set(expected)
    for name in fleet.names:
        assert method == SUMMED or len(releases(tmp_path / name)) == 1
        with monkeypatch.context() as patch:
            patch.setattr(failpoints, "hit", _crash_after_end)
            with pytest.raises(Crash):
                learn(fleet, name, counted=True)
        assert fleet.frozen(name) is None, "the end is completed"
        assert not (tmp_path / name / "secure.json").exists()


def _crash_after_end(name: str) -> None:
    if name == "device.secure.after-end":
        raise Crash


@EVERY
def test_a_restored_directory_sends_the_same_bytes(tmp_path, keys):
    """A device restored from a backup, taken after any step, repeats every answer to the same asks."""
    fleet = SecureFleet(tmp_path / "d", 5, keys=keys)
    asks, sent = [], {}

    def note(step, name, message):
        if name == "device-0":
            if step != KEYS:
                shutil.copytree(tmp_path / "d" / name, tmp_path / f"before {step}")
            asks.append((step, message))
        return message

    def keep(step, name, message):
        if name == "device-0":
            sent[step] = message
        return message

    fleet.sum(down=note, up=keep)
    for first, _ in asks[1:]:
        shutil.rmtree(tmp_path / "d" / "device-0")
        shutil.copytree(tmp_path / f"before {first}", tmp_path / "d" / "device-0")
        for step, message in asks:
            again = next(iter(fleet.answer("device-0", step, {"session": message}).values()))
            for name, value in vars(sent[step]).items():
                assert np.array_equal(getattr(again, name), value), (first, step, name)


# --- consent


@pytest.mark.parametrize(
    ("terms", "has", "takes_part"),
    [
        ({}, "nothing", {"unsigned"}),
        ({}, "certificate", {"unsigned", "certificates"}),
        ({"keys": "unsigned"}, "signer", {"unsigned", "roster"}),
        ({"keys": "certificates"}, "certificate", {"certificates"}),
        ({"keys": "certificates"}, "nothing", set()),
        ({"keys": "certificates"}, "both", {"certificates", "roster"}),
        ({}, "both", {"roster"}),
        ({"keys": "roster"}, "both", {"roster"}),
    ],
)
def test_terms_name_the_least_that_vouches_for_keys(tmp_path, terms, has, takes_part):
    """A refusal comes before noise is drawn and before the budget is charged."""
    signer = signer_of("device-0") if has in ("signer", "both") else None
    for keys in STEPS:
        fleet = SecureFleet(tmp_path / keys, 3, keys=keys)
        shutil.rmtree(tmp_path / keys / "device-0")
        (tmp_path / keys / "device-0").mkdir()
        if has in ("certificate", "both"):
            own = device_credentials(make_authority(tmp_path / keys / "own"), "device-0")
            save_credentials(tmp_path / keys / "device-0", own)
        given = SecureTerms(min_devices=3, signer=signer, **terms)
        events = Events(DeviceLock(fleet.events.append), "device-0")
        device = SecureSums(fleet.files("device-0"), "device-0", given, None, events)
        message = SecureMessage(parameters=fleet.parameters().pack(), nonce=bytes(32))
        ask = Ask(round=1, step=KEYS, seed=0, parts={"session": message})
        answer = Answer(parts={"statistics": fleet.rows("device-0")}, samples=12)
        if keys in takes_part:
            assert device.answer(answer, ask, fleet.contract, fleet.config).parts["keys"]
            continue
        with pytest.raises(SumRefusedError, match=r"this device takes part in|this device has no|is not enrolled"):
            device.answer(answer, ask, fleet.contract, fleet.config)
        assert fleet.frozen("device-0") is None
        assert not (tmp_path / keys / "device-0" / "privacy.json").exists()


@pytest.mark.parametrize(
    ("terms", "keys", "says"),
    [
        (
            {"signer": signer_of("device-0")},
            "unsigned",
            "this device takes part in sums with keys = 'roster', this one has 'unsigned'; change keys in "
            "run.toml, or in SecureTerms",
        ),
        (
            {"keys": "certificates"},
            "unsigned",
            "this device takes part in sums with keys = 'certificates' or 'roster', this one has 'unsigned'; change "
            "keys in run.toml, or in SecureTerms",
        ),
        (
            {"keys": "certificates"},
            "roster",
            "the sum needs keys of a roster, and this device has no SecureTerms(signer=...)",
        ),
    ],
)
def test_refused_keys_have_a_sentence(tmp_path, terms, keys, says):
    fleet = SecureFleet(tmp_path, 3, keys=keys)
    fleet.terms = {"device-0": SecureTerms(min_devices=3, **terms)}
    with pytest.raises(QuorumNotReached):
        fleet.sum()
    assert fleet.refused == {(KEYS, "device-0"): says}


def test_a_device_without_a_certificate_says_so(tmp_path):
    fleet = SecureFleet(tmp_path, 3, keys="certificates")
    shutil.rmtree(tmp_path / "device-0" / "tls")
    with pytest.raises(QuorumNotReached):
        fleet.sum()
    text = "the sum needs certificates, and this device is not enrolled: it has none"
    assert fleet.refused == {(KEYS, "device-0"): text}


@pytest.mark.parametrize(
    "changes",
    [
        {"endorsement": bytes(64)},
        {"key": bytes(32)},
        {"roster_key": verification_key(bytes(32))},
        {"endorsement": signer_of("device-1").endorsement},
    ],
)
def test_a_signer_that_is_not_of_this_device_is_refused(tmp_path, changes):
    fleet = SecureFleet(tmp_path, 3)
    fleet.terms = {"device-0": SecureTerms(signer=dataclasses.replace(signer_of("device-0"), **changes))}
    with pytest.raises(ConfigurationError, match="has not endorsed its key for device 'device-0'; endorse this key"):
        fleet.device("device-0")


@pytest.mark.parametrize(
    ("settings", "terms", "says"),
    [
        ({"keys": "roster"}, None, r"the sum needs keys of a roster, and this device has no SecureTerms\(signer="),
        ({"keys": "roster"}, SecureTerms(), "the sum needs keys of a roster"),
        ({"keys": "certificates"}, SecureTerms(signer=signer_of("a")), "keys = 'roster', this one has 'certificates'"),
        ({}, SecureTerms(signer=signer_of("a")), "sums with keys = 'roster', this one has 'unsigned'"),
        (
            {"keys": "roster", "roster_key": bytes(32).hex()},
            SecureTerms(signer=signer_of("a")),
            "its roster_key is 00000000, .* built with [0-9a-f]{8}; ask .* or update the app",
        ),
        ({"min_in_sum": 4}, SecureTerms(min_devices=5), "at least 4 devices, SecureTerms require 5; .* min_in_sum, or"),
    ],
)
def test_a_device_that_would_refuse_each_sum_is_not_checked_in(settings, terms, says):
    """At check-in: a device that counts as present and declines each sum would let the others' sums fail."""
    config = config_class("classstats_secure").from_settings({"epsilon": 3.0, **settings})
    plan = encode({"config": config_to_plan(config)}).parts.parts[0].plan
    contract = contract_pb2.Contract(run="r", method="classstats_secure", config=plan)
    with pytest.raises(ConfigurationError, match=f"cannot take part in run 'r': .*{says}"):
        check_secure(contract, terms)


def test_terms_are_checked_at_construction():
    with pytest.raises(ConfigurationError, match="min_devices must be a whole number of at least 3, got 2"):
        SecureTerms(min_devices=2)
    with pytest.raises(ConfigurationError, match="colluders must be a whole number of at least 0, got True"):
        SecureTerms(colluders=True)
    with pytest.raises(ConfigurationError, match="endorsement has 3 bytes, expected 64"):
        Signer(key=bytes(32), endorsement=b"abc", roster_key=bytes(32))
    with pytest.raises(ConfigurationError, match="signer"):
        SecureTerms(signer="key")  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match="keys must be one of unsigned, certificates, roster, got 'ca'"):
        SecureTerms(keys="ca")
    with pytest.raises(ConfigurationError, match="keys is 'roster', which needs a signer"):
        SecureTerms(keys="roster")


def test_a_device_with_terms_refuses_other_runs():
    contract = contract_pb2.Contract(run="open", method="fedavg")
    with pytest.raises(ConfigurationError, match=r"run 'open' has no secure sums.*classstats_secure"):
        check_secure(contract, SecureTerms())
    check_secure(contract, None)


def test_a_budget_below_the_sums_epsilon_is_kept(tmp_path):
    fleet = SecureFleet(tmp_path, 3, budget=PrivacyBudget(1.0, 1e-5))
    with pytest.raises(QuorumNotReached):
        fleet.sum()
    assert set(fleet.refused.values()) == {"privacy budget used up"}
    message = SecureMessage(parameters=fleet.parameters().pack(), nonce=bytes(32))
    with pytest.raises(PrivacyBudgetError):
        fleet.answer("device-0", KEYS, {"session": message})


@EVERY
def test_crashes_around_a_new_sum_charge_once(tmp_path, monkeypatch, keys):
    """After a short sum, a device dies at each failpoint of the next one's first step, and of its masked input."""
    fleet = SecureFleet(tmp_path, 5, keys=keys, min_in_sum=4, budget=PrivacyBudget(20.0, 1e-5))
    with pytest.raises(QuorumNotReached):
        fleet.sum(lost=[(INPUT, "device-1"), (INPUT, "device-2")])
    hits: set[str] = set()

    def die(step, name, message):
        if name != "device-0" or step not in (KEYS, INPUT):
            return message
        for number in range(20):

            def hit(name, left=[number]):  # noqa: B006  (counts down)
                hits.add(name)
                left[0] -= 1
                if left[0] < 0:
                    raise Crash

            with monkeypatch.context() as patch:
                patch.setattr(failpoints, "hit", hit)
                with contextlib.suppress(Crash):  # later attempts come by fewer points
                    fleet.answer(name, step, {"session": message}, 2)
        return message

    result = fleet.sum(number=2, down=die)
    assert np.array_equal(signed(fleet, result), fleet.plain_sum(fleet.names))
    assert len(releases(tmp_path / "device-0")) == 2
    assert {"device.secure.before-freeze", "device.secure.after-step"} <= hits


def releases(directory):
    path = directory / "privacy.json"
    return json.loads(path.read_bytes())["releases"] if path.exists() else []


def test_a_lost_ledger_is_noticed(tmp_path):
    fleet = SecureFleet(tmp_path, 5)
    fleet.sum()
    (tmp_path / "device-0" / "privacy.json").unlink()
    learn(fleet, "device-0", counted=True)
    with pytest.raises(StateError, match=r"privacy.json is missing, but secure_ended.json"):
        fleet.sum(number=2)
