"""A store or a PKI that this user cannot use is an error of `serve`, `serve --check` and `doctor`, not a traceback."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from support.processes import PATIENCE_SECONDS, module_path
from support.secured import make_pki

from fleetdistill_server.config.section import as_toml
from fleetdistill_server.config.server_config import ServerConfig, ServerSection
from fleetdistill_server.store.store import Store

AS_ROOT = os.geteuid() == 0
WITHOUT_OVERRIDE = ["setpriv", "--bounding-set=-dac_override,-dac_read_search", "--inh-caps=-dac_override"]
"""Makes modes apply to root, too."""
CHECKS = """
import json, sys
from pathlib import Path
from fleetdistill.errors import FleetDistillError
from fleetdistill_server.cli import serve_checks, server_checks
from fleetdistill_server.config.section import as_toml
from fleetdistill_server.config.server_config import load_server_config

config = load_server_config(Path(sys.argv[1]))
refusals = []
for check in serve_checks.SERVER_CHECKS:
    try:
        check(config.server)
    except FleetDistillError as error:
        refusals.append(str(error))
        break
found = server_checks.examine(Path(sys.argv[1]))
errors = {item.check: item.text for item in found if item.level == "error"}
print(json.dumps([refusals, serve_checks.service_problems(config.server, False), errors, len(found)]))
"""

pytestmark = pytest.mark.skipif(AS_ROOT and shutil.which("setpriv") is None, reason="modes do not apply to root")


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Path]:
    make_pki(tmp_path / "pki")
    store = Store.open(tmp_path / "store")
    store.blobs.put_state(b"state")
    store.close()
    server = ServerSection(store=str(tmp_path / "store"), listen="127.0.0.1:0", pki=str(tmp_path / "pki"))
    (tmp_path / "server.toml").write_text(as_toml(ServerConfig(server=server)))
    yield tmp_path
    for folder in ("store", "pki"):
        for path in (tmp_path / folder, tmp_path / folder / "blobs"):
            with suppress(OSError):
                path.chmod(0o700)


def checks(place: Path) -> tuple[list[str], list[str], dict[str, str], int]:
    command = [*(WITHOUT_OVERRIDE if AS_ROOT else []), sys.executable, "-c", CHECKS, str(place / "server.toml")]
    environment = {**os.environ, **module_path()}
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_SECONDS, env=environment)
    assert done.returncode == 0, done.stderr
    refusals, problems, errors, count = json.loads(done.stdout)
    return refusals, problems, errors, count


def test_a_store_and_a_pki_of_this_user_can_be_used(place: Path) -> None:
    assert checks(place)[:3] == ([], [], {})


@pytest.mark.parametrize(
    ("name", "mode", "lacks"),
    [
        ("store/blobs", 0o500, "written"),
        ("pki", 0o000, "read"),
        pytest.param("store/store.sqlite", 0o400, "written", marks=pytest.mark.long),
        pytest.param("store", 0o500, "written", marks=pytest.mark.long),
        pytest.param("store", 0o000, "written", marks=pytest.mark.long),
        pytest.param("pki/server.pem", 0o000, "read", marks=pytest.mark.long),
    ],
)
def test_what_this_user_cannot_use_is_named(place: Path, name: str, mode: int, lacks: str) -> None:
    (place / name).chmod(mode)
    refusals, problems, errors, count = checks(place)
    (text,) = refusals
    assert text.startswith(f"{place / name} cannot be {lacks} by this user (owner ")
    assert f", mode {mode:o}); run `chown -R USER {place / name.split('/')[0]}` as root" in text
    assert text in problems
    assert errors["access"] == text
    assert count > 8, "the other checks are made too"
