"""`Deliveries`: who is asked again, and who counts as holding what was sent."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Sequence

import pytest

from fleetdistill.errors import QuorumNotReached
from fleetdistill_server.methods.cohort import Deliveries
from fleetdistill_server.testing import FakeCohort, always

ALL = ("a", "b", "c")


def cohort_of(number: int, silent: Collection[str] = ()) -> FakeCohort:
    return FakeCohort(dict.fromkeys(ALL, always({})), number=number, silent=[("learn", device) for device in silent])


def send(
    deliveries: Deliveries, number: int, digest: int, silent: Collection[str] = (), to: Sequence[str] = ALL
) -> list[str]:
    """Sends a digest in a round; returns who was asked."""
    cohort = cohort_of(number, silent)

    async def learn() -> None:
        deliveries.begin(number)
        async for _ in deliveries.ask(cohort, "learn", {}, to=to, unless_held=digest, quorum=0.0):
            pass

    asyncio.run(learn())
    return [item.device for item in cohort.asked]


def test_who_holds_a_digest_is_not_asked_until_there_is_another() -> None:
    deliveries = Deliveries()
    assert not deliveries.any_acknowledged
    assert send(deliveries, 1, digest=7, to="ab") == ["a", "b"]
    assert deliveries.any_acknowledged
    assert send(deliveries, 2, digest=7) == ["c"]
    assert send(deliveries, 3, digest=7) == []
    assert send(deliveries, 4, digest=8) == ["a", "b", "c"]


def test_silent_device_is_asked_after_doubling_pauses() -> None:
    deliveries = Deliveries()
    asked = [number for number in range(1, 30) if "b" in send(deliveries, number, digest=7, silent="b")]
    assert asked == [1, 3, 6, 11, 20]
    assert deliveries.is_unresponsive("b")
    assert "b" in send(deliveries, 37, digest=7)
    assert not deliveries.is_unresponsive("b")
    assert not deliveries.lacks("b", 7)


def test_a_device_that_comes_back_is_in_no_pause() -> None:
    deliveries = Deliveries()
    deliveries.update_present(ALL)
    send(deliveries, 1, digest=7, silent="b")
    deliveries.update_present(ALL)
    assert deliveries.is_unresponsive("b")
    deliveries.update_present("ac")
    deliveries.update_present(ALL)
    assert send(deliveries, 2, digest=7) == ["b"]


def test_a_present_device_is_asked_again_after_doubling_minutes() -> None:
    now = [0.0]
    deliveries = Deliveries(lambda: now[0])
    deliveries.update_present(ALL)
    send(deliveries, 1, digest=7, silent="b")
    for number, minutes in ((2, 1), (3, 2), (4, 4)):  # earlier than the pause in rounds
        now[0] += 60 * minutes - 1
        deliveries.update_present(ALL)
        assert deliveries.is_unresponsive("b")
        assert send(deliveries, number, digest=7, to="b") == []
        now[0] += 1
        deliveries.update_present(ALL)
        assert not deliveries.is_unresponsive("b")
        assert send(deliveries, number, digest=7, to="b", silent="b") == ["b"]
    now[0] += 86_400
    deliveries.update_present(ALL)
    assert send(deliveries, 5, digest=7) == ["b"]
    assert not deliveries.is_unresponsive("b")


def test_after_a_round_that_fell_short_no_device_holds_anything() -> None:
    deliveries = Deliveries()
    send(deliveries, 1, digest=7)
    assert send(deliveries, 3, digest=7) == ["a", "b", "c"]
    assert send(deliveries, 4, digest=7) == []


def test_a_forgotten_device_is_as_new() -> None:
    deliveries = Deliveries()
    send(deliveries, 1, digest=7, silent="b")
    for device in ALL:
        deliveries.forget(device)
    assert send(deliveries, 2, digest=7) == ["a", "b", "c"]
    assert deliveries.state_dict()["silent"] == {}


def test_a_state_goes_on_where_it_was() -> None:
    one, other = Deliveries(), Deliveries()
    send(one, 1, digest=7, silent="b")
    other.load_state_dict(one.state_dict())
    for number in range(2, 8):
        assert send(one, number, digest=number // 3, silent="b") == send(other, number, digest=number // 3, silent="b")
    assert one.state_dict() == other.state_dict()
    send(other, 8, digest=1)
    assert one.state_dict() != other.state_dict(), "what it gave is its own"


def test_without_a_digest_only_pauses_count() -> None:
    deliveries, asked = Deliveries(), []
    for number in (1, 2, 3):
        cohort = cohort_of(number, silent="b")

        async def learn(cohort: FakeCohort = cohort, number: int = number) -> None:
            deliveries.begin(number)
            async for _ in deliveries.ask(cohort, "learn", {}, to=ALL, quorum=0.0):
                pass

        asyncio.run(learn())
        asked.append("".join(item.device for item in cohort.asked))
    assert asked == ["abc", "ac", "abc"]


def test_too_few_answers_end_the_round() -> None:
    deliveries, cohort = Deliveries(), cohort_of(1, silent="ab")

    async def learn() -> None:
        deliveries.begin(1)
        async for _ in deliveries.ask(cohort, "learn", {}, to=ALL, unless_held=7):
            pass

    with pytest.raises(QuorumNotReached):
        asyncio.run(learn())
