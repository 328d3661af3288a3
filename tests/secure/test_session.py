"""Parameters, session ids, rosters, bitmaps and neighbours of secure sums."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats
from secure.demo_session import CONTRACT, NONCE, PARAMETERS, SID, demo_members

from fleetdistill.errors import ConfigurationError, WireError
from fleetdistill.secure.primitives import sha256, sign
from fleetdistill.secure.session import (
    LIMITED,
    PRIVATE,
    KeysEntry,
    Parameters,
    Roster,
    check_distinct,
    is_connected,
    neighbours,
    pack_members,
    ring_degree,
    rounded_rows,
    session_id,
    session_threshold,
    survivors_message,
    unpack_members,
)

LIMITED_SUM = replace(PARAMETERS, mode=LIMITED)
PRIVATE_SUM = Parameters(
    mode=PRIVATE,
    width=7,
    keys=1,
    classes=10,
    dimensions=64,
    grid_bits=16,
    clip_bits=0,
    count_bits=10,
    row_bits=20,
    least=14,
    honest=12,
    most=20,
    degree=0,
    epsilon=1.0,
    delta=1e-5,
)
IDS = tuple(f"device-{i}" for i in range(5))


def demo_entries():
    return tuple(member.keys_entry(name) for member, name in zip(demo_members(), IDS, strict=True))


# --- parameters


def test_sa02_block_and_session_id():
    block = bytes.fromhex("01000600030002000805001404000000000000000500000000000000") + bytes(16)
    assert PARAMETERS.pack() == block
    assert SID.hex() == "35e7f4bb7cac0157a65378f2888ac9145b122a33ea1ad7fd95a792d0107b4703"


@pytest.mark.parametrize(("dimensions", "numbers"), [(64, 2730), (128, 9546), (256, 35466), (384, 77770)])
def test_sa09_numbers_of_a_device(dimensions, numbers):
    assert replace(LIMITED_SUM, classes=10, dimensions=dimensions).numbers == numbers


@pytest.mark.parametrize("parameters", [LIMITED_SUM, PRIVATE_SUM])
def test_a_block_gives_its_parameters_back(parameters):
    assert Parameters.unpack(parameters.pack()) == parameters


def test_full_second_moments_are_not_offered():
    with pytest.raises(WireError, match="mode of a secure sum must be 1 or 2, got 0"):
        Parameters.unpack(PARAMETERS.pack())


@given(place=st.integers(0, 43), change=st.integers(1, 255))
def test_a_changed_block_is_refused_or_gives_another_session(place, change):
    block = bytearray(PRIVATE_SUM.pack())
    block[place] ^= change
    try:
        parameters = Parameters.unpack(bytes(block))
    except WireError:
        return
    assert parameters.pack() == block
    assert session_id("r", 1, 1, NONCE, CONTRACT, bytes(block)) != session_id(
        "r", 1, 1, NONCE, CONTRACT, PRIVATE_SUM.pack()
    )


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"mode": 3}, "mode of a secure sum must be in [0, 2], got 3"),
        ({"width": 3}, "width of a private sum must be in [4, 8], got 3"),
        ({"clip_bits": 5}, "clip_bits of a private sum must be in [0, 0], got 5"),
        ({"least": 2}, "least of a private sum must be in [3, 65535], got 2"),
        ({"most": 13}, "most of a private sum must be in [14, 65535], got 13"),
        ({"honest": 15}, "honest of a private sum must be in [1, 14], got 15"),
        ({"honest": 0}, "honest of a private sum must be in [1, 14], got 0"),
        ({"degree": 20}, "degree of a private sum must be in [0, 19], got 20"),
        ({"degree": 5}, "degree must be even"),
        ({"epsilon": float("nan")}, "epsilon must be in (0, 100]"),
        ({"delta": 0.0}, "delta in (0, 1)"),
        ({"mode": LIMITED, "count_bits": 0, "honest": 0}, "a sum without noise has epsilon and delta 0"),
        ({"mode": LIMITED, "honest": 0}, "count_bits of a limited sum must be in [0, 0], got 10"),
    ],
)
def test_a_value_out_of_range_is_refused(changes, text):
    with pytest.raises(ConfigurationError) as caught:
        replace(PRIVATE_SUM, **changes)
    assert text in str(caught.value)


@pytest.mark.parametrize(
    ("name", "lowest", "highest"),
    [
        *(("width", 4, 8), ("keys", 0, 2), ("classes", 1, 65535), ("dimensions", 1, 65535)),
        *(("grid_bits", 1, 20), ("clip_bits", 0, 16), ("row_bits", 1, 40), ("least", 3, 5), ("most", 4, 65535)),
    ],
)
def test_values_at_the_ends_of_a_range_are_taken(name, lowest, highest):
    for value in (lowest, highest):
        parameters = replace(LIMITED_SUM, **{name: value})
        assert Parameters.unpack(parameters.pack()) == parameters
    for value in (lowest - 1, highest + 1):
        with pytest.raises(ConfigurationError, match="must be in"):
            replace(LIMITED_SUM, **{name: value})


@pytest.mark.parametrize(
    ("place", "value", "text"), [(0, 2, "version 2"), (26, 1, "reserved field"), (2, 9, "width of a private sum")]
)
def test_a_wrong_field_of_a_block_is_named(place, value, text):
    block = bytearray(PRIVATE_SUM.pack())
    block[place] = value
    with pytest.raises(WireError, match=text):
        Parameters.unpack(bytes(block))


def test_a_block_of_another_length_is_refused():
    with pytest.raises(WireError, match="take 44 bytes, got 43"):
        Parameters.unpack(PRIVATE_SUM.pack()[:-1])


def test_rows_of_one_device_leave_room_for_those_of_all():
    assert replace(LIMITED_SUM, row_bits=20, most=20).max_rows == 52428


# --- the devices


def test_sa05_roster_digest():
    roster = Roster(SID, IDS, demo_entries())
    assert roster.digest.hex() == "a18d93d8e4f8b66333f046f9ed8502647e1aad10a5e7fe30a6a300a15ed125e0"


def test_a_roster_out_of_order_is_refused():
    with pytest.raises(WireError, match="bytewise order"):
        Roster(SID, IDS[::-1], demo_entries())


def test_a_device_without_keys_is_refused():
    with pytest.raises(WireError, match="5 devices need as many keys, got 4"):
        Roster(SID, IDS, demo_entries()[:4])


def test_two_devices_with_one_id_are_refused():
    with pytest.raises(WireError, match="the same id"):
        check_distinct(["a", "a"], demo_entries()[:2])


def test_two_devices_with_one_public_key_are_refused():
    first, second, *_ = demo_entries()
    with pytest.raises(WireError, match="the same key"):
        check_distinct(IDS[:2], [first, second[:32] + first[32:64] + second[64:]])


def test_keys_of_another_length_are_refused():
    with pytest.raises(WireError, match="take 100 or 196 bytes, got 99"):
        KeysEntry.read(bytes(99))


@pytest.mark.parametrize(("rows", "told"), [(0, 0), (1, 1), (3, 3), (5, 4), (100, 96), (127, 96), (128, 128)])
def test_rows_are_rounded_down_to_two_leading_bits(rows, told):
    assert rounded_rows(rows) == told


def test_sa14_bitmaps():
    assert pack_members(range(5), 5).hex() == "1f"
    assert pack_members([0, 2, 3, 4], 5).hex() == "1d"


@given(devices=st.integers(1, 40), data=st.data())
def test_members_come_back_from_their_bitmap(devices, data):
    members = data.draw(st.frozensets(st.integers(0, devices - 1)))
    assert unpack_members(pack_members(members, devices), devices) == members


@pytest.mark.parametrize(("bitmap", "text"), [(b"\x20", "a bit beyond them"), (b"", "takes 1 bytes, got 0")])
def test_a_bitmap_of_other_devices_is_refused(bitmap, text):
    with pytest.raises(WireError, match=text):
        unpack_members(bitmap, 5)


def test_sa14_survivors_message_and_its_signature():
    message = survivors_message(SID, Roster(SID, IDS, demo_entries()).digest, 5, range(5), [0, 2, 3, 4])
    assert sha256(message).hex() == "21214bc6c3deb8067ec040f47384028d042fe81ccf7333e740f6219801cd0fcb"
    assert sign(bytes(range(32)), message).hex() == (
        "11dc2501f3a1f7530ed63b276953c86f8f57fccf79a43ca48bbc302cca4e86ad"
        "6f4594a9429f9c2531ca64373651060c56c8c968771372fd63296dfc0fd28203"
    )


# --- neighbours


def test_sa07_neighbours_in_a_ring():
    assert [neighbours(SID, 12, 4)(index) for index in range(3)] == [[4, 6, 7, 9], [5, 8, 10, 11], [3, 5, 9, 11]]


@given(devices=st.integers(3, 30), degree=st.sampled_from([0, 2, 4, 6]), sid=st.binary(min_size=32, max_size=32))
def test_neighbours_are_mutual_and_as_many_as_wanted(devices, degree, sid):
    near = [neighbours(sid, devices, degree)(index) for index in range(devices)]
    wanted = devices - 1 if degree == 0 else min(degree, devices - 1)
    assert all(len(set(others)) == wanted and index not in others for index, others in enumerate(near))
    assert all(index in near[other] for index, others in enumerate(near) for other in others)


@pytest.mark.parametrize(
    ("members", "connected"),
    [({3}, True), ({0, 1, 2, 3}, True), ({0, 2, 4}, True), ({0, 3}, False), ({9, 0, 4, 5}, False), (range(10), True)],
)
def test_members_of_a_ring_are_connected_or_not(members, connected):
    """In a ring of ten in their own order, with two neighbours to each side."""
    near = [[(index + step) % 10 for step in (-2, -1, 1, 2)] for index in range(10)]
    assert is_connected(members, near.__getitem__) is connected


def test_holders_of_a_ring_are_its_neighbours_and_the_device():
    assert session_threshold(10_000, 100) == 68
    assert session_threshold(1_000, 0) == session_threshold(1_000, 999) == 667


@pytest.mark.parametrize(
    ("devices", "corrupt", "lost", "degree"),
    [
        (1_000, 0.05, 0.05, 42),
        (1_000, 0.1, 0.1, 78),
        (1_000, 0.2, 0.1, 78),
        (10_000, 0.05, 0.05, 48),
        (10_000, 0.1, 0.1, 100),
        (10_000, 0.2, 0.1, 100),
    ],
)
def test_sa07_degrees_of_safe_rings(devices, corrupt, lost, degree):
    assert ring_degree(devices, corrupt, lost) == degree


@pytest.mark.parametrize(
    ("devices", "corrupt", "lost", "bound"),
    [(1_000, 0.1, 0.0, 0), (1_000, 0.05, 0.05, 1), (1_000, 0.03, 0.0, 2), (3_000, 0.05, 0.01, 2)],
)
def test_a_smaller_ring_breaks_one_of_the_bounds(devices, corrupt, lost, bound):
    """The three probabilities by scipy: a secret learnt, no sum, a ring apart; each bound decides somewhere."""
    bad, gone = round(corrupt * devices), round(lost * devices)

    def unsafe(degree):
        needed = session_threshold(devices, degree)
        apart = math.prod((bad + gone - i) / (devices - i) for i in range(degree // 2))
        found = (
            stats.hypergeom.sf(needed - 1, devices - 1, bad, degree),
            stats.hypergeom.cdf(needed - 1, devices, devices - gone, degree + 1),
            apart,
        )
        return [i for i, log2 in enumerate((-40, -20, -40)) if devices * found[i] > 2**log2]

    degree = ring_degree(devices, corrupt, lost)
    assert unsafe(degree) == []
    assert unsafe(degree - 2) == [bound]


def test_a_ring_without_loss_has_ten_neighbours():
    assert ring_degree(1_000, 0.0, 0.0) == 10


def test_a_ring_that_cannot_be_safe_is_refused():
    with pytest.raises(ConfigurationError, match="use a complete graph"):
        ring_degree(10, 0.3, 0.3)
    with pytest.raises(ConfigurationError, match="lost must be a fraction"):
        ring_degree(1000, 0.1, 1.0)
