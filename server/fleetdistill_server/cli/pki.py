"""`fleetdistill pki` and `fleetdistill enrol`: certificates for the server, operators, viewers and devices."""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from fleetdistill.errors import ConfigurationError, in_words
from fleetdistill.link.credentials import IDENTITY, write_private
from fleetdistill.names import NAME_RULE, is_name
from fleetdistill.printable import printable
from fleetdistill_server.cli.options import (
    DEFAULT_STORE,
    IdentityOption,
    JsonOption,
    ServerOption,
    StoreOption,
    parse_duration,
    report_errors,
    show,
)
from fleetdistill_server.operations.client import connect
from fleetdistill_server.operations.local_calls import noted
from fleetdistill_server.operations.source import LocalStore, create_noted_tokens, open_store
from fleetdistill_server.security.certificates import Role, check_hosts
from fleetdistill_server.security.pki import (
    PERSON_DAYS,
    SERVER_DAYS,
    Authority,
    forget_old_authority,
    make_authority,
    rotate_authority,
)
from fleetdistill_server.security.shut_out import check_rotation, is_last_operator, shut_out
from fleetdistill_server.security.tokens import state_of
from fleetdistill_server.service.enrol_port import enrol_port_for_tokens
from fleetdistill_server.service.serve_lock import serving
from fleetdistill_server.store.database import Row
from fleetdistill_server.store.location import has_store
from fleetdistill_server.store.store import Store
from fleetdistill_server.texts import when
from fleetdistill_server.views.runs import View
from fleetdistill_server.views.units import counted

pki_app = typer.Typer(help="Manages the server's certificate authority (CA).", no_args_is_help=True)

PkiOption = Annotated[Path, typer.Option("--pki", help="Directory of the PKI ([server] pki in run.toml).")]
RoleOption = Annotated[Role, typer.Option(metavar="operator|viewer", help="Role of the person.")]
DEFAULT_PKI = Path("fleetdistill-pki")


@pki_app.command("init")
@report_errors
def pki_init(
    pki: PkiOption = DEFAULT_PKI,
    names: Annotated[
        str,
        typer.Option(help="Host names and addresses of the server, separated by commas; localhost is always included."),
    ] = "",
    operator: Annotated[str, typer.Option(help="Name of the first operator.")] = "operator",
    days: Annotated[float, typer.Option(help="Validity of the server's certificate in days.")] = SERVER_DAYS,
) -> None:
    """Creates a CA, a server certificate and an operator. Example: fleetdistill pki init --names fleet.example.org"""
    check_hosts(_listed(names))
    _positive(days)
    folder = _folder(pki, Role.OPERATOR, operator)
    authority = make_authority(pki)
    authority.issue_server(_listed(names), days)
    authority.issue_person(Role.OPERATOR, operator, PERSON_DAYS, folder)
    typer.echo(f"{pki}: created a CA and the server's certificate, and the operator's identity in {folder}")
    typer.echo(f"keep {pki} private: anyone with its ca-key.pem can create identities of devices and operators")


@pki_app.command("issue")
@report_errors
def pki_issue(
    role: RoleOption,
    name: Annotated[str, typer.Option(help=f"Name of the person: {NAME_RULE}.")],
    pki: PkiOption = DEFAULT_PKI,
    days: Annotated[float, typer.Option(help="Validity of the certificate in days.")] = PERSON_DAYS,
    out: Annotated[Path | None, typer.Option(help="Output directory; default: PKI/ROLE-NAME.")] = None,
) -> None:
    """Creates an identity for an operator or viewer. Example: fleetdistill pki issue --role viewer --name alice"""
    folder = out or _folder(pki, role, name)
    if (folder / IDENTITY).exists():
        raise ConfigurationError(
            f"{folder} already contains an identity; choose another directory with --out, or delete this one. Its "
            "certificate stays valid until it expires or is revoked with `fleetdistill pki revoke`"
        )
    Authority(pki).issue_person(role, name, _positive(days), folder)
    typer.echo(f"{folder}: send this directory to {name} over a secure channel, for use with --identity")


@pki_app.command("renew-server")
@report_errors
def pki_renew_server(
    pki: PkiOption = DEFAULT_PKI,
    names: Annotated[
        str,
        typer.Option(help="Host names and addresses, separated by commas; default: those of the current certificate."),
    ] = "",
    days: Annotated[float, typer.Option(help="Validity of the certificate in days.")] = SERVER_DAYS,
) -> None:
    """Renews the server's certificate; a running server reloads it. Example: fleetdistill pki renew-server"""
    authority = Authority(pki)
    authority.issue_server(_listed(names) or authority.server_names(), _positive(days))
    typer.echo(f"{pki}: renewed the server's certificate; new connections use it")


@pki_app.command("rotate-ca")
@report_errors
def pki_rotate_ca(pki: PkiOption = DEFAULT_PKI) -> None:
    """Starts a CA rotation; the old CA is still accepted. Example: fleetdistill pki rotate-ca"""
    rotate_authority(pki)
    typer.echo(
        f"{pki}: the new CA signs certificates; the old one is still accepted. Run `fleetdistill pki forget-old-ca` "
        "when every device, operator and viewer has a new certificate"
    )


@pki_app.command("forget-old-ca")
@report_errors
def pki_forget_old_ca(
    pki: PkiOption = DEFAULT_PKI,
    store: StoreOption = DEFAULT_STORE,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask for confirmation.")] = False,
) -> None:
    """Completes a CA rotation: the old CA is no longer accepted. Example: fleetdistill pki forget-old-ca

    Lists the devices, operators and viewers who still have a certificate of the old CA and would be shut out.
    """
    check_rotation(pki)
    opened = open_store(store) if has_store(store) else None
    if opened is None:
        typer.echo(f"warning: there is no store in {store}, so its devices are not checked; set --store", err=True)
    out = shut_out(pki, opened)
    for line in out.lines():
        typer.echo(line)
    if not yes:
        typer.confirm("Stop accepting certificates of the old CA?", abort=True)
    forget_old_authority(pki)
    if opened is not None:
        with noted(opened, "ForgetOldCa", {"shut_out": out.names}):
            pass
    typer.echo(f"{pki}: only certificates of the new CA are accepted")


@pki_app.command("revoke")
@report_errors
def pki_revoke(
    role: RoleOption,
    name: Annotated[str, typer.Option(help="Name of the person.")],
    store: StoreOption = DEFAULT_STORE,
    pki: PkiOption = DEFAULT_PKI,
    reason: Annotated[str, typer.Option(help="Reason for the revocation, to be stored.")] = "",
    server: ServerOption = None,
    identity: IdentityOption = None,
    yes: Annotated[
        bool,
        typer.Option("--yes", help="Also revoke yourself, or the last operator in the PKI's directory."),
    ] = False,
) -> None:
    """Revokes an operator or viewer permanently. Example: fleetdistill pki revoke --role viewer --name alice"""
    if role is Role.DEVICE:
        raise ConfigurationError("--role is device; use `fleetdistill devices revoke` to revoke a device")
    if not is_name(name):
        raise ConfigurationError(f"--name is {name!r}, must be {NAME_RULE}")
    if server is not None:
        with connect(server, identity) as remote:
            changed = remote.revoke_person(role, name, reason, own=yes)
    else:
        warn_without_server(store)
        opened = open_store(store)
        if role is Role.OPERATOR and not yes and is_last_operator(pki, opened, name):
            raise ConfigurationError(
                f"{name!r} is the last operator in {pki} who is not revoked; create another one with "
                "`fleetdistill pki issue --role operator`, or confirm with --yes"
            )
        changed = LocalStore(store).revoke_person(role, name, reason)
    typer.echo(f"{role} {name!r} {'is revoked' if changed else 'was already revoked'}")
    if server is None and not (_folder(pki, role, name) / IDENTITY).exists():
        typer.echo(
            f"warning: {pki} contains no identity of {role} {name!r}, which may have been issued with --out; the name "
            "is revoked anyway. Check the name",
            err=True,
        )


@report_errors
def enrol(
    count: Annotated[int, typer.Option(help="Number of tokens, one per device; at most 10,000.")] = 1,
    expires: Annotated[str, typer.Option(help="Validity of the tokens, such as 24h, 30m or 7d.")] = "24h",
    run: Annotated[str, typer.Option(help="Restrict the devices to this run, which must exist in the store.")] = "",
    device: Annotated[
        list[str] | None,
        typer.Option(help="Create a token that only the device with this id can use; repeatable; excludes --count."),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(help="Output file, one token per line, readable only by you; default: print the tokens."),
    ] = None,
    list_: Annotated[
        bool, typer.Option("--list", help="List the existing tokens, with the beginning of their hash.")
    ] = False,
    revoke: Annotated[
        list[str] | None, typer.Option(help="Revoke the unused tokens whose hash begins with this; repeatable.")
    ] = None,
    store: StoreOption = DEFAULT_STORE,
    pki: PkiOption = DEFAULT_PKI,
    enrol_port: Annotated[
        int | None,
        typer.Option(help="Enrolment port that devices connect to; default: the port of the store's server."),
    ] = None,
    server: ServerOption = None,
    identity: IdentityOption = None,
    as_json: JsonOption = False,
) -> None:
    """Creates one-time enrolment tokens, shown only once. Example: fleetdistill enrol --count 100 --out tokens.txt"""
    if list_ or revoke:
        if server is not None:
            text = "--list and --revoke cannot be combined with --server; run them on the server's machine"
            raise ConfigurationError(text)
        _list_or_revoke(open_store(store), revoke or [], as_json)
        return
    _check_output(out)
    if device and count != 1:
        raise ConfigurationError("--device and --count cannot be combined; --device creates one token per device")
    seconds = parse_duration("--expires", expires)
    if server is not None:
        with connect(server, identity) as remote:
            made = remote.tokens(count, seconds, run, device or ())
    else:
        # Tokens can be created before the server's first start.
        given = (_port(enrol_port, store), count, seconds, run, device or ())
        made = create_noted_tokens(Store.open(store), Authority(pki), *given)
    _write_tokens(made, out)


def warn_without_server(directory: Path, run: str = "") -> None:
    """Warns if no server works on the store: revocations and started runs concern only the servers of their store.

    Args:
        directory: The store's directory.
        run: A run that was started; its server may serve only another one.
    """
    found = serving(directory)
    if found is not None:
        warn_of_other_run(found.run, run)
    else:
        text = f"warning: no server is running on the store {directory}; use --store to name your server's store"
        typer.echo(f"{text}, or start one with `fleetdistill serve`", err=True)


def warn_of_other_run(served: str, run: str) -> None:
    """Warns if a server serves only another run (`served`, empty for all runs) than the one that was started."""
    if run and served not in ("", run):
        text = f"warning: the server serves only run {printable(served)!r}, so run {run!r} waits for another server"
        typer.echo(f"{text}; `fleetdistill serve server.toml` serves all runs of the store", err=True)


def _list_or_revoke(store: Store, revoke: Sequence[str], as_json: bool) -> None:
    if not revoke:
        now = time.time()
        show(View({"tokens": [_token_row(row, now) for row in store.credentials.tokens()]}), as_json)
        return
    for prefix in revoke:
        if not re.fullmatch(r"[0-9a-f]{8,64}", prefix):
            text = "must be 8 to 64 lowercase hex digits; `fleetdistill enrol --list` shows the hashes"
            raise ConfigurationError(f"--revoke is {prefix!r}, {text}")
    with noted(store, "RevokeTokens", {"hashes": list(revoke)}) as result:
        result.text = f"{counted(sum(store.credentials.revoke_tokens(prefix) for prefix in revoke), 'token')} revoked"
    typer.echo(result.text)


def _token_row(row: Row, now: float) -> Row:
    return {
        "token": row["hash"].hex()[:16],
        "state": state_of(row, now),
        "run": row["run"],
        "for_device": row["for_device"],
        "device": row["device"] or "",
        "created": when(row["created_at"]),
        "expires": when(row["expires_at"]),
    }


def _check_output(out: Path | None) -> None:
    """Checks the output file before tokens are created, because tokens that cannot be written would be lost."""
    if out is not None and out.exists():
        raise ConfigurationError(
            f"{out} already exists and may contain unused tokens; choose another file with --out, or delete this one"
        )


def _write_tokens(tokens: list[str], out: Path | None) -> None:
    if out is None:
        typer.echo("\n".join(tokens))
        return
    try:
        write_private(out, "".join(f"{one}\n" for one in tokens).encode())
    except OSError as error:
        raise ConfigurationError(f"cannot write the tokens to {out}: {in_words(error)}; create new tokens") from error
    typer.echo(f"{out}: {counted(len(tokens), 'token')}, one per device")


def _folder(pki: Path, role: Role, name: str) -> Path:
    if not is_name(name):
        raise ConfigurationError(f"the name is {name!r}, must be {NAME_RULE}")
    return pki / f"{role}-{name}"


def _listed(names: str) -> list[str]:
    return [one.strip() for one in names.split(",") if one.strip()]


def _positive(days: float) -> float:
    if not 0 < days <= 36_500:
        raise ConfigurationError(f"--days is {days:g}, must be above 0 and at most 36500")
    return days


def _port(given: int | None, store: Path) -> int:
    """Returns the enrolment port to be written into tokens."""
    if given is not None:
        if not 1 <= given <= 65535:
            raise ConfigurationError(f"--enrol-port is {given}, must be 1 to 65535")
        return given
    return enrol_port_for_tokens(store)
