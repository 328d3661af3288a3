"""Prometheus's own checks of rules and metrics, and the files of deploy/ that they read."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ALERTS, DASHBOARD = ROOT / "deploy/prometheus/alerts.yml", ROOT / "deploy/grafana/fleetdistill.json"
PROMTOOL = shutil.which("promtool")
needs_promtool = pytest.mark.skipif(PROMTOOL is None, reason="promtool is not installed (Debian's package prometheus)")


def promtool(*words: str, stdin: str | None = None) -> None:
    """Runs promtool in deploy/prometheus; fails with what it says."""
    done = subprocess.run(
        [str(PROMTOOL), *words], cwd=ALERTS.parent, input=stdin, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
