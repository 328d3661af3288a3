"""One device in a session: the bytes of its messages, and what it refuses."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from secure.demo_session import INPUTS, SID, WIDTH, Session, demo_members

from fleetdistill.errors import PeerError, WireError
from fleetdistill.secure.member import Member, verify_keys_entry
from fleetdistill.secure.primitives import hkdf, public_key, reduce, sha256, tag, to_bytes, verify_signature, wrap
from fleetdistill.secure.session import KeysEntry, Masks, Roster, survivors_message

IDENTITY = bytes(range(32))


@pytest.fixture(scope="module")
def demo() -> Session:
    return Session(demo_members(), lost={3: [1]})


def signing_member() -> Member:
    return Member(b"\x01" * 32, wrap(INPUTS[0], WIDTH), SID, WIDTH, 100, IDENTITY)


def flip(data: bytes, place: int, change: int) -> bytes:
    return data[:place] + bytes([data[place] ^ change]) + data[place + 1 :]


def test_sa03_keys_of_a_device():
    entry = KeysEntry.read(demo_members()[0].keys_entry("device-0"))
    assert entry.share_key.hex() == "51e0abb3687701f044d07e47b61cd6789e270d3af89d91791dd3444619ecc41f"
    assert entry.mask_key.hex() == "2156e4aa756f8fb3358fb48c98c4ebda3955705c7c7ddbec958e186d089bda47"
    assert entry.commitment.hex() == "35fd614e15d4d44133e4ce01e45ac66e0dba151d36786b737dd9ef8fe9a77124"
    assert (entry.rows, entry.identity) == (100, None)


def test_sa04_self_mask():
    seed = bytes.fromhex("31b50e6e13f80fe2d35d75592f85b38d8215fe28b17547ce7079107a93f688")
    mask = Masks(sid=SID, count=3, width=6).of_self(seed)
    assert mask.tolist() == [168577102256625, 173307746686187, 221953227640225]


def test_sa05_box_of_two_shares(demo):
    assert demo.threshold == 4
    assert demo.sealed[0][1].hex() == (
        "ff68c1a4c48d67988b3bf7abf64e1cc13c307cb73d3bddfd8ec5f90092b0931dff591fd80c75105d"
        "f9fe9b755a56cc183f427f7fbc14cb2b602f80fbb1a64ae04a6af18ef450041ac7fceea7ce0ee2bb"
    )


def test_sa05_share_of_a_mask_seed(demo):
    """Device 1, a survivor here, gives the share that device 0 has sealed for it as if 0 were lost."""
    found = demo.answer(1, frozenset({1, 2, 3, 4}))[0].hex()
    assert found == "c8b7b5ec0d83c1db6bc453b693c7efb85e1775514397d98941616dd54d886b2d"


def test_sa06_masked_numbers(demo):
    masked = demo.masked[0]
    assert masked[:3].tolist() == [144616874498489, 123864245996122, 37660230953894]
    digest = sha256(to_bytes(masked, WIDTH)).hex()
    assert digest == "35f57a429865dbb8f89e7e96cb0dc69e7cb696e7f04c329edd35619bd705c10b"


def test_sa14_signed_keys():
    entry = signing_member().keys_entry("device-0")
    assert sha256(entry).hex() == "458e3e67732e8cffc2b52143354f702f2ca339780cc5f97af694ebb9aefe6da1"
    assert verify_keys_entry(entry, SID, "device-0")


@pytest.mark.parametrize(
    ("devices", "count", "width", "sent", "received"),
    [(10, 77770, 6, 467_920, 3_130), (10, 2730, 7, 20_410, 3_130), (100, 2730, 7, 30_490, 33_714)],
)
def test_sa16_bytes_of_a_device(devices, count, width, sent, received):
    """Received are the neighbours' keys with an index and an id of 14 bytes, their boxes, bitmaps and signatures."""
    roots = [bytes([i, 1]) * 16 for i in range(devices)]
    first, *others = [
        Member(root, np.zeros(count, np.uint64), SID, width, identity=bytes([i, 2]) * 16)
        for i, root in enumerate(roots)
    ]
    entries = {i + 1: member.keys_entry(f"device {i + 1:07}") for i, member in enumerate(others)}
    own = first.keys_entry("device 0000000")
    digest, threshold = bytes(32), 2 * devices // 3 + 1
    boxes = first.boxes(0, entries, digest, threshold)
    inbox = {i: others[i - 1].boxes(i, {0: own}, digest, threshold)[0] for i in entries}
    masked = to_bytes(first.masked_numbers(0, entries, digest, inbox), width)
    shares = first.unmasking_shares(0, entries, digest, threshold, inbox, frozenset(range(devices)))
    signature = first.sign(b"survivors")
    assert sum(map(len, [own, *boxes.values(), masked, signature, *shares.values()])) == sent
    bitmaps, signed = 4 * ((devices + 7) // 8), threshold * (4 + len(signature))
    assert (
        sum(len(entry) + 4 + 14 for entry in entries.values()) + sum(map(len, inbox.values())) + bitmaps + signed
        == received
    )


# --- laws


def test_two_members_of_one_root_send_the_same_bytes():
    first, second = Session(demo_members()), Session(demo_members())
    assert first.roster == second.roster
    assert first.sealed == second.sealed
    assert [first.masked[i].tolist() for i in range(5)] == [second.masked[i].tolist() for i in range(5)]
    assert first.answers == second.answers


def test_a_member_answers_one_kind_of_share_for_each_device():
    """Over random survivors. A device among them hides its mask seed, any other its self seed."""
    session, generator = Session(demo_members()), random.Random(4)
    shares = {True: session.answers, False: {i: session.answer(i, frozenset({i})) for i in range(5)}}
    for _ in range(200):
        index = generator.randrange(5)
        survivors = frozenset(i for i in range(5) if i == index or generator.random() < 0.5)
        answer = session.answer(index, survivors)
        assert answer == {i: shares[i in survivors][index][i] for i in range(5)}
        hidden = {shares[i not in survivors][index][i] for i in range(5) if i != index}
        assert not hidden & set(answer.values())


def test_a_member_unmasks_no_sum_that_it_is_not_in(demo):
    with pytest.raises(WireError, match="a sum that it is not in"):
        demo.answer(0, frozenset({2, 3, 4}))


def test_a_member_takes_boxes_of_neighbours_only():
    session = Session(demo_members())
    with pytest.raises(WireError, match="no neighbour"):
        session.members[0].masked_numbers(0, {}, session.roster.digest, session.received(0))


@settings(max_examples=40)
@given(sender=st.integers(1, 4), place=st.integers(0, 79), change=st.integers(1, 255))
def test_a_changed_box_names_its_sender(demo, sender, place, change):
    boxes = demo.received(0)
    boxes[sender] = flip(boxes[sender], place, change)
    with pytest.raises(PeerError, match="a box does not open") as caught:
        demo.members[0].masked_numbers(0, demo.entries[0], demo.roster.digest, boxes)
    assert caught.value.index == sender


@settings(max_examples=40)
@given(changed=st.integers(1, 4), place=st.integers(0, 99), change=st.integers(1, 255))
def test_a_device_with_other_keys_of_one_opens_no_box(demo, changed, place, change):
    """What one device was shown differs in one byte: with another roster digest no box opens."""
    entries = list(demo.roster.entries)
    entries[changed] = flip(entries[changed], place, change)
    other = Roster(SID, demo.roster.ids, tuple(entries))
    shown = {i: entry for i, entry in enumerate(entries) if i}
    with pytest.raises(PeerError):
        demo.members[0].masked_numbers(0, shown, other.digest, demo.received(0))


@settings(max_examples=40)
@given(place=st.integers(0, 195), change=st.integers(1, 255))
def test_changed_keys_are_not_signed(place, change):
    assert not verify_keys_entry(flip(signing_member().keys_entry("device-0"), place, change), SID, "device-0")


def test_signed_keys_are_for_one_session_and_device():
    entry = signing_member().keys_entry("device-0")
    assert not verify_keys_entry(entry, SID, "device-1")
    assert not verify_keys_entry(entry, sha256(SID), "device-0")
    assert not verify_keys_entry(entry[:100], SID, "device-0")


@settings(max_examples=40)
@given(survivors=st.frozensets(st.integers(0, 4)), place=st.integers(0, 63), change=st.integers(1, 255))
def test_a_signature_is_for_one_set_of_survivors(demo, survivors, place, change):
    message, other = (
        survivors_message(SID, demo.roster.digest, 5, range(5), members) for members in (demo.survivors, survivors)
    )
    member = signing_member()
    identity, signature = KeysEntry.read(member.keys_entry("device-0")).identity, member.sign(message)
    assert identity is not None
    assert verify_signature(identity, other, signature) == (survivors == demo.survivors)
    assert not verify_signature(identity, message, flip(signature, place, change))


def test_a_member_without_identity_signs_nothing(demo):
    with pytest.raises(WireError, match="no signatures"):
        demo.members[0].sign(b"survivors")


@pytest.mark.parametrize("step", ["boxes", "masked"])
def test_a_key_that_leaves_no_secret_names_its_device(demo, step):
    entry = demo.entries[0][3]
    if step == "boxes":
        entries = {**demo.entries[0], 3: bytes(32) + entry[32:]}
        with pytest.raises(PeerError, match="not one of X25519") as caught:
            demo.members[0].boxes(0, entries, demo.roster.digest, 4)
    else:
        entries = {**demo.entries[0], 3: entry[:32] + bytes(32) + entry[64:]}
        with pytest.raises(PeerError, match="not one of X25519") as caught:
            demo.members[0].masked_numbers(0, entries, demo.roster.digest, demo.received(0))
    assert caught.value.index == 3


def test_masked_bytes_do_not_depend_on_the_input():
    """Two-sample Kolmogorov-Smirnov on every byte, 200 sessions with 0 and 200 with the largest numbers; fixed keys."""
    sent = {}
    for value in (0, 2**48 - 1):
        rows = []
        for number in range(200):
            sid = sha256(number.to_bytes(4, "little"), bytes([value & 1]))
            members = [
                Member(sha256(sid, bytes([i])), np.full(4, value if i == 0 else 0, np.uint64), sid, WIDTH)
                for i in range(3)
            ]
            rows.append(list(to_bytes(Session(members, sid=sid).masked[0], WIDTH)))
        sent[value] = np.array(rows)
    zero, largest = sent.values()
    smallest = min(stats.ks_2samp(zero[:, place], largest[:, place]).pvalue for place in range(24))
    assert smallest > 1e-4


def test_a_survivors_input_stays_hidden(demo):
    """By its own mask, if all pair masks are known; by one pair's mask, if its own is known and the rest are.

    Device 1 is lost, so the server learns its mask seed; three of four others pool all that they have.
    """
    masks = Masks(sid=SID, count=12, width=WIDTH)
    public = [KeysEntry.read(entry).mask_key for entry in demo.roster.entries]

    def mask_secret(index):
        return masks.mask_secret(hkdf(bytes([index + 1]) * 32, SID, tag("mask seed"), 31))

    assert public_key(mask_secret(1)) == public[1]
    pairs = {i: masks.of_pair(i, mask_secret(i), public[i], 0, public[0]) for i in range(1, 5)}
    own = masks.of_self(hkdf(b"\x01" * 32, SID, tag("self seed"), 31))
    x = wrap(INPUTS[0], WIDTH)
    assert (reduce(demo.masked[0] + sum(pairs.values()) - own, WIDTH) == x).all()
    assert (reduce(demo.masked[0] + sum(pairs.values()), WIDTH) != x).all()
    for honest in range(1, 5):
        known = sum(mask for index, mask in pairs.items() if index != honest)
        assert (reduce(demo.masked[0] + known - own, WIDTH) != x).all()
