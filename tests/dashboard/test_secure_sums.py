"""The secure sums of a run in the browser; a run without any has no table of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.dashboards import Watched, dashboard, picture
from support.summed_run import RUN, make_summed_run

from fleetdistill_server.store.store import Store

pytestmark = pytest.mark.slow


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """A store with a run that has secure sums, and one that has none; made before the browser has its event loop."""
    result = make_summed_run(tmp_path)
    store = Store.open(result)
    store.runs.begin("other", {"run": {"name": "other", "method": "fedavg", "rounds": 1}})
    store.runs.close_round("other", store.runs.start_round("other", ["a"]), b"", [], {})
    store.close()
    return result


@pytest.mark.long
def test_the_rounds_tab_shows_the_secure_sums(directory: Path, page: Any, watched: Watched) -> None:
    with dashboard(directory.parent, "--store", directory.name) as url:
        page.goto(f"{url}/runs/{RUN}?tab=rounds")
        sums = page.get_by_role("region", name="Secure sums")
        sums.get_by_role("gridcell", name="device-3, device-4 at secure_shares").wait_for()
        sums.get_by_role("gridcell", name="failed: 3 of 5 devices answered secure_shares, 4 were needed").wait_for()
        sums.get_by_role("gridcell", name="made", exact=True).wait_for()
        picture(page, "secure-sums")
        page.goto(f"{url}/runs/other?tab=rounds")
        page.get_by_role("gridcell", name="closed").wait_for()
        assert not page.get_by_role("region", name="Secure sums").is_visible()
    assert watched.errors == []
