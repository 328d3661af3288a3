"""What `runs delete` and `prune` say of what they have deleted."""

from __future__ import annotations

from fleetdistill_server.store.retention import Freed, Pruned
from fleetdistill_server.views.results import deleted, left_for_later


def test_a_deletion_counts_rounds_events_figures_and_payloads() -> None:
    gone = Pruned(rounds=1, events=2, figures=3, freed=Freed(payloads=4, bytes=5_000))
    said = "run 'r' is deleted: 1 round, 2 events, 3 figures, 4 payloads (5.0 kB)"
    assert deleted("r", gone) == said
    later = Pruned(rounds=1, events=2, figures=3, freed=gone.freed, later=Freed(payloads=1, bytes=2_000))
    assert deleted("r", later) == f"{said}\n{left_for_later(later.later)}"
    assert left_for_later(later.later) == "1 payload (2.0 kB) is less than an hour old; the server deletes them later"
    assert deleted("r", None) == "there is no run 'r'; nothing to delete"
