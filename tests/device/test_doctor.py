"""`fleetdistill doctor --state`: each fault of a device is made for real, and named with what to do about it."""

from __future__ import annotations

import hashlib
import json
import socket
import ssl
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from support.processes import free_port, wait_until
from support.secured import SecuredFront, device_credentials, make_pki

from fleetdistill.device.doctor import examine, main
from fleetdistill.link.credentials import AUTHORITIES, IDENTITY, Credentials, write_private
from fleetdistill.state.directory import Storage
from fleetdistill_server.security.pki import Authority
from fleetdistill_server.store.store import Store

DEVICE = "camera-7"


@pytest.fixture
def state(tmp_path: Path) -> Path:
    """The directory of a device in plain text."""
    storage = Storage(tmp_path / "state")
    storage.save_identity({"device": DEVICE, "run": "digits", "secret": "00" * 32})
    storage.close()
    return tmp_path / "state"


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return make_pki(tmp_path / "pki")


def enrol(state: Path, credentials: Credentials) -> None:
    (state / "tls").mkdir(exist_ok=True)
    write_private(state / "tls" / IDENTITY, credentials.key + credentials.chain)
    write_private(state / "tls" / AUTHORITIES, credentials.authorities)


@pytest.fixture
def front(tmp_path: Path, authority: Authority) -> Iterator[str]:
    Store.open(tmp_path / "store").close()
    running = SecuredFront(tmp_path / "store", authority.directory)
    running.start()
    yield f"127.0.0.1:{running.port}"
    running.stop()


def said(state: Path, server: str | None = None, level: str = "error", ahead: float = 0.0) -> list[str]:
    """What is found at a level, on a machine whose clock is ahead by some seconds."""
    result = examine(state, server, clock=lambda: time.time() + ahead)
    return [f"{item.check}: {item.text}" for item in result if item.level == level]


@pytest.mark.slow
def test_a_healthy_device_has_no_error_and_nothing_is_changed(state: Path, authority: Authority, front: str) -> None:
    enrol(state, device_credentials(authority, DEVICE))
    before = {path: hashlib.sha256(path.read_bytes()).digest() for path in state.rglob("*") if path.is_file()}
    assert said(state, front) == []
    good = said(state, front, "ok")
    assert f"server: {front} replies and is serving (protocol v1)" in good
    assert {path: hashlib.sha256(path.read_bytes()).digest() for path in before} == before
    assert {path for path in state.rglob("*") if path.is_file()} == set(before)


@pytest.mark.slow
def test_tls_server_is_named_if_certificate_missing_or_foreign(state: Path, front: str, tmp_path: Path) -> None:
    (error,) = said(state, front)
    assert "requires TLS, but this device has no certificate" in error
    enrol(state, device_credentials(make_pki(tmp_path / "other"), DEVICE))
    (error,) = said(state, front)
    assert f"server: {front} is not trusted" in error
    assert "enrol the device again with a new token" in error


@pytest.fixture
def elsewhere(authority: Authority) -> Iterator[str]:
    """The server's certificate, on an address that it does not name."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(authority.directory / "server.pem")
    over = threading.Event()
    with socket.create_server(("127.0.0.2", 0)) as listening:
        listening.settimeout(0.1)

        def serve() -> None:
            while not over.is_set():
                try:
                    connection, _ = listening.accept()
                    connection.settimeout(5)
                    context.wrap_socket(connection, server_side=True).close()
                except OSError:
                    continue

        serving = threading.Thread(target=serve)
        serving.start()
        yield f"127.0.0.2:{listening.getsockname()[1]}"
        over.set()
        serving.join()


def test_a_certificate_with_another_name_is_named(state: Path, authority: Authority, elsewhere: str) -> None:
    enrol(state, device_credentials(authority, DEVICE))
    (error,) = said(state, elsewhere)
    assert "is not trusted" in error
    assert "`fleetdistill pki renew-server --names` with those and 127.0.0.2" in error


def test_a_server_that_forgot_the_devices_ca_is_named(
    state: Path, authority: Authority, front: str, tmp_path: Path
) -> None:
    old = device_credentials(make_pki(tmp_path / "other"), DEVICE)
    enrol(state, replace(old, authorities=device_credentials(authority, DEVICE).authorities))
    *_, error = said(state, front)
    assert "does not answer calls; it may not admit this device's certificate any more, as after a change" in error


def test_an_expired_certificate_and_a_wrong_clock_are_named(state: Path, authority: Authority) -> None:
    enrol(state, device_credentials(authority, DEVICE))
    (early,) = said(state, ahead=-7200)
    assert early.startswith("certificate: the device's certificate is valid from")
    assert "set this machine's clock" in early
    enrol(state, device_credentials(authority, DEVICE, days=1e-5))  # 0.9 s
    wait_until(lambda: said(state), "the certificate to expire")
    (late,) = said(state)
    assert late.startswith("certificate: the device's certificate expired on")
    assert "enrol the device with a new token" in late


def test_server_without_answer_is_named_with_failing_step(state: Path) -> None:
    (error,) = said(state, f"127.0.0.1:{free_port()}")
    assert error.startswith("server: nobody answers on")
    (error,) = said(state, "no-such-host.invalid:50051")
    assert "cannot be resolved" in error
    (error,) = said(state, "somewhere")
    assert "expected host:port" in error


def test_another_program_on_the_port_is_named(state: Path) -> None:
    over = threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as listening:
        listening.settimeout(0.1)

        def hang_up() -> None:
            while not over.is_set():
                try:
                    listening.accept()[0].close()
                except OSError:
                    continue

        serving = threading.Thread(target=hang_up)
        serving.start()
        (error,) = said(state, f"127.0.0.1:{listening.getsockname()[1]}")
        over.set()
        serving.join()
    assert "does not answer calls; check that the port is the server's" in error


def test_a_damaged_state_is_named(state: Path) -> None:
    file = state / "device.json"
    file.write_bytes(file.read_bytes().replace(DEVICE.encode(), b"camera-8"))
    assert any("it does not match its checksum" in error for error in said(state))


def test_a_state_of_a_newer_sdk_is_named(state: Path) -> None:
    saved = json.loads((state / "device.json").read_bytes())
    del saved["crc"]
    (state / "device.json").write_text(json.dumps({**saved, "format": 99}))
    (error,) = said(state)
    assert "was written by a newer SDK: it has format 99" in error


def test_a_directory_of_something_else_is_named(tmp_path: Path) -> None:
    (tmp_path / "photo.jpg").touch()
    (error,) = said(tmp_path)
    assert "contains 'photo.jpg', which is not a device's" in error
    (error,) = said(tmp_path / "nowhere")
    assert "is not the state directory of a device" in error


def test_a_key_that_others_can_read_is_named(state: Path, authority: Authority) -> None:
    enrol(state, device_credentials(authority, DEVICE))
    (state / "tls" / IDENTITY).chmod(0o644)
    (error,) = said(state)
    assert error.startswith("owner: other users can read the private key")
    assert "chmod 600" in error


def test_a_directory_that_others_can_read_is_named(state: Path) -> None:
    state.chmod(0o755)
    warning = f"other users can read the directory {state}; run `chmod -R go= {state}`"
    assert warning in [finding.text for finding in examine(state) if finding.check == "owner"]


def test_a_full_disk_is_named(state: Path) -> None:
    (state / "downloads").mkdir()
    with (state / "downloads" / f"{'0' * 64}.payload").open("wb") as file:
        file.truncate(1 << 50)  # of which none is stored
    (error,) = said(state)
    assert error.startswith("disk: ")
    assert "the next answer may need" in error


def sparse(path: Path, size: int) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as file:
        file.truncate(size)


def test_the_next_answer_needs_what_an_answer_writes(state: Path) -> None:
    """Each content once, and no earlier version."""

    def disk() -> str:
        return next(item.text for item in examine(state) if item.check == "disk")

    assert disk().endswith("what an answer needs is known after the first one, several times the model's size")
    for name, size in (("state", 10_000_000), ("delivered", 20_000_000)):
        sparse(state / f"{name}.safetensors", size)
    sparse(state / "model.onnx", 30_000_000)
    (state / "general.onnx").hardlink_to(state / "model.onnx")
    for number in (1, 2):
        sparse(state / f"versions/{number}/delivered.safetensors", 1_000_000_000)
    assert disk().endswith("the next answer may need 77 MB")  # 60 MB, and 16 MiB for small files


def test_command_needs_only_sdk_and_exits_with_1_after_error(state: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--state", str(state)]) == 0
    assert "warning  server: not checked" in capsys.readouterr().out
    assert main(["--state", str(state), "--server", f"127.0.0.1:{free_port()}", "--json"]) == 1
    result = json.loads(capsys.readouterr().out)
    assert [item["check"] for item in result if item["level"] == "error"] == ["server"]
