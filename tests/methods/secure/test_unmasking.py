"""The server recovers the plain sum of the devices that finish, whoever is lost, or no sum at all."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from secure.demo_session import SID, WIDTH, Session, demo_members

from fleetdistill.errors import SecureSumError
from fleetdistill.secure.member import Member
from fleetdistill.secure.primitives import lift, wrap

ALL = [1, 5, -2, 2, -5, -1, 3, 7, 0, -7, -3, 1]
WITHOUT_1 = [-1, 0, 1, 2, -8, 4, 5, 6, -4, -3, -2, -1]
SEVEN = [np.array([(5 * i + j) % 9 - 4 for j in range(4)]) for i in range(7)]


def seven_members() -> list[Member]:
    return [Member(bytes([40 + i]) * 32, wrap(x, WIDTH), SID, WIDTH) for i, x in enumerate(SEVEN)]


def plain_sum(inputs) -> list[int]:
    return np.sum(list(inputs), axis=0).tolist()


def total(session: Session) -> list[int]:
    return lift(session.unmask().total, session.width).tolist()


@pytest.mark.parametrize(("lost", "wanted"), [({}, ALL), ({2: [1]}, WITHOUT_1), ({3: [1]}, WITHOUT_1), ({5: [1]}, ALL)])
def test_sa06_sum_of_five(lost, wanted):
    assert total(Session(demo_members(), lost=lost)) == wanted


@pytest.mark.parametrize("lost", [{2: [0], 3: [4]}, {3: [0], 5: [1]}, {2: [0, 1]}, {3: [1, 3]}, {5: [1, 3]}])
def test_sa06_five_without_two_have_no_sum(lost):
    with pytest.raises(SecureSumError, match="only 3 of 4 shares"):
        Session(demo_members(), lost=lost).unmask()


@pytest.mark.parametrize(
    ("lost", "wanted"),
    [
        ({}, [-4, 3, 1, -1]),
        ({2: [0, 1]}, [-1, 4, 0, -4]),
        ({3: [0, 6]}, [1, 6, 2, -2]),
        ({5: [2, 3]}, [-4, 3, 1, -1]),
        ({2: [6], 3: [2]}, [0, 5, 1, -3]),
        ({3: [0], 5: [1]}, [0, 6, 3, 0]),
    ],
)
def test_sa06_sum_of_seven(lost, wanted):
    assert total(Session(seven_members(), lost=lost)) == wanted


def test_sa06_seven_without_three_have_no_sum():
    with pytest.raises(SecureSumError, match="only 4 of 5 shares of a secret of device-1"):
        Session(seven_members(), lost={2: [0], 3: [1], 5: [2]}).unmask()


@settings(max_examples=60)
@given(data=st.data(), devices=st.integers(3, 9), degree=st.sampled_from([0, 4]), width=st.integers(4, 8))
def test_any_drop_outs_give_the_plain_sum_or_none(data, devices, degree, width):
    """Number for number, of those whose masked numbers came in, as soon as each secret has enough holders left."""
    steps = data.draw(st.lists(st.sampled_from([2, 3, 5, 6, 6, 6, 6]), min_size=devices, max_size=devices))
    largest = 2 ** (8 * width - 1) // devices - 1
    inputs = [np.array(data.draw(st.lists(st.integers(-largest, largest), min_size=2, max_size=2))) for _ in steps]
    members = [Member(bytes([i + 1]) * 32, wrap(x, width), SID, width) for i, x in enumerate(inputs)]
    lost = {step: [i for i, found in enumerate(steps) if found == step] for step in (2, 3, 5)}
    if not any(step > 3 for step in steps):
        return
    session = Session(members, width=width, degree=degree, lost=lost)
    holders = [sum(device in answer for answer in session.answers.values()) for device in session.shared]
    if min(holders) < session.threshold:
        with pytest.raises(SecureSumError, match="so there is no sum"):
            session.unmask()
        return
    found = session.unmask()
    assert lift(found.total, width).tolist() == plain_sum(inputs[i] for i in session.survivors)
    assert found.wrong_shares == ()


def test_fewer_answers_than_the_threshold_give_no_sum():
    session = Session(demo_members())
    for index in (0, 2):
        del session.answers[index]
    with pytest.raises(SecureSumError, match="only 3 of 4 shares of a secret of device-0 came in"):
        session.unmask()


@settings(max_examples=40)
@given(holder=st.integers(0, 6), data=st.data(), place=st.integers(0, 31), change=st.integers(1, 255))
def test_a_wrong_share_is_named_and_the_sum_is_right(holder, data, place, change):
    """Of a holder beyond the first five, nobody asks."""
    session = Session(seven_members(), lost={3: [6]})
    holder = min(holder, 5)
    device = data.draw(st.integers(0, 6))
    share = bytearray(session.answers[holder][device])
    share[place] ^= change
    session.answers[holder][device] = bytes(share)
    found = session.unmask()
    assert lift(found.total, WIDTH).tolist() == plain_sum(SEVEN[:6])
    assert found.wrong_shares == ((holder,) if holder < 5 else ())


@pytest.mark.parametrize("wrong", [(0, 1), (3, 4), (2, 5)])
def test_two_holders_with_wrong_shares_are_named(wrong):
    """Also where one of them is the first to replace the other."""
    session = Session(seven_members())
    for holder in wrong:
        session.answers[holder] = {device: bytes(32) for device in session.answers[holder]}
    found = session.unmask()
    assert lift(found.total, WIDTH).tolist() == plain_sum(SEVEN)
    assert found.wrong_shares == wrong


def test_too_many_wrong_shares_give_no_sum():
    session = Session(seven_members(), lost={5: [6]})
    for holder in (1, 2):
        session.answers[holder][4] = bytes(32)
    with pytest.raises(SecureSumError, match="no 5 shares of a secret of device-4 fit its keys"):
        session.unmask()


def test_the_order_of_the_answers_does_not_matter():
    first, second = Session(demo_members()), Session(demo_members())
    second.answers = dict(reversed(second.answers.items()))
    second.masked = dict(reversed(second.masked.items()))
    assert total(first) == total(second) == ALL
