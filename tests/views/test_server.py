"""The page of the server: its queue, and the certificates that somebody has to renew."""

from __future__ import annotations

import shutil
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support.secured import device_credentials, make_pki

from fleetdistill_server.config.server_config import ServerSection
from fleetdistill_server.security.certificates import Role, holder_of
from fleetdistill_server.security.pki import Authority, forget_old_authority, rotate_authority
from fleetdistill_server.security.revocation import is_last_operator, revoke_device, revoke_person
from fleetdistill_server.service import serve_lock
from fleetdistill_server.store.operator_calls import Call
from fleetdistill_server.store.records import Certificate
from fleetdistill_server.store.states import RunStatus
from fleetdistill_server.store.store import Store
from fleetdistill_server.views.health import disk_problems
from fleetdistill_server.views.reading import Query, read
from fleetdistill_server.views.results import backed_up
from fleetdistill_server.views.server import OF_FORGOTTEN_CA, server

DAY = 86_400.0


def test_the_queue_has_the_order_in_which_runs_get_engines(tmp_path: Path) -> None:
    store, clock = Store.open(tmp_path), [0.0]
    store.database.now = lambda: clock[0]
    for name in ("a", "b", "c", "over"):
        store.runs.begin(name, {})
    for name in ("c", "a", "b", "over"):
        clock[0] += 1
        store.run_control.set_setup(name, {})
        store.run_control.activate(name)
    store.runs.set_status("over", RunStatus.FINISHED, "")
    with serve_lock.take(tmp_path, "", 1):
        view = server(store, tmp_path)
    assert [row["run"] for row in view.lists["queue"]] == ["c", "a", "b"]
    assert [row["engine"] for row in view.lists["queue"]] == [True, False, False]
    assert view.facts["engines_at_once"] == 1
    store.close()


def test_backups_are_listed_without_refused_calls(tmp_path: Path) -> None:
    store = Store.open(tmp_path)
    call = Call("viewer", "vera", "BackUp")
    store.operator_calls.add(call, "done: 3 payloads")
    store.operator_calls.add(call, "failed: no space on the disk")
    for _ in range(20):
        store.operator_calls.add(call, "refused: FORBIDDEN: a viewer only reads", refused=True)
    store.operator_calls.add(call, "failed: FORBIDDEN: a viewer only reads", refused=True)
    listed = server(store, tmp_path).lists["backups"]
    assert [row["result"] for row in listed] == ["failed: no space on the disk", "done: 3 payloads"]
    store.close()


@pytest.mark.parametrize("how", ["another CA", "cut", "away"])
def test_a_certificate_that_does_not_fit_the_pki_is_a_problem(tmp_path: Path, how: str) -> None:
    for name in ("pki", "other"):
        make_pki(tmp_path / name)
    store = Store.open(tmp_path / "store")
    (tmp_path / "store" / serve_lock.SERVED_FILE).write_text(f'[server]\npki = "{tmp_path / "pki"}"\n')
    with serve_lock.take(tmp_path / "store", ""):
        assert server(store, tmp_path / "store").facts["problems"] == []
        path = tmp_path / "pki" / "server.pem"
        if how == "another CA":
            path.write_bytes((tmp_path / "other" / "server.pem").read_bytes())
        elif how == "cut":
            path.write_bytes(path.read_bytes()[:-100])
        else:
            path.unlink()
        (problem,) = server(store, tmp_path / "store").facts["problems"]
    assert problem.startswith("the server's certificate cannot be used, so no device can connect, or none after the")
    assert problem.endswith("or run `fleetdistill pki renew-server` if its CA is the right one")
    store.close()


def test_devices_of_another_ca_are_a_warning(tmp_path: Path) -> None:
    authority = make_pki(tmp_path / "pki")
    store = Store.open(tmp_path / "store")
    for number in range(7):
        add_device(store, authority, f"d{number}")
    (tmp_path / "store" / serve_lock.SERVED_FILE).write_text(f'[server]\npki = "{tmp_path / "pki"}"\n')
    assert server(store, tmp_path / "store").facts["warnings"] == []
    shutil.rmtree(tmp_path / "pki")
    make_pki(tmp_path / "pki")
    (warning,) = server(store, tmp_path / "store").facts["warnings"]
    assert warning.startswith(
        "7 devices cannot connect, with certificates of a CA that this PKI does not have (d0, d1,"
    )
    store.close()


def test_an_incomplete_backup_is_a_warning_until_a_complete_one(tmp_path: Path) -> None:
    store = Store.open(tmp_path)

    def warnings(result: str) -> list[str]:
        store.operator_calls.add(Call("local", "root", "BackUp"), result)
        return list(server(store, tmp_path).facts["warnings"])

    assert warnings(f"done: {backed_up(3, 9000, 0)}") == []
    (warning,) = warnings(f"done: {backed_up(3, 9000, 2)}")
    assert "is incomplete, with 2 payloads missing: keep the earlier ones" in warning
    assert warnings("failed: the disk is full") == [warning]
    assert warnings(f"done: {backed_up(3, 9000, 0)}") == []
    store.close()


def test_devices_that_need_no_certificate_are_not_shut_out(tmp_path: Path) -> None:
    """Revoked ones, and those whose runs are over or have forgotten them."""
    authority = make_pki(tmp_path / "pki")
    store = Store.open(tmp_path / "store")
    for run in ("over", "on"):
        store.runs.begin(run, {})
    for device, runs in {"a": ["over"], "b": ["over", "on"], "c": ["on"], "d": [], "e": []}.items():
        add_device(store, authority, device)
        for run in runs:
            store.devices.register(run, device, b"secret", b"")
    store.runs.set_status("over", RunStatus.FINISHED, "")
    store.devices.ask_to_forget("on", "c")
    revoke_device(store, "d", "lost")
    (tmp_path / "store" / serve_lock.SERVED_FILE).write_text(f'[server]\npki = "{tmp_path / "pki"}"\n')
    shutil.rmtree(tmp_path / "pki")
    make_pki(tmp_path / "pki")
    (warning,) = server(store, tmp_path / "store").facts["warnings"]
    assert "(b, e): enrol them again" in warning
    store.close()


def test_devices_are_listed_that_should_have_renewed(tmp_path: Path) -> None:
    """They renew at half of the validity: three quarters of it, whatever that is, is late."""
    store, now = Store.open(tmp_path), time.time()
    rest: dict[str, Any] = {"run": "", "public_key": b"", "pem": b""}
    for number, (device, begun, ends) in enumerate(
        [
            ("fresh-for-10-days", now - 4 * DAY, now + 6 * DAY),
            ("late-for-10-days", now - 8 * DAY, now + 2 * DAY),
            ("late-for-400-days", now - 310 * DAY, now + 90 * DAY),
            ("fresh-for-400-days", now - 200 * DAY, now + 200 * DAY),
            ("gone", now - 10 * DAY, now - 1.0),
            ("revoked", now - 10 * DAY, now - 1.0),
        ]
    ):
        store.credentials.add_certificate(
            Certificate(**rest, serial=str(number), device=device, issued_at=begun, expires_at=ends)
        )
    revoke_device(store, "revoked", "stolen")
    view = server(store, tmp_path)
    result = {row["device"]: row["state"] for row in view.lists["certificates"]}
    assert result == {"gone": "expired", "late-for-10-days": "expires soon", "late-for-400-days": "expires soon"}
    assert not view.facts["warnings"], "each device renews its own; nobody else has to"
    store.close()


def test_a_revoked_person_s_certificate_is_not_called_valid(tmp_path: Path) -> None:
    authority, store = make_pki(tmp_path / "pki"), Store.open(tmp_path / "store")
    for name in ("alice", "vera"):
        authority.issue_person(Role.VIEWER, name, 30.0, tmp_path / "pki" / f"viewer-{name}")
    (tmp_path / "store" / serve_lock.SERVED_FILE).write_text(f"[server]\npki = {str(tmp_path / 'pki')!r}\n")
    revoke_person(store, Role.VIEWER, "alice", "left")
    view = server(store, tmp_path / "store")
    result = {row["holder"]: row["state"] for row in view.lists["certificates"]}
    assert (result["viewer-alice"], result["viewer-vera"]) == ("revoked", "valid")
    assert not view.facts["warnings"]
    store.close()


def test_an_identity_of_a_forgotten_ca_is_not_called_valid(tmp_path: Path) -> None:
    """It was valid while both CAs were accepted. Nor does its operator count as one who is left."""
    pki, store = tmp_path / "pki", Store.open(tmp_path / "store")
    make_pki(pki).issue_person(Role.OPERATOR, "old", 30.0, pki / "operator-old")
    (tmp_path / "store" / serve_lock.SERVED_FILE).write_text(f"[server]\npki = {str(pki)!r}\n")

    def states() -> list[str]:
        rows = server(store, tmp_path / "store").lists["certificates"]
        return [row["state"] for row in rows if row["holder"].startswith("operator-")]

    rotate_authority(pki).issue_person(Role.OPERATOR, "new", 30.0, pki / "operator-new")
    assert states() == ["valid", "valid"]
    assert not is_last_operator(pki, store, "new")
    forget_old_authority(pki)
    assert states() == ["valid", "of a forgotten CA, not admitted"]
    assert is_last_operator(pki, store, "new")
    store.close()


def test_a_device_of_a_forgotten_ca_is_marked(tmp_path: Path) -> None:
    pki, store = tmp_path / "pki", Store.open(tmp_path / "store")
    authority = make_pki(pki)
    (tmp_path / "store" / serve_lock.SERVED_FILE).write_text(f"[server]\npki = {str(pki)!r}\n")
    store.runs.begin("digits", {})
    for name in ("old", "renewed"):
        store.devices.register("digits", name, b"", b"")
        add_device(store, authority, name)
    add_device(store, rotate_authority(pki), "renewed")

    def marks() -> tuple[list[str], list[tuple[str, str]]]:
        listed = read(store, tmp_path / "store", Query("devices")).lists["devices"]
        certificates = server(store, tmp_path / "store").lists["certificates"]
        return [row["certificate"] for row in listed], [
            (row["device"], row["state"]) for row in certificates if row["device"]
        ]

    assert marks() == (["", ""], [])
    forget_old_authority(pki)
    assert marks() == ([OF_FORGOTTEN_CA, ""], [("old", OF_FORGOTTEN_CA)])
    store.close()


def add_device(store: Store, authority: Authority, name: str) -> None:
    pem = device_credentials(authority, name).chain
    holder = holder_of(pem)
    assert holder is not None
    times = {"issued_at": time.time(), "expires_at": holder.expires_at}
    store.credentials.add_certificate(
        Certificate(serial=holder.serial, public_key=holder.public_key, pem=pem, device=name, run="", **times)
    )


def test_an_expired_certificate_of_the_server_is_a_problem(tmp_path: Path) -> None:
    """Nobody can connect, so it is no mere warning; an expired one of a person is."""
    authority, store = make_pki(tmp_path / "pki"), Store.open(tmp_path / "store")
    authority.issue_server([], 1e-9)
    authority.issue_person(Role.VIEWER, "vera", 1e-9, tmp_path / "pki" / "viewer-vera")
    (tmp_path / "store" / serve_lock.SERVED_FILE).write_text(
        f"[server]\npki = {str(tmp_path / 'pki')!r}\nenrol_listen = '127.0.0.1:0'\n"
    )
    with serve_lock.take(tmp_path / "store"):
        facts = server(store, tmp_path / "store").facts
    (problem,) = facts["problems"]
    assert problem.startswith("the certificate of the server has expired, so nobody can connect; renew it with")
    assert facts["warnings"] == [
        "the certificate of viewer-vera has expired; issue another with `fleetdistill pki issue`"
    ]
    store.close()


def test_the_limits_of_the_disk_are_those_that_the_server_has(tmp_path: Path) -> None:
    store = Store.open(tmp_path)
    (tmp_path / serve_lock.SERVED_FILE).write_text("[server]\nkeep_free_bytes = 3\ndisk_budget_bytes = 5000000\n")
    facts = server(store, tmp_path).facts
    assert (facts["keep_free"], facts["disk_budget"]) == (3, 5_000_000)
    store.close()


def test_space_that_is_free_counts_not_the_size_of_the_disk(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    usage = SimpleNamespace(total=9_000, used=6_000, free=2_000)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    section = ServerSection(keep_free_bytes=3_000)
    (text,) = disk_problems(section, tmp_path / "not" / "yet")
    assert text.startswith(f"only 2.0 kB are free at {tmp_path}, so uploads are refused")
    assert disk_problems(ServerSection(keep_free_bytes=2_000), tmp_path) == []


def test_the_disk_has_what_the_store_takes_and_what_is_free(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = Store.open(tmp_path)
    (tmp_path / serve_lock.SERVED_FILE).write_text("[server]\n")
    (tmp_path / "blobs" / "more").write_bytes(b"." * 50_000)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=7 if Path(path) == tmp_path else 8))
    facts = server(store, tmp_path).facts
    sizes = [path.stat().st_size for path in tmp_path.rglob("*") if path.is_file()]
    assert (facts["disk_free"], facts["disk_used"]) == (7, sum(sizes))
    store.close()
