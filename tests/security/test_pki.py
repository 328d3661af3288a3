"""The PKI's files, its commands, and what the server refuses without one."""

from __future__ import annotations

import json
import re
import stat
import subprocess
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from cryptography import x509
from cryptography.x509.oid import ExtendedKeyUsageOID
from support.live_front import RUN, prepare_store
from support.open_device import open_device
from support.processes import COMMAND, PATIENCE_SECONDS, children, wait_until
from support.secured import device_credentials, make_pki, secured_front
from typer.testing import CliRunner

from fleetdistill.errors import ConfigurationError
from fleetdistill.link.credentials import load_credentials
from fleetdistill.link.enrolment import PREFIX, read_token
from fleetdistill_server.cli.app import app
from fleetdistill_server.security.certificates import Role, holder_of
from fleetdistill_server.security.pki import Authority, forget_old_authority, make_authority, rotate_authority
from fleetdistill_server.service import serve_lock
from fleetdistill_server.store.store import Store

RUN_TOML = """
[run]
name = "checks"
[contract]
classes = 10
input_shape = [1, 8, 8]
[server]
listen = "{listen}"
store = "{store}"
pki = "{pki}"
enrol_listen = "127.0.0.1:0"
"""


def fleetdistill(*words: Any) -> Result:
    return CliRunner().invoke(app, [str(word) for word in words])  # type: ignore[return-value]


def done(*words: Any) -> str:
    result = fleetdistill(*words)
    assert result.exit_code == 0, result.stderr
    return result.stdout


def error_of(*words: Any) -> str:
    result = fleetdistill(*words)
    assert result.exit_code == 1, result.output
    return result.stderr


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def first_certificate(path: Path) -> x509.Certificate:
    return x509.load_pem_x509_certificates(path.read_bytes())[0]


# --- the files


def test_init_makes_all_server_files_readable_only_by_owner(tmp_path: Path) -> None:
    pki = tmp_path / "pki"
    done("pki", "init", "--pki", pki, "--names", "fleet.example.org, 192.0.2.7", "--operator", "olga")
    files = {path.relative_to(pki).as_posix(): mode(path) for path in pki.rglob("*") if path.is_file()}
    names = ["ca.pem", "ca-key.pem", "server.pem", "operator-olga/identity.pem", "operator-olga/ca.pem"]
    assert files == dict.fromkeys(names, 0o600)
    assert mode(pki) == 0o700
    server = first_certificate(pki / "server.pem")
    alternative = server.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert set(alternative.get_values_for_type(x509.DNSName)) == {"fleet.example.org", "localhost"}
    assert {str(item) for item in alternative.get_values_for_type(x509.IPAddress)} == {"192.0.2.7", "127.0.0.1"}
    holder = holder_of(load_credentials(pki / "operator-olga").chain)
    assert holder is not None
    assert (holder.role, holder.name) == (Role.OPERATOR, "olga")


def test_certificates_are_for_one_use_and_no_ca(tmp_path: Path) -> None:
    authority = make_pki(tmp_path / "pki")
    authority.issue_person(Role.VIEWER, "vera", 1.0, tmp_path / "vera")
    uses = {
        tmp_path / "pki" / "server.pem": ExtendedKeyUsageOID.SERVER_AUTH,
        tmp_path / "vera" / "identity.pem": ExtendedKeyUsageOID.CLIENT_AUTH,
    }
    for path, use in uses.items():
        certificate = first_certificate(path)
        assert list(certificate.extensions.get_extension_for_class(x509.ExtendedKeyUsage).value) == [use]
        assert not certificate.extensions.get_extension_for_class(x509.BasicConstraints).value.ca
        certificate.verify_directly_issued_by(first_certificate(tmp_path / "pki" / "ca.pem"))


def test_a_certificate_never_outlives_its_ca(tmp_path: Path) -> None:
    authority = make_authority(tmp_path / "pki", days=2.0)
    holder = holder_of(device_credentials(authority, "d1", days=30.0).chain)
    ca = first_certificate(tmp_path / "pki" / "ca.pem")
    assert holder is not None
    assert holder.expires_at == ca.not_valid_after_utc.timestamp()


def test_a_second_ca_in_one_directory_is_refused(tmp_path: Path) -> None:
    pki = tmp_path / "pki"
    done("pki", "init", "--pki", pki)
    before = {path: path.read_bytes() for path in pki.rglob("*") if path.is_file()}
    assert "already contains a CA" in error_of("pki", "init", "--pki", pki)
    assert {path: path.read_bytes() for path in pki.rglob("*") if path.is_file()} == before


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--names", "b\u00fccher.example"], "is not a host name or address"),
        (["--names", "a b"], "--names has 'a b', which is not a host name or address; expected host names and IP addr"),
        (["--names", "a.example,https://a.example:50051"], "--names has 'https://a.example:50051', which is not"),
        (["--names", "a.example:50051"], "--names has 'a.example:50051'"),
        (["--names", "a;b"], "separated by commas"),
        (["--names", "192.0.2.300"], "--names has '192.0.2.300'"),
        (["--names", "-a.example"], "--names has '-a.example'"),
        (["--names", "a..example"], "--names has 'a..example'"),
        (["--names", f"{'a' * 64}.example"], "is not a host name or address"),
        (["--operator", "../eve"], "must be 1 to 64 letters"),
        (["--days", "0"], "must be above 0"),
    ],
)
def test_wrong_options_of_init_leave_nothing_behind(tmp_path: Path, words: list[str], sentence: str) -> None:
    assert sentence in error_of("pki", "init", "--pki", tmp_path / "pki", *words)
    assert not (tmp_path / "pki").exists()


def test_names_of_a_renewed_certificate_are_checked(tmp_path: Path) -> None:
    pki = tmp_path / "pki"
    make_pki(pki)
    before = (pki / "server.pem").read_bytes()
    assert "--names has 'a b'" in error_of("pki", "renew-server", "--pki", pki, "--names", "a b")
    assert (pki / "server.pem").read_bytes() == before
    names = ["Fleet-1.example.org", "*.example.org", "my_server", "192.0.2.7", "2001:db8::1"]
    done("pki", "renew-server", "--pki", pki, "--names", ", ".join(names))
    told = CliRunner().invoke(app, ["pki", "renew-server", "--pki", str(pki), "--names", names[0]])
    assert f"renewed the server's certificate for {names[0]}" in told.stdout
    assert told.stderr.startswith(f"warning: devices that use {names[1]} or ")
    done("pki", "renew-server", "--pki", pki, "--names", ", ".join(names))
    assert set(names) <= set(Authority(pki).server_names())


def test_only_people_are_issued_certificates_by_hand(tmp_path: Path) -> None:
    make_pki(tmp_path / "pki")
    issue = ["pki", "issue", "--pki", tmp_path / "pki", "--name", "d1", "--role"]
    assert "devices create their own keys" in error_of(*issue, "device")
    done(*issue, "viewer")
    holder = holder_of(load_credentials(tmp_path / "pki" / "viewer-d1").chain)
    assert holder is not None
    assert holder.role is Role.VIEWER
    before = (tmp_path / "pki" / "viewer-d1" / "identity.pem").read_bytes()
    assert "already contains an identity; choose another directory with --out" in error_of(*issue, "viewer")
    assert (tmp_path / "pki" / "viewer-d1" / "identity.pem").read_bytes() == before
    rotate_authority(tmp_path / "pki")
    old = f"{tmp_path / 'pki' / 'viewer-d1'} contains an identity of another CA; delete this directory"
    assert old in error_of(*issue, "viewer")
    assert (tmp_path / "pki" / "viewer-d1" / "identity.pem").read_bytes() == before


def test_renewing_the_servers_certificate_keeps_its_names(tmp_path: Path) -> None:
    pki = tmp_path / "pki"
    done("pki", "init", "--pki", pki, "--names", "fleet.example.org")
    names, serial = Authority(pki).server_names(), first_certificate(pki / "server.pem").serial_number
    done("pki", "renew-server", "--pki", pki)
    assert Authority(pki).server_names() == names
    assert first_certificate(pki / "server.pem").serial_number != serial


def test_a_change_of_the_ca_is_begun_once_and_ended_once(tmp_path: Path) -> None:
    authority = make_pki(tmp_path / "pki")
    with pytest.raises(ConfigurationError, match="has only one CA"):
        forget_old_authority(tmp_path / "pki")
    rotate_authority(tmp_path / "pki")
    with pytest.raises(ConfigurationError, match="a CA rotation is in progress"):
        rotate_authority(tmp_path / "pki")
    forget_old_authority(tmp_path / "pki")
    assert Authority(tmp_path / "pki").der != authority.der
    assert not list((tmp_path / "pki").glob("link-*"))


@pytest.mark.parametrize("name", ["ca-key.pem", "ca.pem"])
def test_damaged_or_missing_file_gives_message_without_contents(tmp_path: Path, name: str) -> None:
    make_pki(tmp_path / "pki")
    path = tmp_path / "pki" / name
    path.write_text("secret words")
    with pytest.raises(ConfigurationError, match="is damaged, or is not a key or certificate of this PKI") as result:
        Authority(tmp_path / "pki")
    assert "secret words" not in str(result.value)
    path.unlink()
    with pytest.raises(ConfigurationError, match=rf"has no {name}; restore it from your copy of this directory"):
        Authority(tmp_path / "pki")
    with pytest.raises(ConfigurationError, match="create a PKI with `fleetdistill pki init"):
        Authority(tmp_path / "nowhere")


def test_a_lost_certificate_of_the_server_is_issued_again(tmp_path: Path) -> None:
    pki = tmp_path / "pki"
    make_pki(pki)
    (pki / "server.pem").unlink()
    again = rf"has no server.pem; issue it again with `fleetdistill pki renew-server --pki {pki} --names HOST`"
    assert re.search(again, error_of("serve", run_toml(tmp_path, "127.0.0.1:0", pki=str(pki))))
    assert re.search(again, error_of("pki", "renew-server", "--pki", str(pki)))
    done = CliRunner().invoke(app, ["pki", "renew-server", "--pki", str(pki), "--names", "fleet.example.org"])
    assert done.exit_code == 0, done.output
    assert "fleet.example.org" in Authority(pki).server_names()


def test_a_certificate_that_cannot_be_read_has_its_cause(tmp_path: Path) -> None:
    """A directory in its place stands for one of another user, which root may read."""
    pki = tmp_path / "pki"
    make_pki(pki)
    (pki / "server.pem").unlink()
    (pki / "server.pem").mkdir()
    said = error_of("serve", run_toml(tmp_path, "127.0.0.1:0", pki=str(pki)))
    assert "cannot read the server's certificate: Is a directory" in said
    assert "pki init" not in said


def test_a_key_of_another_ca_is_noticed(tmp_path: Path) -> None:
    make_pki(tmp_path / "a")
    make_pki(tmp_path / "b")
    (tmp_path / "a" / "ca-key.pem").write_bytes((tmp_path / "b" / "ca-key.pem").read_bytes())
    with pytest.raises(ConfigurationError, match=r"ca-key.pem is not the key of a certificate in ca.pem"):
        Authority(tmp_path / "a")


# --- tokens and revocations by command


def test_tokens_are_printed_once_listed_and_revoked(tmp_path: Path) -> None:
    make_pki(tmp_path / "pki")
    where = ["--store", tmp_path / "store", "--pki", tmp_path / "pki"]
    prepare_store(tmp_path / "store").close()  # the run that the tokens are for is there
    out = tmp_path / "tokens"
    done("enrol", *where, "--count", "100", "--expires", "2h", "--run", RUN, "--enrol-port", "6000", "--out", out)
    tokens = [read_token(line) for line in out.read_text().splitlines()]
    assert mode(out) == 0o600
    assert len({token.secret for token in tokens}) == 100
    assert {token.port for token in tokens} == {6000}
    listed = done("enrol", *where, "--list")
    assert "tokens (100)" in listed
    assert PREFIX not in listed
    some = re.findall(r"^ ([0-9a-f]{16}) ", listed, re.MULTILINE)
    assert done("enrol", *where, "--revoke", some[0]) == "1 token revoked\n"
    assert done("enrol", *where, "--revoke", some[0]) == "0 tokens revoked\n"
    assert done("enrol", *where, "--revoke", some[1], "--revoke", some[2]) == "2 tokens revoked\n"
    assert done("enrol", *where, "--enrol-port", "6000").startswith(PREFIX)
    before = out.read_text()
    assert f"{out} already exists and may contain unused tokens" in error_of("enrol", *where, "--out", out)
    assert out.read_text() == before
    assert len(json.loads(done("enrol", *where, "--list", "--json"))) == 101, "nothing was made"


def test_tokens_carry_the_port_that_the_front_took(tmp_path: Path) -> None:
    make_pki(tmp_path / "pki")
    prepare_store(tmp_path / "store").close()
    enrol = ["enrol", "--store", tmp_path / "store", "--pki", tmp_path / "pki"]
    assert "the enrolment port for the tokens is unknown; start the server first" in error_of(*enrol)
    assert read_token(done(*enrol, "--enrol-port", "6000").strip()).port == 6000
    with secured_front(tmp_path / "store", tmp_path / "pki") as front:
        beside = fleetdistill(*enrol)
        assert (read_token(beside.stdout.strip()).port, beside.stderr) == (front.enrol_port, "")
    assert read_token(done(*enrol).strip()).port == front.enrol_port, "and it is known afterwards"
    assert read_token(done(*enrol, "--enrol-port", "6000").strip()).port == 6000


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--count", "0"], "count is 0, must be 1 to 10000"),
        (["--count", "10001"], "must be 1 to 10000"),
        (["--expires", "soon"], "--expires is 'soon', expected a number followed by d, h or m"),
        (["--expires", "0h"], "must be above 0 and at most a year"),
        (["--expires", "400d"], "must be above 0 and at most a year"),
        (["--run", "a/b"], "run is 'a/b', must be 1 to 64 letters"),
        (["--enrol-port", "0"], "--enrol-port is 0, must be 1 to 65535"),
        (["--revoke", "zz"], "must be 8 to 64 lowercase hex digits"),
        (["--revoke", "0" * 16], "there is no token '0000000000000000'; `fleetdistill enrol --list` shows the hashes"),
        (["--server", "127.0.0.1:1"], "--server requires --identity DIR"),
        (["--server", "127.0.0.1:1", "--list"], "--list and --revoke cannot be combined with --server"),
        (["--server", "127.0.0.1:1", "--revoke", "0" * 16], "--list and --revoke cannot be combined with --server"),
    ],
)
def test_wrong_options_of_enrol_are_refused(tmp_path: Path, words: list[str], sentence: str) -> None:
    make_pki(tmp_path / "pki")
    Store.open(tmp_path / "store").close()
    port = () if "--enrol-port" in words else ("--enrol-port", "6000")
    assert sentence in error_of("enrol", "--store", tmp_path / "store", "--pki", tmp_path / "pki", *port, *words)


def test_devices_and_people_are_revoked_by_command(tmp_path: Path) -> None:
    store = prepare_store(tmp_path / "store")
    where = ["--store", tmp_path / "store"]
    store.devices.register(RUN, "d2", b"secret", b"")
    refused = fleetdistill("devices", "revoke", "d22", *where, "--reason", "stolen")
    assert refused.exit_code == 1
    assert "device 'd22' has never enrolled or checked in; did you mean 'd2'? `fleetdistill dev" in refused.stderr
    assert "confirm it with --yes" in refused.stderr
    assert store.credentials.revocations() == []
    first = fleetdistill("devices", "revoke", "d1", *where, "--reason", "stolen", "--yes")
    assert first.stdout == "device 'd1' is revoked\n"
    assert "no server is running on the store" in first.stderr
    assert "device 'd1' has never enrolled or checked in" in first.stderr
    lock = serve_lock.take(tmp_path / "store", RUN)
    assert fleetdistill("devices", "revoke", "d2", *where).stderr == "", "it is known, and its store is served"
    assert done("devices", "revoke", "d1", *where) == "device 'd1' was already revoked\n"
    make_pki(tmp_path / "pki").issue_person(Role.VIEWER, "vera", 1.0, tmp_path / "pki" / "viewer-vera")
    revoke = ["pki", "revoke", "--pki", tmp_path / "pki", "--role", "viewer", *where, "--name"]
    assert fleetdistill(*revoke, "vera").output == "viewer 'vera' is revoked\n"
    lock.close()
    wrong = fleetdistill(*revoke, "vear")
    assert wrong.exit_code == 1
    assert f"{tmp_path / 'pki'} contains no identity of viewer 'vear'; did you mean 'vera'? To rev" in wrong.stderr
    assert "confirm it with --yes" in wrong.stderr
    said = fleetdistill(*revoke, "vear", "--yes").stderr
    assert "contains no identity of viewer 'vear', which may have been issued with --out; the name is revoked" in said
    assert "viewer 'vear' was already revoked" in done(*revoke, "vear")
    subjects = {"device:d1": "stolen", "device:d2": "", "viewer:vera": "", "viewer:vear": ""}
    assert {revocation.subject: revocation.reason for revocation in store.credentials.revocations()} == subjects
    assert "must be 1 to 64 letters" in error_of("devices", "revoke", "../d1", *where)
    assert "use `fleetdistill devices revoke`" in error_of("pki", "revoke", "--role", "device", "--name", "d1", *where)
    store.close()


def test_an_operator_works_over_the_network_and_a_viewer_looks(tmp_path: Path) -> None:
    authority, store = make_pki(tmp_path / "pki"), prepare_store(tmp_path / "store")
    for role, name in ((Role.OPERATOR, "olga"), (Role.VIEWER, "vera")):
        authority.issue_person(role, name, 1.0, tmp_path / name)
    store.runs.start_round(RUN, ["d1"])
    store.devices.register(RUN, "d2-typ0", b"secret", b"")
    authority.issue_person(Role.VIEWER, "walt", 1.0, tmp_path / "pki" / "viewer-walt")
    with secured_front(tmp_path / "store", tmp_path / "pki") as front:
        here = ["--server", f"127.0.0.1:{front.port}", "--identity"]
        olga, vera = [*here, tmp_path / "olga"], [*here, tmp_path / "vera"]
        assert f'"run": "{RUN}"' in done("runs", "list", "--json", *vera)
        assert '"cohort": 1' in done("runs", "show", RUN, "--json", *vera)
        assert "viewer 'vera' may not revoke a device; an operator may" in error_of("devices", "revoke", "d1", *vera)
        assert "viewer 'vera' may not create enrolment tokens" in error_of("enrol", *vera)
        revoke_d1 = ("devices", "revoke", "d1", "--reason", "far away", "--yes", *olga)
        assert done(*revoke_d1) == "device 'd1' is revoked\n"
        mistyped = error_of("devices", "revoke", "d2-typo", *olga)
        assert "device 'd2-typo' has never enrolled or checked in; did you mean 'd2-typ0'? " in mistyped
        assert "confirm it with --yes" in mistyped
        unknown = fleetdistill("devices", "revoke", "d1-typo", "--yes", *olga)
        assert "device 'd1-typo' has never enrolled or checked in, and is revoked anyway" in unknown.stderr
        wrong_role = error_of("pki", "revoke", "--role", "operator", "--name", "walt", *olga)
        assert "contains no identity of operator 'walt', but of viewer 'walt'. To revoke" in wrong_role
        issued_elsewhere = ("pki", "revoke", "--role", "viewer", "--name", "vear", *olga)
        assert "the server's PKI contains no identity of viewer 'vear'. To revoke" in error_of(*issued_elsewhere)
        stranger = fleetdistill(*issued_elsewhere, "--yes")
        assert "the server's PKI contains no identity of viewer 'vear'" in stranger.stderr
        revoked = "device 'd1' was revoked, which is permanent; use another name"
        assert revoked in error_of("enrol", "--device", "d1", *olga)
        issue = ("pki", "issue", "--role", "viewer", "--name", "vear", "--pki", tmp_path / "pki")
        assert "viewer 'vear' was revoked" in error_of(*issue, "--store", tmp_path / "store")
        token = read_token(done("enrol", "--expires", "1m", *olga).strip())
        assert token.port == front.enrol_port
        assert "there is no run 'nope'" in error_of("runs", "show", "nope", *olga)
        assert "count is 0" in error_of("enrol", "--count", "0", *olga)
        rotate_authority(tmp_path / "pki")
        forget_old_authority(tmp_path / "pki")
        not_admitted = f"but accepts connections: it may not admit the certificate in {tmp_path / 'olga'} any more"
        assert not_admitted in error_of("runs", "list", *olga)
        assert not_admitted in error_of("health", olga[1], *olga[2:])
    assert {revocation.subject: revocation.reason for revocation in store.credentials.revocations()} == {
        "device:d1": "far away",
        "device:d1-typo": "",
        "viewer:vear": "",
    }
    assert "cannot be reached" in error_of("runs", "list", *olga)
    store.close()


@pytest.mark.parametrize("command", ["issue", "revoke"])
def test_help_offers_only_the_roles_of_people(command: str) -> None:
    shown = fleetdistill("pki", command, "--help").stdout
    assert ("operator|viewer" in shown, "device|" in shown) == (True, False)


def test_an_expired_certificate_of_an_operator_is_named(tmp_path: Path) -> None:
    make_pki(tmp_path / "pki").issue_person(Role.OPERATOR, "olga", 0.0, tmp_path / "olga")
    said = error_of("runs", "list", "--server", "127.0.0.1:1", "--identity", tmp_path / "olga")
    assert re.search(rf"your certificate in {tmp_path / 'olga'} expired at \d{{4}}-[-:TZ\d]+; ask for a new one", said)
    assert "`fleetdistill pki issue --role operator --name olga --out DIR`" in said


def test_a_server_without_a_port_is_refused(tmp_path: Path) -> None:
    said = error_of("runs", "list", "--server", "localhost", "--identity", tmp_path)
    assert "--server is 'localhost', expected host:port, such as localhost:50051" in said


# --- serve, and the SDK


def run_toml(folder: Path, listen: str, pki: str = "") -> Path:
    path = folder / "run.toml"
    path.write_text(RUN_TOML.format(listen=listen, store=folder / "store", pki=pki))
    return path


def test_serve_names_what_lacks_before_it_starts(tmp_path: Path) -> None:
    said = error_of("serve", run_toml(tmp_path, "0.0.0.0:0"))
    assert "is not a loopback address, and TLS is not configured" in said
    assert "fleetdistill pki init" in said
    said = error_of("serve", run_toml(tmp_path, "127.0.0.1:0", pki=str(tmp_path / "pki")))
    assert re.search(r"has no server\.pem; restore your copy .* Else create a PKI with `fleetdistill pki init ", said)
    assert not (tmp_path / "store").exists()


@pytest.mark.slow
def test_serve_speaks_tls_on_every_address_and_keeps_its_ports(tmp_path: Path) -> None:
    """The whole service, on an address that it would not use in plain text; its front is killed and comes back."""
    authority = make_pki(tmp_path / "pki")
    authority.issue_person(Role.VIEWER, "vera", 1.0, tmp_path / "vera")
    path = run_toml(tmp_path, "0.0.0.0:0", pki=str(tmp_path / "pki"))
    with subprocess.Popen(
        [*COMMAND, "serve", str(path)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        try:
            said = process.stdout.readline()
            port = int(re.findall(r":(\d+)", said)[0])
            assert re.search(r"devices enrol on 127\.0\.0\.1:\d+", said)
            viewer = ["runs", "list", "--server", f"127.0.0.1:{port}", "--identity", tmp_path / "vera"]
            assert "checks" in done(*viewer)
            (front,) = children(process.pid, "fleetdistill_server.front")
            subprocess.run(["kill", "-9", str(front)], check=True)
            wait_until(lambda: children(process.pid, "fleetdistill_server.front") not in ([], [front]), "a new front")
            wait_until(lambda: fleetdistill(*viewer).exit_code == 0, "the same port")
        finally:
            process.terminate()
            process.wait(PATIENCE_SECONDS)
            _, errors = process.communicate()
    assert "warning" not in errors


def test_the_sdk_refuses_plain_text_to_another_machine(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"192\.0\.2\.1:50051 is not on this machine.*Server\(enrolment="):
        open_device(server="192.0.2.1:50051", worker=lambda contract: None, state_dir=tmp_path)
