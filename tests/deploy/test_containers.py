"""deploy/Containerfile is built and deploy/compose.yaml's own services are started, without a container engine."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from deploy.containers import ROOT, Builder, Image, network, run_in, start_in, why_not
from support.processes import PATIENCE_SECONDS, wait_until

from fleetdistill.version import VERSION

DEPLOY = ROOT / "deploy"
COMPOSE: dict[str, Any] = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
DEVICES = ("camera-1", "camera-2", "camera-3")

pytestmark = [pytest.mark.containers, pytest.mark.skipif(bool(why_not()), reason=why_not() or "it can")]


@pytest.fixture(scope="module")
def image(tmp_path_factory: pytest.TempPathFactory) -> Image:
    image = Builder(DEPLOY / "Containerfile", tmp_path_factory.mktemp("image")).build("cpu")
    with (image.root / "etc/hosts").open("a") as hosts:
        hosts.write("127.0.0.1 " + " ".join(COMPOSE["services"]) + "\n")  # the names that Compose's network has
    return image


class Demo:
    """The services of compose.yaml that run fleetdistill's image, on one network."""

    def __init__(self, image: Image, work: Path, network: int) -> None:
        self.image, self.work, self._network = image, work, network
        self._processes: dict[str, subprocess.Popen[str]] = {}

    def start(self, service: str) -> None:
        """Starts a service; its output goes to a file."""
        given = COMPOSE["services"][service]
        assert given["read_only"], service
        with (self.work / f"{service}.log").open("a") as log:
            self._processes[service] = start_in(
                self.image, self.image.words(given), {}, **self._options(service), output=log
            )

    def run(self, service: str, words: list[str] | None = None) -> str:
        """Runs a service, or a command in it like `docker compose exec`, to its end."""
        return run_in(self.image, words or self.image.words(COMPOSE["services"][service]), {}, **self._options(service))

    def is_healthy(self, service: str) -> bool:
        """Whether the health check of a service succeeds."""
        given = COMPOSE["services"][service]["healthcheck"].get("test", ["CMD", *self.image.healthcheck])
        process = start_in(self.image, given[1:], {}, **self._options(service), output=subprocess.DEVNULL)
        return process.wait(PATIENCE_SECONDS) == 0

    def stop(self, service: str) -> int:
        """Stops a service as a container engine does."""
        process = self._processes.pop(service)
        process.send_signal(signal.SIGTERM)
        return process.wait(PATIENCE_SECONDS)

    def stop_all(self) -> None:
        """Stops every service that still runs."""
        for service in list(self._processes):
            self.stop(service)

    def wait_for(self, service: str, text: str) -> None:
        """Waits until a service has printed a text."""
        process = self._processes[service]
        wait_until(lambda: text in self.said(service) or process.poll() is not None, f"{service}: {text}")
        assert text in self.said(service), self.said(service)

    def said(self, service: str) -> str:
        """Everything that a service has printed."""
        return (self.work / f"{service}.log").read_text()

    def _options(self, service: str) -> dict[str, Any]:
        result = {}
        for item in COMPOSE["services"][service].get("volumes", []):
            source, target = item.split(":", 1)
            result[target] = str(
                (DEPLOY / source).resolve() if source.startswith(".") else self._volume(source, target)
            )
        return {"volumes": result, "network": self._network}

    def _volume(self, name: str, target: str) -> Path:
        """A named volume. As in a container engine, a new one belongs to the owner of the directory that it covers."""
        folder, covered = self.work / name, self.image.root / target.partition(":")[0].strip("/")
        assert name in COMPOSE["volumes"], name
        if not folder.exists():
            folder.mkdir()
            owner = covered.stat()
            os.chown(folder, owner.st_uid, owner.st_gid)
        return folder


@pytest.fixture
def demo(image: Image, tmp_path: Path) -> Iterator[Demo]:
    with network() as holder:
        demo = Demo(image, tmp_path, holder)
        try:
            yield demo
        finally:
            demo.stop_all()


def test_the_image_has_the_wheel_and_an_unprivileged_user(image: Image) -> None:
    (built,) = (image.root / "opt/fleetdistill/lib").glob("python*/site-packages/fleetdistill_server")
    assert built.is_dir()
    assert run_in(image, image.words({"command": ["--version"]}), {}) == f"{VERSION}\n"
    tried = "id -u; touch /opt/fleetdistill/x /var/lib/fleetdistill/x 2>&1 || true; grep CapBnd /proc/self/status"
    said = run_in(image, ["sh", "-c", tried], {})
    assert said.splitlines()[0] == "10001"
    assert said.count("Read-only file system") == 2
    assert said.split()[-1].strip("0") == "", "it could get capabilities"


def test_the_demo_runs_from_nothing_to_a_watched_run(demo: Demo) -> None:
    said = demo.run("prepare")
    assert "created a CA" in said
    assert "run 'demo' is started" in said
    assert demo.run("prepare") == "", "it makes nothing twice"
    demo.start("server")
    demo.wait_for("server", "is served on")
    assert demo.is_healthy("server")
    for service in ("dashboard", *DEVICES):
        demo.start(service)
    for service in DEVICES:
        demo.wait_for(service, "delivered")
    demo.wait_for("dashboard", "the dashboard is at")
    assert demo.is_healthy("dashboard")
    devices = json.loads(demo.run("server", ["fleetdistill", "devices", "--run", "demo", "--json"]))
    assert sorted(device["device"] for device in devices) == sorted(DEVICES)
    demo.run("server", ["fleetdistill", "runs", "stop", "demo"])
    assert demo.run("prepare") == ""
    (run,) = json.loads(demo.run("server", ["fleetdistill", "runs", "list", "--json"]))
    assert run["status"].startswith("stopped"), "it starts no run that an operator stopped"
    assert demo.stop("server") == 0, demo.said("server")
    assert not demo.is_healthy("server")
