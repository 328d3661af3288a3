"""Runs of every method that several tests look at; each is played once in a process."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest
from support.fleets import RUNS, Played, Undisturbed, device_files, prepare, record, run_in_memory


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Undisturbed:
    """Plays a run of `RUNS`, by default with as many rounds as it has there: `undisturbed(name, rounds)`."""

    @cache
    def play(name: str, rounds: int | None = None) -> Played:
        wanted = replace(RUNS[name], rounds=rounds or RUNS[name].rounds)
        prepared = prepare(wanted, tmp_path_factory.mktemp("undisturbed") / "work")
        store = run_in_memory(prepared)
        return Played(store, record(store), device_files(prepared))

    return play
