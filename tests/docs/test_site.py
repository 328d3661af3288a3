"""The documentation site builds with --strict, has every command, and fetches nothing from elsewhere."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)]
    environment = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return folder


@pytest.mark.long
@pytest.mark.slow
def test_nothing_is_fetched_from_another_host(site: Path) -> None:
    pages = list(site.rglob("*.html"))
    assert len(pages) > 30
    for page in pages:
        text = page.read_text(encoding="utf-8")
        assert not re.findall(r'<(?:script|img|iframe)[^>]*\ssrc="(?:https?:)?//[^"]*', text), page
        assert not re.findall(
            r'<link[^>]*\srel="(?:stylesheet|icon|preconnect)"[^>]*href="(?:https?:)?//[^"]*', text
        ), page
    for sheet in site.rglob("*.css"):
        assert not re.search(r"(?:url\(|@import )[\"']?(?:https?:)?//", sheet.read_text(encoding="utf-8")), sheet


@pytest.mark.long
@pytest.mark.slow
def test_the_command_line_and_the_python_api_are_generated(site: Path) -> None:
    commands = (site / "reference/cli.html").read_text(encoding="utf-8")
    assert "fleetdistill runs rollback" in commands
    assert "--expires" in commands
    interface = (site / "reference/python-api.html").read_text(encoding="utf-8")
    assert 'id="fleetdistill.device.device.Device.run"' in interface
    assert 'id="fleetdistill_server.methods.base.ServerMethod.round"' in interface


@pytest.mark.long
@pytest.mark.slow
def test_the_fields_of_a_report_are_generated(site: Path) -> None:
    page = (site / "reference/report.html").read_text(encoding="utf-8")
    assert 'id="devicereport"' in page
    assert "<code>mean_accuracy_fleet</code>" in page
    assert (site / "reference/report.schema.json").is_file()
