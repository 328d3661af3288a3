"""A front that fails again and again is reported with the cause until it works again."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.processes import wait_until
from support.secured import make_pki

from fleetdistill.errors import RunError
from fleetdistill_server.config.section import as_toml
from fleetdistill_server.config.server_config import ServerConfig, ServerSection
from fleetdistill_server.service import front_process, serve_lock
from fleetdistill_server.service.front_process import FrontProcess
from fleetdistill_server.service.process_state import ProcessFile
from fleetdistill_server.service.supervisor import Supervisor
from fleetdistill_server.service.wakeups import make_ends
from fleetdistill_server.store.store import Store
from fleetdistill_server.views.health import problems
from fleetdistill_server.views.server import server as server_view


@contextlib.contextmanager
def served(store: Path, config: Path) -> Iterator[FrontProcess]:
    """A front on a free port, whose configuration is in a file."""
    server = ServerSection(store=str(store), listen="127.0.0.1:0")
    config.write_text(as_toml(ServerConfig(server=server)))
    front = FrontProcess([str(config)], store, make_ends(1)[0], None, lambda port: None)
    try:
        wait_until(lambda: front.port is not None, "the front to listen")
        yield front
    finally:
        front.stop(at_once=True)


def test_a_front_that_fails_again_and_again_is_a_problem(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(front_process, "STEADY_SECONDS", 1.0)
    config = tmp_path / "server.toml"
    with (
        contextlib.closing(Store.open(tmp_path / "store")) as store,
        serve_lock.take(tmp_path / "store", ""),
        served(tmp_path / "store", config) as front,
    ):
        file, port, working = ProcessFile(tmp_path / "store"), front.port, config.read_text()

        def look() -> list[str]:
            front.look()
            file.write([front.state()])
            return problems(store, tmp_path / "store")

        def states() -> list[str]:
            rows = server_view(store, tmp_path / "store").lists["processes"]
            return [str(row["state"]) for row in rows if row["process"] == "front"]

        wait_until(lambda: look() == [] and front.state().works, "the front to work")
        config.write_text("[server]\nlisten = 5\n")
        front.stop(at_once=True)
        wait_until(lambda: "failed 3 times" in " ".join(look()), "the third failure")
        for _ in range(5):
            (problem,) = look()
            assert problem.startswith("the front has failed "), "also while one starts"
            assert f"times without working for 1 s; last time, it {config}: [server] listen is 5, must be" in problem
            assert problem.endswith("so no device can call, or not for long; the supervisor starts it again")
            assert (states(), front.state().works) == (["starts again"], False)
        config.write_text(working)
        wait_until(lambda: look() == [], "the front to work again")
        assert (front.port, front.state().works, states()) == (port, True, ["works"])
        logged = [record.getMessage() for record in caplog.records]
        assert [line.count("listen is 5, must be text") for line in logged[1:]] == [1, 0], "one line for one cause"
        assert logged[-1].startswith("the front works again, after ")
        front.stop(at_once=True)
        wait_until(lambda: not front.state().works, "the front to end")
        assert "failed" not in " ".join(look()), "one more failure is the first again"
        wait_until(lambda: look() == [] and states() == ["works"], "the front to work once more")


def test_each_kill_of_the_front_is_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with (
        contextlib.closing(Store.open(tmp_path / "store")),
        serve_lock.take(tmp_path / "store", ""),
        served(tmp_path / "store", tmp_path / "server.toml") as front,
    ):
        for number in range(1, 4):
            front.stop(at_once=True)
            wait_until(lambda: front.look() or len(caplog.records) >= number, "the log")  # noqa: B023
            wait_until(lambda: front.look() or front.state().pid is not None, "the next start")
    logged = [record.getMessage() for record in caplog.records]
    killed = "the front was killed by SIGKILL: by hand, or by the kernel because memory was short"
    again = "without working for 10 s, the next start in"
    assert logged == [
        f"{killed}; restarting it",
        f"{killed}; failure 2 {again} 0.8 s",
        f"{killed}; failure 3 {again} 1.6 s",
    ]


def test_a_front_that_cannot_listen_at_first_ends_the_server(tmp_path: Path) -> None:
    with contextlib.closing(Store.open(tmp_path / "store")), served(tmp_path / "store", tmp_path / "a.toml") as front:
        server = ServerSection(store=str(tmp_path / "store"), listen=f"127.0.0.1:{front.port}")
        (tmp_path / "b.toml").write_text(as_toml(ServerConfig(server=server)))
        second = FrontProcess([str(tmp_path / "b.toml")], tmp_path / "other", make_ends(1)[0], None, lambda port: None)

        def refusal() -> str:
            try:
                second.look()
            except RunError as error:
                return str(error)
            return ""

        error = wait_until(refusal, "the second front to fail")
        assert error.startswith(f"the front cannot listen on {server.listen}: the address is in use")


@pytest.mark.parametrize("taken", ["listen", "enrol_listen"])
def test_the_port_that_is_taken_is_named_alone(tmp_path: Path, taken: str) -> None:
    make_pki(tmp_path / "pki")
    with socket.create_server(("127.0.0.1", 0)) as other:
        addresses = {"listen": "127.0.0.1:0", "enrol_listen": "127.0.0.1:0"}
        addresses[taken] = f"127.0.0.1:{other.getsockname()[1]}"
        section = ServerSection(store=str(tmp_path / "store"), pki=str(tmp_path / "pki"), **addresses)  # type: ignore[arg-type]
        supervisor = Supervisor(ServerConfig(server=section))
        with pytest.raises(RunError, match=f"cannot listen on {addresses[taken]}: .* \\[server\\] {taken}$"):
            supervisor.serve()
