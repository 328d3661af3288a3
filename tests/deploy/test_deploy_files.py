"""The files of deploy/: linted, checked against their published schemas, and their commands read by the real parser."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import typer
import yaml

from fleetdistill_server.cli.app import app
from fleetdistill_server.config.run_config import load_run_config
from fleetdistill_server.config.server_config import load_service_config

DEPLOY = Path(__file__).parents[2] / "deploy"
KUBERNETES = DEPLOY / "kubernetes"
TOOLS = Path(sys.executable).parent
UNITS = sorted((DEPLOY / "systemd").glob("*.service"))
systemd = pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd-analyze is not installed")
every_unit = pytest.mark.parametrize("unit", UNITS, ids=[unit.stem for unit in UNITS])


def tried(*words: str | Path) -> str:
    """The output of a command that must succeed."""
    done = subprocess.run([*map(str, words)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def test_hadolint_accepts_the_containerfile() -> None:
    assert tried(TOOLS / "hadolint", DEPLOY / "Containerfile") == ""


def test_the_compose_file_fits_its_schema() -> None:
    tried(TOOLS / "check-jsonschema", "--builtin-schema", "vendor.compose-spec", DEPLOY / "compose.yaml")


def test_files_that_compose_mounts_exist() -> None:
    services: dict[str, Any] = yaml.safe_load((DEPLOY / "compose.yaml").read_text())["services"]
    mounted = [item.split(":")[0] for service in services.values() for item in service.get("volumes", [])]
    assert [item for item in mounted if item.startswith(".") and not (DEPLOY / item).exists()] == []


def test_every_service_of_the_image_is_confined() -> None:
    services = yaml.safe_load((DEPLOY / "compose.yaml").read_text())["services"]
    own = {name: service for name, service in services.items() if service["image"].startswith("fleetdistill")}
    assert own
    for name, service in own.items():
        assert (service["read_only"], service["cap_drop"]) == (True, ["ALL"]), name
        assert service["security_opt"] == ["no-new-privileges:true"], name


def manifests() -> Iterator[dict[str, Any]]:
    for path in sorted(KUBERNETES.glob("*.yaml")):
        if path.name != "kustomization.yaml":
            yield from yaml.safe_load_all(path.read_text())


def test_kubernetes_accepts_the_manifests() -> None:
    result = list(manifests())
    assert [item["kind"] for item in result] == ["Service", "NetworkPolicy", "StatefulSet"]
    for manifest in result:
        if manifest["kind"] != "StatefulSet":  # whose selector and labels kustomize writes
            kubernetes_validate.validate(manifest, "1.31", strict=True)


@pytest.mark.skipif(shutil.which("kubectl") is None, reason="kubectl is not installed")
def test_kustomize_builds_what_kubernetes_accepts() -> None:
    built = list(yaml.safe_load_all(tried("kubectl", "kustomize", KUBERNETES)))
    for manifest in built:
        kubernetes_validate.validate(manifest, "1.31", strict=True)
    (server,) = (item["spec"] for item in built if item["kind"] == "StatefulSet")
    assert server["selector"]["matchLabels"].items() <= server["template"]["metadata"]["labels"].items()
    (config,) = (item for item in built if item["kind"] == "ConfigMap")
    assert config["metadata"]["name"] in str(server["template"]["spec"]["volumes"])


@systemd
@every_unit
def test_systemd_accepts_a_unit(unit: Path, tmp_path: Path) -> None:
    here = tmp_path / unit.name
    here.write_text(re.sub(r"/opt/fleetdistill/bin/\w+", sys.executable, unit.read_text()))
    assert tried("systemd-analyze", "verify", here) == ""


@systemd
@every_unit
def test_a_unit_is_hardened(unit: Path) -> None:
    """Exposure of at most 2.0 of 10, in words OK."""
    tried("systemd-analyze", "security", "--offline=yes", "--threshold=20", unit)


@systemd
def test_systemd_accepts_the_gpu_drop_in(tmp_path: Path) -> None:
    unit = DEPLOY / "systemd/fleetdistill-server.service"
    (tmp_path / f"{unit.name}.d").mkdir()
    shutil.copy(DEPLOY / "systemd/gpu.conf", tmp_path / f"{unit.name}.d")
    here = tmp_path / unit.name
    here.write_text(re.sub(r"/opt/fleetdistill/bin/\w+", sys.executable, unit.read_text()))
    assert tried("systemd-analyze", "verify", here) == ""


@pytest.mark.skipif(shutil.which("systemd-sysusers") is None, reason="systemd-sysusers is not installed")
def test_systemd_makes_the_units_user() -> None:
    said = tried("systemd-sysusers", "--dry-run", DEPLOY / "systemd/fleetdistill.sysusers")
    assert "Creating user 'fleetdistill'" in said or "getent" in said or said == ""
    unit = (DEPLOY / "systemd/fleetdistill-server.service").read_text()
    assert "\nUser=fleetdistill\n" in unit


def test_stopping_server_gives_processes_their_full_time() -> None:
    unit = (DEPLOY / "systemd/fleetdistill-server.service").read_text()
    compose = yaml.safe_load((DEPLOY / "compose.yaml").read_text())["services"]["server"]["stop_grace_period"]
    (pod,) = (manifest["spec"]["template"]["spec"] for manifest in manifests() if manifest["kind"] == "StatefulSet")
    given = [re.findall(r"TimeoutStopSec=(\d+)", unit)[0], compose.removesuffix("s")]
    assert [*map(int, given), pod["terminationGracePeriodSeconds"]] == [45, 45, 45]


@pytest.mark.parametrize("config", sorted(DEPLOY.rglob("server.toml")), ids=lambda path: path.parent.name)
def test_a_configuration_is_read(config: Path) -> None:
    server = load_service_config(config).server
    assert server.pki, "it listens on every address"


def test_compose_devices_take_part_in_the_run_compose_creates() -> None:
    run = load_run_config(DEPLOY / "demo.toml").run
    services = yaml.safe_load((DEPLOY / "compose.yaml").read_text())["services"]
    devices = [service["entrypoint"] for service in services.values() if "--state-dir" in service.get("entrypoint", [])]
    assert len(devices) == run.min_devices
    assert {words[words.index("--run") + 1] for words in devices} == {run.name}


def test_the_runbook_has_a_section_for_each_alert() -> None:
    rules = yaml.safe_load((DEPLOY / "prometheus/alerts.yml").read_text())
    alerts = [rule["alert"] for group in rules["groups"] for rule in group["rules"]]
    runbook = (DEPLOY.parent / "docs/operations.md").read_text()
    assert re.findall(r"^### (Fleetdistill\w+)$", runbook, re.MULTILINE) == alerts


# --- commands


def commands(path: Path) -> Iterator[list[str]]:
    """Every command line of `fleetdistill` in a file: in a shell's words, and in lists of YAML and JSON."""
    text = re.sub(r"^(#|Description=).*", "", path.read_text(), flags=re.MULTILINE).replace("\\\n", " ")
    if path.suffix:  # the Containerfile's are all lists
        yield from map(shlex.split, re.findall(r"(?:^|[\s/])fleetdistill ([a-z]+ [^;|&<>\n]*)", text))
    for words in re.findall(r'\["?fleetdistill"?, ([^\]]*)\]', text):
        yield [word.strip(' "') for word in words.split(",")]
    for words in re.findall(r"(?:command|args|CMD):? \[\"?((?:serve|dashboard)[^\]]*)\]", text):
        yield [word.strip(' "') for word in words.split(",")]


FOUND = {
    f"{path.name}: {' '.join(words)}": words
    for path in sorted(DEPLOY.rglob("*"))
    if path.is_file() and path.parent.name not in ("prometheus", "grafana")
    for words in commands(path)
}


def test_the_commands_are_found() -> None:
    for file in ("Containerfile", "compose.yaml", "server.yaml", "fleetdistill-server.service", "README.md"):
        assert any(name.startswith(file) for name in FOUND), (file, list(FOUND))


@pytest.mark.parametrize("words", FOUND.values(), ids=FOUND)
def test_a_command_is_one_of_the_command_line(words: list[str]) -> None:
    command: Any = typer.main.get_command(app)
    context, rest = None, list(words)
    while hasattr(command, "resolve_command"):
        context = command.make_context("fleetdistill", [], parent=context, resilient_parsing=True)
        _, command, rest = command.resolve_command(context, rest)
    command.make_context("fleetdistill", rest, parent=context)  # exits or raises if an option is unknown
