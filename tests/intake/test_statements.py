"""A device's calls read and write each row once: how many statements they run."""

from __future__ import annotations

from intake.device_api_fleet import RUN, WHOLE, Fleet, feed
from support.sqlite import tables_of
from support.wire_samples import in_pieces, make_payload


class Statements:
    """The statements of a fleet's store."""

    def __init__(self, fleet: Fleet) -> None:
        self._texts: list[str] = []
        tables_of(fleet.store).conn.set_trace_callback(self._texts.append)

    def new(self) -> list[str]:
        """Returns the first words of the statements since the last call."""
        words = [text.split()[0] for text in self._texts]
        self._texts.clear()
        return words


def test_a_device_and_its_work_are_one_read_each(fleet: Fleet) -> None:
    identity = fleet.join()
    fleet.ask()
    statements = Statements(fleet)
    assert fleet.api.next_ask(identity) is not None
    assert statements.new() == ["SELECT", "SELECT"]


def test_an_answer_is_checked_and_stored_with_few_statements(fleet: Fleet) -> None:
    """The device and its ask are read at the begin; whether it is still wanted and nothing was deleted, at the end."""
    identity, answer = fleet.join(), make_payload()
    fleet.store.runs.start_round(RUN, ["d1"])
    fleet.ask()
    statements = Statements(fleet)
    session = fleet.begin(identity, answer)
    assert statements.new() == ["SELECT", "SELECT"]
    feed(session, in_pieces(answer, WHOLE))
    assert statements.new() == []
    assert session.finish().id
    bytes_of_envelope, bytes_of_tensors = "INSERT", "INSERT"
    writes = ["UPDATE", "INSERT", "SELECT", bytes_of_envelope, bytes_of_tensors]
    assert statements.new() == ["SELECT", "BEGIN", *writes, "COMMIT"]


def test_a_step_is_asked_and_looked_at_with_few_statements(fleet: Fleet) -> None:
    """The engine looks for late asks whenever something may have happened, and mostly finds none."""
    statements = Statements(fleet)
    fleet.ask("d1", "d2", "d3")
    assert statements.new() == ["BEGIN", "DELETE", "DELETE", "INSERT", "INSERT", "INSERT", "COMMIT"]
    assert fleet.store.asks.expire(RUN, 1.0) == []
    assert statements.new() == ["SELECT"]
