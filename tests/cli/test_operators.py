"""`fleetdistill operators` page by page."""

from __future__ import annotations

import re
from pathlib import Path

from typer.testing import CliRunner

from fleetdistill_server.cli.app import app
from fleetdistill_server.store.operator_calls import Call
from fleetdistill_server.store.store import Store


def test_the_number_that_is_printed_leads_to_the_next_page(tmp_path: Path) -> None:
    store = Store.open(tmp_path)
    for number in range(5):
        call = Call(role="operator", name="olga", call="StopRun", address="local", arguments={"run": f"run-{number}"})
        store.operator_calls.add(call, "done")
    store.close()
    pages, before = [], list[str]()
    for _ in range(3):
        said = CliRunner().invoke(app, ["operators", "--store", str(tmp_path), "--most", "2", *before])
        assert said.exit_code == 0, said.output
        pages.append(re.findall(r"run-\d", said.stdout))
        before = re.findall(r"there are older calls: (--before) (\d+)", said.stdout)
        before = list(before[0]) if before else []
    assert pages == [["run-4", "run-3"], ["run-2", "run-1"], ["run-0"]]
    assert not before
