"""`fleetdistill doctor run.toml`: each fault is made for real, and named with what to do about it."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.later_version import LATER, later_version
from support.live_front import open_round, prepare_store, write_asks
from support.processes import free_port, wait_until
from support.secured import make_pki
from support.wire_samples import make_payload
from typer.testing import CliRunner

from fleetdistill.errors import StoreUnavailableError
from fleetdistill_server.cli.app import app
from fleetdistill_server.cli.server_checks import examine
from fleetdistill_server.config.run_config import run_config
from fleetdistill_server.config.section import as_toml
from fleetdistill_server.service import serve_lock
from fleetdistill_server.service.heartbeat import SUPERVISOR_FILE
from fleetdistill_server.service.process_state import ENGINE, FRONT, ProcessFile, ProcessState
from fleetdistill_server.store.store import Store


def write_config(folder: Path, **server: Any) -> Path:
    settings = {"listen": f"127.0.0.1:{free_port()}", "store": str(folder / "store"), "keep_free_bytes": 0, **server}
    run = {"name": "digits", "method": "fedavg"}
    contract = {"classes": 10, "input_shape": [1, 8, 8]}
    path = folder / "run.toml"
    path.write_text(as_toml(run_config({"run": run, "contract": contract, "server": settings})))
    return path


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    """A store with an open round, whose ask needs a payload."""
    prepared = prepare_store(tmp_path / "store")
    number = open_round(prepared, "a")
    write_asks(prepared, number, "a", payload=make_payload())
    yield prepared
    prepared.close()


def said(path: Path, level: str = "error", **given: Any) -> list[str]:
    """What is found at a level, as check and text."""
    return [f"{item.check}: {item.text}" for item in examine(path, **given) if item.level == level]


def digest(folder: Path) -> str:
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    whole = hashlib.sha256()
    for path in files:
        whole.update(str(path).encode() + path.read_bytes())
    return whole.hexdigest()


def test_a_healthy_server_has_no_error_and_nothing_is_changed(store: Store, tmp_path: Path) -> None:
    make_pki(tmp_path / "pki")
    path = write_config(tmp_path, pki=str(tmp_path / "pki"), enrol_listen=f"127.0.0.1:{free_port()}")
    store.close()
    before = digest(tmp_path)
    assert said(path) == []
    (warning,) = [item for item in said(path, "warning") if item.startswith("processes")]
    missing = f"processes: no server uses the store {tmp_path / 'store'}, but runs are to go on ('digits')"
    assert warning == f"{missing}; run `fleetdistill serve {path}`"
    assert digest(tmp_path) == before
    checks = {item.check for item in examine(path) if item.level == "ok"}
    assert checks >= {"versions", "settings", "extras", "ports", "TLS", "disk", "hardware", "store"}


def test_it_reads_what_another_process_has_just_written(store: Store, tmp_path: Path) -> None:
    path = write_config(tmp_path)
    store.history.add_event("digits", "joined", "still in the log of the database")
    assert (tmp_path / "store" / "store.sqlite-wal").stat().st_size
    assert said(path) == []


def test_without_a_store_nothing_is_created(tmp_path: Path) -> None:
    path = write_config(tmp_path)
    assert said(path) == []
    assert not (tmp_path / "store").exists()


def test_a_port_in_use_is_named(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        (error,) = said(write_config(tmp_path, listen=address))
    assert error.startswith(f"ports: [server] listen: cannot listen on {address}")


def test_an_engine_that_waits_for_its_restart_is_named(store: Store, tmp_path: Path) -> None:
    path = write_config(tmp_path)
    with serve_lock.take(tmp_path / "store", ""):
        ProcessFile(tmp_path / "store").write([ProcessState(ENGINE, "digits", None, 1, waits="has failed")])
        assert "processes: the engine of run 'digits' has failed; see `runs show` and the server's log" in said(path)


def test_a_run_that_stopped_after_a_failure_is_named(store: Store, tmp_path: Path) -> None:
    store.run_control.set_setup("digits", {})
    store.run_control.stop_failed("digits", store.run_control.assign("digits") or "", "the engine failed 6 times")
    path = write_config(tmp_path)
    (warning,) = said(path, "warning")
    assert f"processes: no server uses the store {tmp_path / 'store'}" in said(path, "ok")
    assert warning.startswith("processes: run 'digits' stopped after a failure at 20")


def test_a_front_that_fails_does_not_listen(store: Store, tmp_path: Path) -> None:
    """Whoever else listens on its port."""
    with socket.create_server(("127.0.0.1", 0)) as taken, serve_lock.take(tmp_path / "store", ""):
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        path = write_config(tmp_path, listen=address)
        waits = "has failed 7 times without working for 10 s; last time, it cannot listen"
        ProcessFile(tmp_path / "store").write([ProcessState(FRONT, "", 4, 7, waits=waits)])
        process, ports = said(path)
    assert process.startswith(f"processes: the front {waits}, so no device can call")
    assert ports == f"ports: the front, which answers on {address}, has the problem above"


def test_what_a_hung_supervisor_wrote_of_the_front_is_not_told(store: Store, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken, serve_lock.take(tmp_path / "store", ""):
        path = write_config(tmp_path, listen=f"127.0.0.1:{taken.getsockname()[1]}")
        ProcessFile(tmp_path / "store").write([ProcessState(FRONT, "", 4, 7, waits="has failed 7 times")])
        os.utime(tmp_path / "store" / SUPERVISOR_FILE, (1e9, 1e9))
        (hangs,) = said(path)
        assert hangs.startswith("processes: the supervisor hangs")
        assert f"ports: the server listens on 127.0.0.1:{taken.getsockname()[1]}" in said(path, "ok")


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("[limit]\ndevices = 3\n[server]\nlisten_port = 5\n", ["[limit]: unknown section", "listen_port"]),
        ('[server]\nlisten = "127.0.0.1:50093"\nmetrics = "127.0.0.1:50093"\n', ["listen and metrics are both"]),
    ],
)
def test_doctor_finds_what_check_finds_in_settings(tmp_path: Path, text: str, named: list[str]) -> None:
    (tmp_path / "server.toml").write_text(text)
    found = "; ".join(said(tmp_path / "server.toml"))
    assert [name in found for name in named] == [True] * len(named), found


def test_a_store_that_the_pki_has_served_is_missed(tmp_path: Path) -> None:
    make_pki(tmp_path / "pki")
    serve_lock.note_served_store(tmp_path / "pki", tmp_path / "store")
    (error,) = said(write_config(tmp_path, pki=str(tmp_path / "pki")))
    assert error.startswith(f"store: there is no store in {tmp_path / 'store'}, but the PKI {tmp_path / 'pki'} has")


def test_server_holding_lock_without_listening_is_named(store: Store, tmp_path: Path) -> None:
    path = write_config(tmp_path)
    with serve_lock.take(tmp_path / "store", "digits"):
        (error,) = said(path)
        assert "processes: a server serves run 'digits'" in said(path, "ok")
    assert error.startswith("ports: the server does not listen on")


def test_server_listening_elsewhere_is_not_taken_for_this_port(store: Store, tmp_path: Path) -> None:
    """Another server's port accepts connections too."""
    with socket.create_server(("127.0.0.1", 0)) as another, socket.create_server(("127.0.0.1", 0)) as own:
        wanted, served = (f"127.0.0.1:{item.getsockname()[1]}" for item in (another, own))
        with serve_lock.take(tmp_path / "store", "digits"):
            (tmp_path / "store" / serve_lock.SERVED_FILE).write_text(f'[server]\nlisten = "{served}"\n')
            path = write_config(tmp_path, listen=wanted)
            expected = f'settings: the running server has [server] listen = "{served}", not "{wanted}"'
            assert any(warning.startswith(expected) for warning in said(path, "warning"))
            assert f"ports: the server listens on {served}" in said(path, "ok")


def test_expired_certificate_is_named_with_renewal_command(tmp_path: Path) -> None:
    authority = make_pki(tmp_path / "pki")
    authority.issue_server([], 1e-5)  # 0.9 s
    path = write_config(tmp_path, pki=str(tmp_path / "pki"), enrol_listen=f"127.0.0.1:{free_port()}")
    wait_until(lambda: said(path), "the certificate to expire")
    (error,) = said(path)
    assert error.startswith("TLS: the server's certificate expired on")
    assert "fleetdistill pki renew-server" in error


def test_clock_before_certificate_start_or_newest_row_is_named(store: Store, tmp_path: Path) -> None:
    make_pki(tmp_path / "pki")
    path = write_config(tmp_path, pki=str(tmp_path / "pki"), enrol_listen=f"127.0.0.1:{free_port()}")
    errors = said(path, clock=lambda: time.time() - 7200)
    assert [error.split(":")[0] for error in errors] == ["TLS", "TLS", "store"]
    assert all("clock" in error for error in errors)
    warnings = said(path, "warning", clock=lambda: time.time() + 15 * 86_400)
    assert any(warning.startswith("TLS: the server's certificate expires on") for warning in warnings)


def test_a_key_that_others_can_read_is_named(tmp_path: Path) -> None:
    make_pki(tmp_path / "pki")
    (tmp_path / "pki" / "ca-key.pem").chmod(0o644)
    path = write_config(tmp_path, pki=str(tmp_path / "pki"), enrol_listen=f"127.0.0.1:{free_port()}")
    (error,) = said(path)
    assert "other users can read the key" in error
    assert "ca-key.pem" in error


def test_a_missing_pki_and_plain_text_for_everyone_are_named(tmp_path: Path) -> None:
    (error,) = said(write_config(tmp_path, pki=str(tmp_path / "nowhere"), enrol_listen=f"127.0.0.1:{free_port()}"))
    assert "fleetdistill pki init" in error
    everyone = write_config(tmp_path, listen=f"0.0.0.0:{free_port()}")
    assert any("is not a loopback address" in error for error in said(everyone))
    assert said(everyone, insecure=True) == []


@pytest.mark.parametrize(
    ("changes", "setting"),
    [({"keep_free_bytes": 1 << 60}, "keep_free_bytes"), ({"disk_budget_bytes": 5_000_000}, "budget")],
)
def test_a_full_disk_is_named_with_the_limit(
    store: Store, tmp_path: Path, changes: dict[str, int], setting: str
) -> None:
    (tmp_path / "store" / "payload").write_bytes(bytes(5_000_000))
    (error,) = said(write_config(tmp_path, **changes))
    assert error.startswith("disk: ")
    assert setting in error
    assert "runs prune" in error


def test_the_running_server_is_judged_not_the_edited_file(store: Store, tmp_path: Path) -> None:
    (tmp_path / "store" / "payload").write_bytes(bytes(5_000_000))
    path = write_config(tmp_path, disk_budget_bytes=5_000_000)
    (tmp_path / "store" / serve_lock.SERVED_FILE).write_bytes(path.read_bytes())
    path.write_text(path.read_text().replace("_bytes = 5000000\n", "_bytes = 1000000000\n"))
    with serve_lock.take(tmp_path / "store", "digits"):
        (error,) = [item for item in said(path) if item.startswith("disk: ")]
        (warning,) = said(path, "warning")
    assert error.endswith(
        "exceeds [server] disk_budget_bytes = 5.00 MB; raise it, or run `fleetdistill runs prune RUN`"
    )
    had = "[server] disk_budget_bytes = 5000000, not 1000000000"
    assert warning == f"settings: the running server has {had}; restart it to change this"
    assert not [item for item in said(path) if item.startswith("disk: ")], "no server runs, so the file counts"


def test_the_server_of_another_run_does_not_use_this_file(store: Store, tmp_path: Path) -> None:
    path = write_config(tmp_path)
    with serve_lock.take(tmp_path / "store", "letters"):
        (tmp_path / "store" / serve_lock.SERVED_FILE).write_text('[server]\nlisten = "127.0.0.1:1"\n')
        assert not [item for item in said(path, "warning") if item.startswith("settings: ")]


def test_a_store_that_nearly_fills_its_budget_is_a_warning(store: Store, tmp_path: Path) -> None:
    store.close()
    (tmp_path / "store" / "payload").write_bytes(bytes(5_000_000))
    used = sum(path.stat().st_size for path in (tmp_path / "store").rglob("*") if path.is_file())
    path = write_config(tmp_path, disk_budget_bytes=used * 100 // 95)
    assert said(path) == []
    (warning,) = [item for item in said(path, "warning") if item.startswith("disk: ")]
    assert "which nearly fills [server] disk_budget_bytes = " in warning
    path = write_config(tmp_path, disk_budget_bytes=used * 2)
    assert not [item for item in said(path, "warning") if item.startswith("disk: ")]


def test_a_server_s_certificate_is_named_a_month_before_its_end(tmp_path: Path) -> None:
    """That of the CA, whose successor all devices have to get, three months before."""
    make_pki(tmp_path / "pki").issue_server([], 60.0)
    path = write_config(tmp_path, pki=str(tmp_path / "pki"), enrol_listen=f"127.0.0.1:{free_port()}")
    assert said(path, "warning") == []
    (warning,) = said(path, "warning", clock=lambda: time.time() + 31 * 86_400)
    assert warning.startswith("TLS: the server's certificate expires on")


def payload_file(tmp_path: Path) -> Path:
    (result,) = (tmp_path / "store" / "blobs").glob("??/*.safetensors")
    return result


def test_a_damaged_and_a_missing_payload_are_named_by_digest(store: Store, tmp_path: Path) -> None:
    path, file = write_config(tmp_path), payload_file(tmp_path)
    data = file.read_bytes()
    file.chmod(0o600)
    file.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    (error,) = said(path)
    assert error.startswith("store: ")
    assert file.stem in error
    assert said(path, quick=True) == []
    file.unlink()
    for quick in (False, True):
        (error,) = said(path, quick=quick)
        assert error.startswith(f"store: payload {file.stem} is missing")


def test_of_many_lost_payloads_five_are_named_and_all_counted(tmp_path: Path) -> None:
    opened = prepare_store(tmp_path / "store")
    number = open_round(opened, "a")
    for step in range(1, 8):
        write_asks(opened, number, "a", step_number=step, payload=make_payload(step))
    opened.close()
    for file in (tmp_path / "store" / "blobs").glob("??/*.safetensors"):
        file.unlink()
    *named, counted = said(write_config(tmp_path))
    assert ["is missing" in error for error in named] == [True] * 5
    assert counted == "store: 2 more payloads or checkpoints are missing or damaged"
    opened = Store.open(tmp_path / "store")
    states = [opened.blobs.put_state(bytes([number])) for number in range(9)]
    for state in states:
        opened.runs.close_round("digits", opened.runs.open_number("digits") or open_round(opened), state, [], {})
    opened.close()
    for state in states:
        (tmp_path / "store" / "blobs" / state.hex()[:2] / f"{state.hex()}.safetensors").unlink()
    assert "run 'digits' cannot go on from it" in said(write_config(tmp_path))[0], "the worst is first"


def test_a_lost_checkpoint_is_named_with_run_and_way_back(store: Store, tmp_path: Path) -> None:
    path, states = write_config(tmp_path), [store.blobs.put_state(content) for content in (b"one", b"two")]
    store.runs.set_keep_checkpoints("digits", 2)
    for state in states:
        store.runs.close_round("digits", store.runs.open_number("digits") or open_round(store), state, [], {})
    files = [tmp_path / "store" / "blobs" / state.hex()[:2] / f"{state.hex()}.safetensors" for state in states]
    files[1].unlink()
    lost = f"store: checkpoint {states[1].hex()} is missing; run 'digits' cannot go on from it"
    back = "`fleetdistill runs stop digits`, then `fleetdistill runs rollback digits --to 1` returns to the newest one"
    assert said(path, quick=True) == [f"{lost}: {back} before it"]
    files[0].unlink()
    assert sorted(said(path, quick=True)) == sorted(
        [
            f"{lost}: no intact earlier checkpoint is kept. Copy blobs/{states[1].hex()[:2]}/{states[1].hex()}"
            ".safetensors of a backup that has it into the store and run `fleetdistill runs start digits`; or restore "
            "a whole backup with `fleetdistill restore`",
            f"store: checkpoint {states[0].hex()} is missing; run 'digits' cannot be rolled back to round 1",
        ]
    )


@pytest.mark.parametrize("left", [100, 0.5])
def test_a_truncated_database_is_named_with_what_restores_it(store: Store, tmp_path: Path, left: float) -> None:
    path = write_config(tmp_path)
    store.close()
    file = tmp_path / "store" / "store.sqlite"
    data = file.read_bytes()
    file.write_bytes(data[: int(left if left > 1 else len(data) * left)])
    (error,) = said(path)
    assert error.startswith("store: ")
    assert "fleetdistill restore" in error or "damaged" in error


def test_a_store_of_another_version_is_named_and_not_migrated(store: Store, tmp_path: Path) -> None:
    path = write_config(tmp_path)
    store.close()
    with later_version():
        (warning,) = said(path, "warning")
    assert warning.startswith("store: an earlier version wrote the store")
    with later_version():
        Store.open(tmp_path / "store").close()
    before = digest(tmp_path / "store")
    (error,) = said(path)
    assert LATER in error
    assert "Upgrade fleetdistill" in error
    assert digest(tmp_path / "store") == before


@pytest.mark.long
def test_a_database_that_cannot_be_reached_is_named(tmp_path: Path) -> None:
    (tmp_path / "store").mkdir()
    (tmp_path / "store" / "location.toml").write_text("")
    path = write_config(tmp_path, database=f"postgresql://127.0.0.1:{free_port()}/none?connect_timeout=1")
    errors = said(path)
    assert [error.split(":")[0] for error in errors] == ["store"]


@pytest.mark.parametrize("served", [True, False])
def test_a_store_that_is_away_is_waited_for_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, served: bool) -> None:
    """The checks of processes and of the store read it; each wait would be five seconds."""
    opened = []

    def away(directory: Path, location: object) -> Any:
        opened.append(directory)
        raise StoreUnavailableError("the database is away")

    path = write_config(tmp_path)
    Store.open(tmp_path / "store").close()
    monkeypatch.setattr("fleetdistill_server.cli.server_checks.open_for_reading", away)
    with serve_lock.take(tmp_path / "store") if served else contextlib.nullcontext():
        errors = [error for error in said(path) if "the database is away" in error]
    assert [error.split(":")[0] for error in errors] == ["store"]
    assert len(opened) == 1


def test_command_names_wrong_settings_and_exits_with_1(tmp_path: Path) -> None:
    path = write_config(tmp_path)
    path.write_text(path.read_text().replace("[server]", "[server]\nlistne = 1"))
    done = CliRunner().invoke(app, ["doctor", str(path), "--json"])
    assert done.exit_code == 1
    result = json.loads(done.output)
    (error,) = [item for item in result if item["level"] == "error"]
    assert error["check"] == "settings"
    assert "listne" in error["text"]
    assert CliRunner().invoke(app, ["doctor"]).exit_code == 1


def test_a_server_toml_without_a_run_is_examined_too(tmp_path: Path) -> None:
    path = tmp_path / "server.toml"
    path.write_text(
        f'[server]\nlisten = "127.0.0.1:{free_port()}"\nstore = "{tmp_path / "store"}"\nkeep_free_bytes = 0\n'
    )
    done = CliRunner().invoke(app, ["doctor", str(path)])
    assert done.exit_code == 0, done.output
    assert "a server without a run" in done.output
