"""One table of metrics: the code's, the page's, the alerts' and the dashboard's are the same."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from metrics.promtool import ALERTS, DASHBOARD, ROOT, needs_promtool, promtool

from fleetdistill_console.metrics.catalogue import CATALOGUE

PAGE = ROOT / "docs/how-to/monitor-a-server.md"


def names_in(text: str) -> set[str]:
    """Names of metrics in expressions."""
    return set(re.findall(r"\bfleetdistill_\w+", text))


def test_the_page_lists_every_metric_as_the_code_defines_it() -> None:
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in PAGE.read_text().splitlines()]
    page = [row for row in rows if row[0].startswith("`fleetdistill_")]
    code = [[f"`{m.name}`", m.type, ", ".join(f"`{label}`" for label in m.labels), m.help] for m in CATALOGUE]
    assert page == code


def test_names_have_the_units_of_prometheus() -> None:
    for metric in CATALOGUE:
        assert metric.name.endswith("_total") == (metric.type == "counter"), metric.name
        assert not re.search(r"_(ms|milliseconds|kb|mb|percent)(_|$)", metric.name), metric.name


def test_no_metric_has_a_label_whose_values_grow_with_the_fleet() -> None:
    known = {"version", "status", "run", "method", "state", "split", "code", "direction", "kind", "phase", "process"}
    known |= {"figure", "outcome"}  # figures are those that the run's method declares
    assert {label for metric in CATALOGUE for label in metric.labels} == known | {"certificate"}


def test_alerts_use_metrics_that_exist() -> None:
    expressions = "\n".join(line for line in ALERTS.read_text().splitlines() if "runbook" not in line)
    assert names_in(expressions) <= {name for metric in CATALOGUE for name in metric.samples}


def test_every_alert_has_a_section_of_the_runbook() -> None:
    alerts = re.findall(r"- alert: (\w+)", ALERTS.read_text())
    runbooks = re.findall(r"runbook: (\S+)", ALERTS.read_text())
    assert runbooks == [f"docs/operations.md#{name.lower()}" for name in alerts]
    headings = re.findall(r"^#+ (\w+)$", (ROOT / "docs/operations.md").read_text(), re.MULTILINE)
    assert set(alerts) <= set(headings)


@needs_promtool
def test_promtool_finds_no_fault_in_rules_and_configuration() -> None:
    promtool("check", "rules", "alerts.yml")
    promtool("check", "config", "prometheus.yml")


def test_every_alert_is_tested() -> None:
    alerts = set(re.findall(r"- alert: (\w+)", ALERTS.read_text()))
    tested = re.findall(r"alertname: (\w+)\n\s+exp_alerts:\n", ALERTS.with_name("alerts_test.yml").read_text())
    assert set(tested) == alerts


@pytest.mark.long
@needs_promtool
def test_alerts_fire_when_they_should_and_only_then() -> None:
    promtool("test", "rules", "alerts_test.yml")


def queries() -> list[str]:
    """Every query of the dashboard, with its variables and its panels' targets."""
    board = json.loads(DASHBOARD.read_text())
    variables = [item["definition"] for item in board["templating"]["list"] if item["type"] == "query"]
    return variables + [target["expr"] for panel in board["panels"] for target in panel.get("targets", [])]


def test_the_dashboard_shows_every_metric_and_no_other() -> None:
    shown = names_in("\n".join(queries()))
    assert shown <= {name for metric in CATALOGUE for name in metric.samples}
    unshown = [metric.name for metric in CATALOGUE if not shown & set(metric.samples)]
    assert unshown == [
        "fleetdistill_run_deadline_seconds",  # of an alert
        "fleetdistill_run_last_completed_timestamp_seconds",
        "fleetdistill_last_round_method_figure",  # of every unit
        "fleetdistill_front_last_tick_timestamp_seconds",  # of an alert
        "fleetdistill_engine_last_heartbeat_timestamp_seconds",  # of an alert
    ]


@needs_promtool
def test_promtool_accepts_every_query_of_the_dashboard(tmp_path: Path) -> None:
    """As recording rules, because promtool checks expressions only in rules."""
    rules = []
    for number, query in enumerate(queries()):
        if not query.startswith("label_values"):
            expression = query.replace("$__rate_interval", "1m").replace("$instance", ".*").replace("$run", ".*")
            rules.append({"record": f"query_{number}", "expr": expression})
    (tmp_path / "rules.yml").write_text(json.dumps({"groups": [{"name": "dashboard", "rules": rules}]}))
    promtool("check", "rules", str(tmp_path / "rules.yml"))
