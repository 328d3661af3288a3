"""Who changed what: each change in its transaction, refused calls too, from elsewhere and beside the store."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from support.live_front import RUN, prepare_store
from support.processes import wait_until
from support.secured import device_credentials, make_pki, secured_front
from support.stores import IN_POSTGRES, place_store
from typer.testing import CliRunner

from fleetdistill.errors import LinkError, NoSpaceError, RefusedError, StoreError, StoreUnavailableError
from fleetdistill_server.cli.app import app
from fleetdistill_server.intake.operator_log import OperatorLog
from fleetdistill_server.operations.client import OperatorClient, connect
from fleetdistill_server.operations.source import LocalStore
from fleetdistill_server.security.certificates import Role, holder_of
from fleetdistill_server.security.pki import Authority, forget_old_authority, rotate_authority
from fleetdistill_server.service.creation import NewRun
from fleetdistill_server.store import operator_calls
from fleetdistill_server.store.database import Row
from fleetdistill_server.store.operator_calls import Call, Outcome
from fleetdistill_server.store.records import Certificate
from fleetdistill_server.store.states import RunStatus
from fleetdistill_server.store.store import Store


@dataclass
class Place:
    """A served store with a PKI, two operators and a viewer."""

    work: Path
    store: Store
    authority: Authority
    address: str

    def as_(self, who: str) -> list[str]:
        return ["--server", self.address, "--identity", str(self.work / "pki" / who)]

    def calls(self, **wanted: Any) -> list[Row]:
        return LocalStore(self.work / "store").operators(**wanted).lists["operators"]


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    authority = make_pki(tmp_path / "pki")
    for role, name in ((Role.OPERATOR, "olga"), (Role.OPERATOR, "otto"), (Role.VIEWER, "vera")):
        authority.issue_person(role, name, 1.0, tmp_path / "pki" / f"{role}-{name}")
    store = prepare_store(tmp_path / "store")
    with secured_front(tmp_path / "store", tmp_path / "pki") as front:
        yield Place(tmp_path, store, authority, f"127.0.0.1:{front.port}")
    store.close()


def run(*words: str, code: int = 0) -> str:
    done = CliRunner().invoke(app, list(words))
    assert done.exit_code == code, done.output
    return done.output


def test_remote_changes_are_stored_with_who_what_where_result(place: Place) -> None:
    there = place.as_("operator-olga")
    place.store.devices.register(RUN, "camera-7", b"", b"")
    run("devices", "revoke", "camera-7", "--reason", "stolen", *there)
    run("devices", "revoke", "camera-7", *there)
    tokens = run("enrol", "--count", "2", *there).split()
    run("runs", "cancel", RUN, "--yes", *there)
    result = place.calls()
    assert [(row["call"], row["result"]) for row in reversed(result)] == [
        ("RevokeDevice", "done"),
        ("RevokeDevice", "nothing to change"),
        ("CreateTokens", "done: 2 tokens"),
        ("ChangeRun", "done: run 'digits' is cancelled"),
    ]
    assert {(row["role"], row["name"]) for row in result} == {("operator", "olga")}
    assert all("127.0.0.1" in row["address"] for row in result)
    assert json.loads(result[-1]["arguments"]) == {"device": "camera-7", "reason": "stolen"}
    assert not any(token in json.dumps(result) for token in tokens)
    assert json.loads(run("operators", "--json", *there)) == result
    assert re.search(r"operator olga from 127\.0\.0\.1 +cancel a run +digits ", run("operators", *there))
    assert [row["call"] for row in json.loads(run("operators", "--call", "ChangeRun", "--json", *there))] == [
        "ChangeRun"
    ]
    assert "viewer 'vera' may not read the operators' calls; an operator may: use an operator's identity (--id" in run(
        "operators", *place.as_("viewer-vera"), code=1
    )


def test_refused_calls_are_stored_whoever_makes_them(place: Place) -> None:
    run("devices", "revoke", "camera-7", *place.as_("viewer-vera"), code=1)
    run("runs", "cancel", "nothing", "--yes", *place.as_("operator-olga"), code=1)
    wait_until(lambda: len(place.calls()) == 2, "both refusals")
    result = {row["name"]: row for row in place.calls()}
    assert result["vera"]["result"].startswith("refused: not-allowed: viewer 'vera' may not revoke a device; ")
    assert json.loads(result["vera"]["arguments"]) == {"device": "camera-7"}
    assert result["olga"]["result"].startswith("refused: unknown-run: ")
    assert place.store.credentials.revocations() == []


def test_deleting_an_unknown_run_is_stored_as_refused(place: Place) -> None:
    told = f"there is no run 'digts'; did you mean '{RUN}'? Runs in the store: {RUN}"
    for where, result in (
        (["--store", str(place.work / "store")], f"failed: {told}"),
        (place.as_("operator-olga"), f"refused: unknown-run: {told}"),
    ):
        before = len(place.calls())
        assert told in " ".join(run("runs", "delete", "digts", "--yes", *where, code=1).split())
        wait_until(lambda: len(place.calls()) > before, "the refusal")  # noqa: B023
        (row,) = place.calls()[: len(place.calls()) - before]
        assert (row["call"], row["result"]) == ("DeleteRun", result)


UNKNOWN: dict[str, Callable[[OperatorClient], object]] = {
    "start": lambda there: there.change("nothing", RunStatus.RUNNING),
    "pause": lambda there: there.change("nothing", RunStatus.PAUSED),
    "stop": lambda there: there.change("nothing", RunStatus.STOPPED),
    "cancel": lambda there: there.change("nothing", RunStatus.CANCELLED),
    "delete": lambda there: there.delete("nothing"),
    "roll back": lambda there: there.roll_back("nothing", 1),
    "forget": lambda there: there.forget("nothing", "camera-7"),
    "clone": lambda there: there.create(NewRun(settings={"run": {"name": "copy"}}, clone_of="nothing")),
}


@pytest.mark.parametrize("call", UNKNOWN)
def test_a_run_that_does_not_exist_has_a_code_of_its_own(place: Place, call: str) -> None:
    said = "there is no run 'nothing'; runs in the store: "
    with (
        connect(place.address, place.work / "pki" / "operator-olga") as there,
        pytest.raises(RefusedError, match=said) as refused,
    ):
        UNKNOWN[call](there)
    assert refused.value.code == "unknown-run"


def test_a_device_is_forgotten_from_another_machine(place: Place) -> None:
    """The front requests it, and whoever works on the run does it."""
    store, there = place.store, place.as_("operator-olga")
    store.devices.register(RUN, "camera-7", b"", b"")
    done = CliRunner().invoke(app, ["devices", "forget", RUN, "camera-7", *map(str, there)], input="n\n")
    assert (done.exit_code, "what device 'camera-7' has sent" in done.output) == (1, True)
    said = run("devices", "forget", RUN, "camera-7", "--yes", *there)
    assert (
        "camera-7 no longer takes part in run 'digits'; its data in the method's state and its payloads are deleted "
        in said
    )
    assert store.devices.to_forget(RUN) == ["camera-7"]
    store.devices.mark_forgotten(RUN, "camera-7")
    assert "its payloads are deleted. " in run("devices", "forget", RUN, "camera-7", "--yes", *there)
    said = run("devices", "forget", RUN, "camera-8", *there, code=1)
    assert "run 'digits' has no device 'camera-8'; did you mean 'camera-7'? `fleetdistill devices` lists them" in said
    result = [(row["call"], row["result"].partition(":")[0]) for row in reversed(place.calls())]
    assert result == [("ForgetDevice", "done"), ("ForgetDevice", "nothing to change"), ("ForgetDevice", "refused")]


def test_commands_beside_store_are_stored_with_local_user(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOGNAME", "root-of-this")
    here = ["--store", str(place.work / "store")]
    run("devices", "revoke", "camera-7", "--yes", *here)
    run("enrol", "--pki", str(place.work / "pki"), *here)
    run("devices", "forget", RUN, "nobody", *here, code=1)
    run("runs", "prune", RUN, "--dry-run", *here)
    run("runs", "prune", RUN, *here)
    run("runs", "cancel", RUN, "--yes", *here)
    result = place.calls()
    assert {(row["role"], row["name"], row["address"]) for row in result} == {("local", "root-of-this", "local")}
    assert [(row["call"], row["result"].partition(":")[0]) for row in reversed(result)] == [
        ("RevokeDevice", "done"),
        ("CreateTokens", "done"),
        ("ForgetDevice", "failed"),
        ("PruneRun", "done"),
        ("ChangeRun", "done"),
    ]


def test_a_change_and_its_call_are_one_transaction(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any, **__: Any) -> int:
        raise RuntimeError("the process ends here")

    monkeypatch.setattr(operator_calls.OperatorCalls, "add", fails)
    with pytest.raises(RuntimeError):
        LocalStore(place.work / "store").revoke("camera-7", "", confirmed=True)
    assert place.store.credentials.revocations() == []


def test_a_forgotten_ca_is_named_and_fills_no_record(place: Place) -> None:
    """As with a page of the dashboard that stays open: the connection outlives the end of the CA."""
    with connect(place.address, place.work / "pki" / "viewer-vera") as vera:
        assert vera.runs().lists["runs"]
        rotate_authority(place.work / "pki")
        forget_old_authority(place.work / "pki")
        text = "is of a CA that the server no longer accepts; ask for a new one"
        wait_until(lambda: text in said_to(vera), "the end of the old CA")
        assert all(text in said_to(vera) for _ in range(5))
    with connect(place.address, renewed(place)) as olga:
        wait_until(lambda: len(olga.operators().lists["operators"]) == 1, "the only line of the record")
    (row,) = place.calls()
    assert row["result"].startswith("refused: old-ca: the certificate of viewer 'vera' is of a CA that the server no")


def renewed(place: Place) -> Path:
    Authority(place.work / "pki").issue_person(Role.OPERATOR, "olga", 1.0, place.work / "olga")
    return place.work / "olga"


def said_to(there: OperatorClient) -> str:
    """Returns why a call fails; empty if it succeeds."""
    try:
        there.runs()
    except LinkError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("kind", ["files", IN_POSTGRES])
def test_refused_calls_displace_no_changes(
    request: pytest.FixtureRequest, tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    request.param = kind
    monkeypatch.setattr(operator_calls, "KEPT", 5)
    store = Store.open(place_store(request, tmp_path / "store"))
    calls = store.operator_calls
    for number in range(8):
        calls.add(Call("operator", "olga", "RevokeDevice", {"device": f"d{number}"}), "done")
    for _ in range(20):
        calls.add(Call("viewer", "vera", "ChangeRun"), "refused: not-allowed", refused=True)
    kept = calls.newest(before=None, call="", text="", most=100)
    assert [row.call for row in kept] == ["ChangeRun"] * 5 + ["RevokeDevice"] * 5
    assert [json.loads(row.arguments)["device"] for row in kept[5:]] == ["d7", "d6", "d5", "d4", "d3"]
    result = calls.newest(before=kept[5].id, call="", text="D5", most=100)
    assert [json.loads(row.arguments)["device"] for row in result] == ["d5"]
    store.close()


def test_a_person_is_revoked_from_elsewhere_at_its_next_call(place: Place) -> None:
    there = place.as_("operator-olga")
    with connect(place.address, place.work / "pki" / "viewer-vera") as vera:
        assert vera.runs().lists["runs"]
        assert "is revoked" in run("pki", "revoke", "--role", "viewer", "--name", "vera", *there)
        with pytest.raises(RefusedError, match="was revoked"):
            vera.runs()
    assert "already revoked" in run("pki", "revoke", "--role", "viewer", "--name", "vera", *there)
    assert place.calls()[-1]["call"] == "RevokePerson"


def test_an_operator_revokes_itself_only_with_yes(place: Place) -> None:
    there = place.as_("operator-olga")
    words = ["pki", "revoke", "--role", "operator", "--name", "olga"]
    assert "confirm it with --yes" in run(*words, *there, code=1)
    assert run("runs", "list", *there)
    run(*words, "--yes", *there)
    assert "was revoked" in run("runs", "list", *there, code=1)
    assert "may not revoke a person" in run(
        "pki", "revoke", "--role", "operator", "--name", "otto", *place.as_("viewer-vera"), code=1
    )


@pytest.mark.parametrize("answer", ["", "n\n"], ids=["nobody answers", "no"])
def test_a_question_without_a_yes_names_the_option(place: Place, answer: str) -> None:
    done = CliRunner().invoke(app, ["runs", "delete", RUN, "--store", str(place.work / "store")], input=answer)
    assert done.exit_code == 1
    assert done.stderr.splitlines()[-1] == (
        "error: not confirmed, so nothing was changed; --yes confirms it without a question"
    )
    assert place.store.runs.names() == [RUN]


def test_a_prune_from_elsewhere_says_where_it_works(place: Place) -> None:
    said = run("runs", "prune", RUN, *place.as_("operator-olga"), code=1)
    assert said.startswith("error: `runs prune` cannot be combined with --server; run it on the server's machine, ")


@pytest.mark.parametrize("loss", ["missing", "damaged"])
def test_a_run_whose_checkpoint_is_lost_is_not_started(place: Place, loss: str) -> None:
    here, there = ["--store", str(place.work / "store")], place.as_("operator-olga")
    store = place.store
    store.runs.set_keep_checkpoints(RUN, 2)
    states = [store.blobs.put_state(content) for content in (b"one", b"two")]
    for state in states:
        store.runs.close_round(RUN, store.runs.start_round(RUN, ["d1"]), state, [], {})
    run("runs", "stop", RUN, *here)
    file = place.work / "store" / "blobs" / states[1].hex()[:2] / f"{states[1].hex()}.safetensors"
    file.unlink()
    if loss == "damaged":
        file.write_bytes(b"other")
    back = f"`fleetdistill runs rollback {RUN} --to 1` returns to the newest one before it"
    for where in (here, there):
        said = run("runs", "start", RUN, *where, code=1)
        assert states[1].hex() in said
        assert back in said
    assert store.runs.existing(RUN).status == RunStatus.STOPPED
    assert [row["result"].partition(":")[0] for row in place.calls()[:2]] == ["refused", "failed"]


def test_the_last_operator_of_the_pki_is_revoked_only_with_yes(place: Place) -> None:
    here = ["--store", str(place.work / "store"), "--pki", str(place.work / "pki")]
    words = ["pki", "revoke", "--role", "operator", *here, "--name"]
    run(*words, "otto")
    assert "'olga' is the last operator" in run(*words, "olga", code=1)
    run(*words, "olga", "--yes")
    assert len(place.store.credentials.revocations()) == 2


def test_the_end_of_a_rotation_names_whom_it_shuts_out_and_asks(place: Place) -> None:
    for name in ("old", "renewed", "gone"):
        add_certificate(place, place.authority, name)
    place.store.credentials.revoke("device:gone", "")
    pki, here = place.work / "pki", ["--store", str(place.work / "store")]
    assert "only one CA" in run("pki", "forget-old-ca", "--pki", str(pki), *here, code=1)
    place.store.credentials.add_tokens({b"old": ""}, "", time.time() + 60)
    place.store.database.write("UPDATE tokens SET created_at = created_at - 10")
    new = rotate_authority(pki)
    place.store.credentials.add_tokens({b"new": ""}, "", time.time() + 60)
    add_certificate(place, new, "renewed")
    new.issue_person(Role.OPERATOR, "olga", 1.0, pki / "olga-again")
    before = (pki / "ca.pem").read_bytes()
    done = CliRunner().invoke(app, ["pki", "forget-old-ca", "--pki", str(pki), *here], input="n\n")
    assert done.exit_code == 1
    assert (pki / "ca.pem").read_bytes() == before
    assert "devices with a certificate of the old CA only, who will be shut out: 1: old\n" in done.output
    assert "shut out: 2: operator otto, viewer vera\n" in done.output
    assert "open enrolment tokens of the old CA, which will be revoked: 1\n" in done.output
    run("pki", "forget-old-ca", "--pki", str(pki), *here, "--yes")
    assert len((pki / "ca.pem").read_bytes()) < len(before)
    tokens = json.loads(run("enrol", "--list", "--json", *here[:2]))
    assert [token["state"] for token in tokens] == ["revoked", "open"]
    out = ["operator otto", "viewer vera", "device old"]
    assert json.loads(place.calls()[0]["arguments"]) == {"shut_out": out, "revoked_tokens": 1}


def test_what_is_done_with_the_pki_is_recorded(place: Place) -> None:
    here = ["--pki", str(place.work / "pki"), "--store", str(place.work / "store")]
    run("pki", "issue", "--role", "viewer", "--name", "ann", "--days", "2", *here)
    run("pki", "renew-server", "--days", "3", *here)
    run("pki", "rotate-ca", *here)
    told = [(call["call"], json.loads(call["arguments"])) for call in place.calls()[:3]]
    assert told == [
        ("RotateCa", {}),
        ("RenewServerCertificate", {"names": told[1][1]["names"], "days": 3.0}),
        ("IssuePerson", {"role": "viewer", "name": "ann", "days": 2.0}),
    ]
    assert "localhost" in told[1][1]["names"]
    assert all(call["result"] == "done" for call in place.calls()[:3])


def add_certificate(place: Place, authority: Authority, device: str) -> None:
    pem = device_credentials(authority, device).chain
    holder = holder_of(pem)
    assert holder is not None
    row: dict[str, Any] = {"serial": holder.serial, "public_key": holder.public_key, "pem": pem}
    # Certificates of the same second differ in the time at which they were issued.
    place.store.credentials.add_certificate(
        Certificate(**row, device=device, run="", issued_at=time.time(), expires_at=holder.expires_at)
    )


@pytest.mark.parametrize("kind", [StoreUnavailableError, NoSpaceError])
def test_call_that_the_store_cannot_take_is_not_stored(kind: type[StoreError]) -> None:
    attempts = []

    def commit(job: Callable[[Store], Any], /) -> Any:
        attempts.append(job)
        raise kind("the store is away")

    with pytest.raises(kind):
        OperatorLog(commit).commit(Call("operator", "olga", "ChangeRun"), lambda store: None, lambda done: Outcome())
    assert len(attempts) == 1
