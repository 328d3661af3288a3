"""A small part of `make sums`, and that its checks find what they look for."""

from __future__ import annotations

import dataclasses

import pytest
from chaos.secure_sums import last_line, play, play_all

from fleetdistill.methods.classstats_secure.exchange import INPUT

CALM = 9
"""A seed whose session loses nothing."""


@pytest.mark.slow
@pytest.mark.long
def test_sums_are_right_or_stay_closed(tmp_path):
    sessions = list(play_all(20, 1, tmp_path))
    assert not [finding for session in sessions for finding in session.wrong]
    assert any(session.members for session in sessions)
    assert any(not session.members for session in sessions)
    assert len({(session.keys, session.method) for session in sessions}) == 4
    assert any(session.members and session.graph == "ring" for session in sessions)
    assert sum(session.gradients for session in sessions) > 1
    assert last_line(sessions).endswith("0 findings")


def test_a_wrong_sum_is_found(tmp_path):
    def spoil(step, name, message):
        return dataclasses.replace(message, numbers=message.numbers ^ 1) if step == INPUT else message

    assert "the sum is not the plain sum of its members" in play(tmp_path, CALM, spoil).wrong
