"""What all processes of a served fleet write, and what its store tells operators, contains no secret.

The secrets are tokens, devices' secrets, private keys, the dashboard's token, and passwords of URIs and variables.
"""

from __future__ import annotations

import contextlib
import json
import logging
import re
import subprocess
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from security.secrets_in import found_secrets, lines_of_key, secrets_of_token
from support.dashboards import dashboard
from support.linear_devices import take_part
from support.long import long_except
from support.processes import COMMAND, PATIENCE_SECONDS, free_port, wait_until
from support.secured import make_pki
from support.served import RUN, served

from fleetdistill.errors import RefusedError
from fleetdistill.link import x509 as device_x509
from fleetdistill.link.credentials import DEVICE_FOLDER, Credentials, load_credentials, split
from fleetdistill.link.grpc_link import GrpcLink
from fleetdistill.printable import PrintableRecords
from fleetdistill.wire.v1 import service_pb2
from fleetdistill_server.logs import JsonLines, LogFormat, TextLines
from fleetdistill_server.operations.client import connect
from fleetdistill_server.operations.source import LocalStore
from fleetdistill_server.security.certificates import Role

DEVICES = ("camera-1", "camera-2")
PASSWORDS = {
    "password of the tracker": "sesame-of-the-tracker",
    "password of PostgreSQL": "sesame-of-postgres",
    "PGPASSWORD": "sesame-in-a-variable",
    "AWS_SECRET_ACCESS_KEY": "sesame-of-the-object-store",
}
SETTINGS: dict[str, dict[str, Any]] = {
    "run": {"method": "fedavg", "rounds": 1, "min_devices": 2, "deadline_seconds": 120.0},
    "contract": {"classes": 10, "input_shape": [1, 8, 8]},
    "model": {"extractor": "", "server": "", "device": "digits_linear"},
    "server": {"enrol_listen": "127.0.0.1:0"},
}


@dataclass(frozen=True)
class Kept:
    """A source of credentials that do not change."""

    credentials: Credentials

    def current(self) -> Credentials:
        """These credentials."""
        return self.credentials

    def enrol_again(self) -> bool:
        return False


class Fleet:
    """A server with TLS in a directory, whoever calls it, and the secrets of all of them.

    Attributes:
        secrets: By what they are.
    """

    def __init__(self, work: Path) -> None:
        self.work = work
        self.secrets: dict[str, str | bytes] = dict(PASSWORDS)
        self.authority = make_pki(work / "pki")
        for role in (Role.OPERATOR, Role.VIEWER):
            self.authority.issue_person(role, f"the-{role}", 1.0, work / str(role))

    def make_tokens(self, address: str) -> list[str]:
        """Creates a token for each device and one more."""
        with connect(address, self.work / "operator") as operator:
            tokens = operator.tokens(len(DEVICES) + 1, 600.0, RUN)
        for number, token in enumerate(tokens):
            self.secrets |= secrets_of_token(str(number), token)
        return tokens

    def play(self, address: str, tokens: list[str]) -> None:
        """Enrols the devices and runs them to the end of the run."""
        ways = [
            threading.Thread(target=take_part, args=(self.work, address, name, number, tokens[number]), daemon=True)
            for number, name in enumerate(DEVICES)
        ]
        for way in ways:
            way.start()
        store = LocalStore(self.work / "store")
        wait_until(lambda: store.runs().lists["runs"][0]["status"] == "finished", "the run")
        for way in ways:
            way.join()

    def provoke(self, address: str, used: str) -> None:
        """Makes calls that are refused: a used token, wrong secrets, a bad upload, a viewer's change; revokes one."""
        with pytest.raises(RefusedError):
            take_part(self.work, address, "camera-3", 3, used)
        self.upload(address, "camera-1", self.secret_of("camera-1"))
        self.upload(address, "camera-1", self.secret_of("camera-2"))
        with connect(address, self.work / "viewer") as viewer, pytest.raises(RefusedError):
            viewer.revoke("camera-1", "")
        with connect(address, self.work / "operator") as operator:
            assert operator.revoke("camera-1", "stolen")
        self.upload(address, "camera-1", self.secret_of("camera-1"))

    def upload(self, address: str, device: str, secret: bytes) -> None:
        """Uploads nonsense with the certificate of a device; the server refuses it."""
        link = GrpcLink(address, Kept(load_credentials(self.work / device / DEVICE_FOLDER)))
        identity = service_pb2.Identity(run=RUN, device=device, secret=secret)
        name = service_pb2.UploadName(round=1, step_number=7, attempt=1)
        with contextlib.closing(link), pytest.raises(RefusedError):
            link.upload(service_pb2.UploadHeader(identity=identity, name=name, samples=1), iter([]))

    def secret_of(self, device: str) -> bytes:
        """The secret with which a device proves to be itself."""
        return bytes.fromhex(json.loads((self.work / device / "device.json").read_text())["secret"])

    def look(self, address: str) -> str:
        """Opens a dashboard of the server with a right and a wrong token; returns what it wrote, but for its token."""
        with dashboard(self.work, "--server", address, "--identity", str(self.work / "operator"), token=None) as page:
            (token,) = re.findall(r"token=([^\s;&]+)", self.written("dashboard.log"))
            self.secrets["dashboard token"] = token
            for tried, status in (("guessed", 403), (token, 303)):
                answer = httpx.post(f"{page}/login", data={"token": tried}, timeout=PATIENCE_SECONDS)
                assert answer.status_code == status
        shown, rest = self.written("dashboard.log").split("\n", 1)
        assert token in shown, "it is for the person who started the dashboard, and no log line"
        return rest

    def written(self, name: str) -> str:
        """The content of a file."""
        return (self.work / name).read_text()

    def collect_keys(self) -> None:
        """Adds the private keys and the devices' secrets to the secrets."""
        keys = {name: load_credentials(self.work / name / DEVICE_FOLDER).key for name in DEVICES}
        keys |= {str(role): load_credentials(self.work / str(role)).key for role in (Role.OPERATOR, Role.VIEWER)}
        keys["CA"] = (self.work / "pki" / "ca-key.pem").read_bytes()
        keys["server"] = split((self.work / "pki" / "server.pem").read_bytes())[0]
        for name, key in keys.items():
            self.secrets |= lines_of_key(name, key)
        self.secrets |= {f"secret of {name}": self.secret_of(name) for name in DEVICES}

    def told_to_operators(self) -> str:
        """The run with its events, and the trail of operators' calls."""
        store = LocalStore(self.work / "store")
        run, calls = store.run(RUN), store.operators().lists["operators"]
        assert {"CreateTokens", "RevokeDevice"} <= {call["call"] for call in calls}
        return json.dumps([run.lists, calls], default=str)


def refused_settings(work: Path, log_format: str) -> str:
    """What `serve` writes about a database's URL with a password."""
    text = (work / "run.toml").read_text()
    url = f"postgresql://user:{PASSWORDS['password of PostgreSQL']}@127.0.0.1/db"
    (work / "wrong.toml").write_text(text.replace('database = ""', f'database = "{url}"', 1))
    done = subprocess.run(
        [*COMMAND, "serve", "wrong.toml", "--log-format", log_format, "--log-level", "DEBUG"],
        cwd=work,
        capture_output=True,
        text=True,
    )
    assert (done.returncode, "database must not contain a password" in done.stderr) == (1, True), done.stderr
    return done.stdout + done.stderr


@contextlib.contextmanager
def log_of_devices(path: Path) -> Iterator[None]:
    """Writes all that this process logs, the SDK's part above all, to a file."""
    root, handler = logging.getLogger(), logging.FileHandler(path)
    level = root.level
    root.addHandler(handler)
    root.setLevel(logging.DEBUG)
    try:
        yield
    finally:
        root.removeHandler(handler)
        root.setLevel(level)
        handler.close()


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize("log_format", long_except(LogFormat, LogFormat.TEXT))
def test_no_process_writes_a_secret(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, log_format: str) -> None:
    for name in ("PGPASSWORD", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, PASSWORDS[name])
    fleet = Fleet(tmp_path)
    settings = {**SETTINGS, "server": {**SETTINGS["server"], "pki": str(tmp_path / "pki")}}
    tracker = f"mlflow:http://user:{PASSWORDS['password of the tracker']}@127.0.0.1:{free_port()}"
    options = ["--log-format", log_format, "--log-level", "DEBUG", "--track", tracker]
    with log_of_devices(tmp_path / "devices.log"), served(tmp_path, settings, *options) as address:
        tokens = fleet.make_tokens(address)
        fleet.play(address, tokens)
        fleet.provoke(address, used=tokens[0])
        of_dashboard = fleet.look(address)
    fleet.collect_keys()
    text = of_dashboard + refused_settings(tmp_path, log_format) + fleet.told_to_operators()
    text += fleet.written("server.log") + fleet.written("devices.log")
    heard = ("camera-1", "not-allowed", "stolen", "round closed", "mlflow")
    assert [word for word in heard if word not in text] == [], "the processes have written about all of this"
    assert found_secrets(text, fleet.secrets) == []


@pytest.mark.parametrize("formatter", [TextLines("front"), JsonLines("front")])
def test_the_search_finds_a_secret_that_is_logged(tmp_path: Path, formatter: logging.Formatter) -> None:
    secrets: dict[str, str | bytes] = {**PASSWORDS, "secret of camera-1": bytes(range(7, 39))}
    secrets |= lines_of_key("camera-1", device_x509.new_key())
    logger, path = logging.Logger("fleetdistill.server.test", logging.DEBUG), tmp_path / "log"
    handler = logging.FileHandler(path)
    handler.setFormatter(formatter)
    handler.addFilter(PrintableRecords())
    logger.addHandler(handler)
    for name, secret in secrets.items():
        forms = [secret] if isinstance(secret, str) else [secret, secret.hex(), service_pb2.Identity(secret=secret)]
        for form in forms:
            path.write_text("")
            logger.debug("a call with %s", form)
            assert found_secrets(path.read_text(), secrets) == [name], form
    handler.close()


@pytest.mark.parametrize("first", [b'"', b"'", b"\\"])
def test_a_secret_that_begins_with_a_quote_is_found_whole(first: bytes) -> None:
    secret = first + bytes(range(31))
    secrets = {"secret of camera-1": secret}
    assert found_secrets(str(service_pb2.Identity(secret=secret)), secrets) == ["secret of camera-1"]
    assert found_secrets(str(secret), secrets) == ["secret of camera-1"]
    assert found_secrets('a \\ and a quote " and \\" are no secret', secrets) == []
