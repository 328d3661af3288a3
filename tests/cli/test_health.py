"""`fleetdistill health` against real fronts, in plain text and with TLS, and where there is none."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from support.live_front import live_front, prepare_store
from support.processes import free_port, wait_until
from support.secured import (
    CALL_SECONDS,
    SecuredFront,
    device_credentials,
    make_pki,
    person_credentials,
    secured_front,
)
from typer.testing import CliRunner

from fleetdistill.link.credentials import Credentials, load_credentials
from fleetdistill_server.cli.app import app
from fleetdistill_server.security.certificates import Role
from fleetdistill_server.security.pki import Authority
from fleetdistill_server.service import serve_lock
from fleetdistill_server.service.process_state import ENGINE, ProcessFile, ProcessState
from fleetdistill_server.texts import HEALTH_PROBLEM


def health(*words: str | Path) -> tuple[int, str]:
    done = CliRunner().invoke(app, ["health", *map(str, words)])
    return done.exit_code, done.output.strip()


@pytest.fixture(scope="module")
def secured(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SecuredFront]:
    folder = tmp_path_factory.mktemp("health")
    person_credentials(make_pki(folder / "pki"), Role.VIEWER, "vera")
    prepare_store(folder / "store").close()
    with secured_front(folder / "store", folder / "pki") as front:
        yield front


@pytest.mark.slow
def test_a_plain_front_serves_and_its_engine_does_not(tmp_path: Path) -> None:
    prepare_store(tmp_path).close()
    with live_front(tmp_path) as front:
        server = f"127.0.0.1:{front.port}"
        told = "fleetdistill.engine is NOT_SERVING, no engine works on the store"
        wait_until(lambda: health(server) == (1, f"error: server {server}: {told}. See its log, and `runs list`"), told)
        for service in ("fleetdistill.database", "fleetdistill.disk"):
            assert health(server, "--service", service) == (0, f"{server} serves")
        code, said = health(server, "--service", "fleetdistill.engine")
        assert (code, told in said) == (1, True)
        code, said = health(server, "--service", "nobody")
        assert (code, "has no service 'nobody'" in said) == (1, True)
        front.kill()
        code, said = health(server)
        assert (code, said) == (
            1,
            f"error: server {server} cannot be reached; nothing listens on this port; check the port, and whether the "
            "server is running",
        )
        front.start_again()


@pytest.mark.slow
def test_a_server_whose_disk_limit_is_reached_says_so(tmp_path: Path) -> None:
    prepare_store(tmp_path).close()
    with live_front(tmp_path, keep_free_bytes=1 << 60) as front, serve_lock.take(tmp_path, "", 1):
        server = f"127.0.0.1:{front.port}"
        told = "fleetdistill.disk is NOT_SERVING, a disk limit is reached, so it refuses uploads"
        wait_until(lambda: told in health(server)[1], told, 15)
        listed = CliRunner().invoke(app, ["runs", "list", "--store", str(tmp_path)])
        assert (listed.exit_code, "so uploads are refused: free some space" in listed.stderr) == (0, True)


@pytest.mark.slow
def test_engines_that_do_not_work_are_named(tmp_path: Path) -> None:
    store = prepare_store(tmp_path)
    with live_front(tmp_path) as front, serve_lock.take(tmp_path, "", 2):
        ProcessFile(tmp_path).write(
            [
                ProcessState(ENGINE, "digits", 1, 0, hangs="2026-11-24T06:00:00Z"),
                ProcessState(ENGINE, "nightly", None, 1, waits="has failed and is started again at 12"),
            ]
        )
        told = "the engine of run 'digits' hangs: it has sent no heartbeat since 2026-11-24T06:00:00Z; "
        told += "the engine of run 'nightly' has failed and is started again at 12. See its log"
        wait_until(lambda: told in health(f"127.0.0.1:{front.port}")[1], told)
    store.close()


@pytest.mark.slow
def test_people_but_no_devices_are_told_of_engines(secured: SecuredFront) -> None:
    def told(credentials: Credentials) -> bool:
        with secured.channel(credentials) as channel:
            request = health_pb2.HealthCheckRequest(service="fleetdistill.engine")
            _, call = health_pb2_grpc.HealthStub(channel).Check.with_call(request, timeout=CALL_SECONDS)
        return HEALTH_PROBLEM in dict(call.trailing_metadata() or ())

    viewer = load_credentials(secured.pki / "viewer-vera")
    wait_until(lambda: told(viewer), "the front to see that no engine works")
    assert not told(device_credentials(Authority(secured.pki), "d"))


@pytest.mark.slow
def test_enrolment_port_with_tls_replies_without_identity(secured: SecuredFront) -> None:
    server = f"localhost:{secured.enrol_port}"
    assert health(server, "--ca", secured.pki / "ca.pem") == (0, f"{server} replies")


@pytest.mark.slow
def test_a_ca_on_the_main_port_is_told_what_to_pass(secured: SecuredFront) -> None:
    code, said = health(f"localhost:{secured.port}", "--ca", secured.pki / "ca.pem")
    assert (code, "this is its main port, which wants one of you too: give --identity" in said) == (1, True), said


@pytest.mark.slow
def test_a_plain_call_to_a_port_with_tls_is_told_what_to_pass(secured: SecuredFront) -> None:
    for port in (secured.port, secured.enrol_port):
        code, said = health(f"localhost:{port}")
        assert (code, f"error: server localhost:{port} requires TLS: give --identity" in said) == (1, True), said


def test_a_server_without_a_port_is_told_to_add_one() -> None:
    assert health("localhost") == (1, "error: 'localhost' has no port; give host:port, such as localhost:50051")


@pytest.mark.slow
def test_a_viewer_asks_the_main_port(secured: SecuredFront) -> None:
    server = f"localhost:{secured.port}"
    given = ("--identity", secured.pki / "viewer-vera", "--service", "fleetdistill.database")
    assert health(server, *given) == (0, f"{server} serves")


@pytest.mark.slow
def test_a_server_of_another_ca_is_not_healthy(secured: SecuredFront, tmp_path: Path) -> None:
    make_pki(tmp_path / "pki")
    code, said = health(f"localhost:{secured.enrol_port}", "--ca", tmp_path / "pki/ca.pem")
    assert (code, "its certificate is not from a trusted CA" in said) == (1, True), said


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("--ca", "nowhere.pem"), "--ca nowhere.pem cannot be read: No such file or directory"),
        (("--ca", __file__), "contains no certificate; name the ca.pem of the server's PKI"),
        (("--ca", __file__, "--service", "x"), "--ca cannot be combined with --identity or --service"),
    ],
)
def test_wrong_options_are_told(words: tuple[str, ...], expected: str) -> None:
    code, said = health(f"localhost:{free_port()}", *words)
    assert (code, expected in said) == (1, True), said
