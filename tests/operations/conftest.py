"""A real run over TLS, played once for the module: two devices, two rounds of FedAvg, and a server that goes on."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from support.linear_devices import take_part
from support.processes import wait_until
from support.secured import make_pki
from support.served import RUN, served

from fleetdistill_server.operations.client import connect
from fleetdistill_server.operations.source import LocalStore
from fleetdistill_server.security.certificates import Role

DEVICES = ("camera-1", "camera-2")


@dataclass(frozen=True)
class Played:
    """Where the played run is, on this machine and from elsewhere."""

    work: Path
    address: str

    @property
    def store(self) -> Path:
        return self.work / "store"

    @property
    def here(self) -> list[str]:
        return ["--store", str(self.store)]

    def there(self, who: str = "viewer") -> list[str]:
        return ["--server", self.address, "--identity", str(self.work / who)]


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Played]:
    work = tmp_path_factory.mktemp("played")
    authority = make_pki(work / "pki")
    for role in (Role.OPERATOR, Role.VIEWER):
        authority.issue_person(role, f"the-{role}", 1.0, work / str(role))
    settings: dict[str, dict[str, Any]] = {
        "run": {"method": "fedavg", "rounds": 2, "min_devices": 2, "deadline_seconds": 120.0},
        "contract": {"classes": 10, "input_shape": [1, 8, 8]},
        "model": {"extractor": "", "server": "", "device": "digits_linear"},
        "server": {"pki": str(work / "pki"), "enrol_listen": "127.0.0.1:0"},
    }
    with served(work, settings) as address:
        with connect(address, work / "operator") as operator:
            tokens = operator.tokens(len(DEVICES), 600.0, RUN)
        ways = [
            threading.Thread(target=take_part, args=(work, address, name, number, tokens[number]), daemon=True)
            for number, name in enumerate(DEVICES)
        ]
        for way in ways:
            way.start()
        store = LocalStore(work / "store")
        wait_until(lambda: store.runs().lists["runs"][0]["status"] == "finished", "the run")
        for way in ways:
            way.join()
        wait_until(
            lambda: all(row["upload_at"] for row in store.round(RUN).lists["asks"]), "the times of the last asks"
        )
        wait_until(
            lambda: all(row["process"] != "engine" for row in store.server().lists["processes"]), "the engine's end"
        )
        yield Played(work, address)
