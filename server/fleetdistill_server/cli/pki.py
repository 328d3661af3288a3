"""`fleetdistill pki ...` and `enrol`: who may speak to the server."""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from fleetdistill.errors import ConfigurationError, in_words
from fleetdistill.link.credentials import IDENTITY, write_private
from fleetdistill.names import is_name
from fleetdistill_server.cli.options import (
    DEFAULT_STORE,
    IdentityOption,
    JsonOption,
    ServerOption,
    StoreOption,
    counted,
    one_sentence,
    open_store,
    seconds_of,
    show,
)
from fleetdistill_server.cli.remote import connect
from fleetdistill_server.config.tls import ENROL_PORT
from fleetdistill_server.security.certificates import Role, check_hosts
from fleetdistill_server.security.pki import (
    PERSON_DAYS,
    SERVER_DAYS,
    Authority,
    forget_old_authority,
    make_authority,
    rotate_authority,
)
from fleetdistill_server.security.tokens import create_tokens, state_of
from fleetdistill_server.service.enrol_port import known_enrol_port
from fleetdistill_server.service.serve_lock import served_run
from fleetdistill_server.store.database import Row
from fleetdistill_server.store.store import Store
from fleetdistill_server.views.runs import View, when

pki_app = typer.Typer(help="The server's certificate authority.", no_args_is_help=True)

PkiOption = Annotated[Path, typer.Option("--pki", help="Directory of the PKI, [server] pki in run.toml.")]
DEFAULT_PKI = Path("fleetdistill-pki")


@pki_app.command("init")
@one_sentence
def pki_init(
    pki: PkiOption = DEFAULT_PKI,
    names: Annotated[
        str, typer.Option(help="Host names and addresses of the server, separated by commas; localhost always is one.")
    ] = "",
    operator: Annotated[str, typer.Option(help="Name of the first operator.")] = "operator",
    days: Annotated[float, typer.Option(help="Life of the server's certificate, in days.")] = SERVER_DAYS,
) -> None:
    """Makes a CA, a server certificate, an operator's. Example: fleetdistill pki init --names fleet.example.org"""
    check_hosts(_listed(names))
    _positive(days)
    folder = _folder(pki, Role.OPERATOR, operator)
    authority = make_authority(pki)
    authority.issue_server(_listed(names), days)
    authority.issue_person(Role.OPERATOR, operator, PERSON_DAYS, folder)
    typer.echo(f"{pki}: a CA, the server's certificate, and the operator's identity in {folder}")
    typer.echo(f"keep {pki} to yourself: whoever has ca-key.pem can make devices and operators")


@pki_app.command("issue")
@one_sentence
def pki_issue(
    role: Annotated[Role, typer.Option(help="operator or viewer.")],
    name: Annotated[str, typer.Option(help="Whose: 1 to 64 letters, digits, '-', '_' or '.'.")],
    pki: PkiOption = DEFAULT_PKI,
    days: Annotated[float, typer.Option(help="Life of the certificate, in days.")] = PERSON_DAYS,
    out: Annotated[Path | None, typer.Option(help="Directory to write; PKI/ROLE-NAME by default.")] = None,
) -> None:
    """Makes the identity of a person. Example: fleetdistill pki issue --role viewer --name alice"""
    folder = out or _folder(pki, role, name)
    if (folder / IDENTITY).exists():
        raise ConfigurationError(
            f"{folder} has an identity already; name another directory with --out, or delete this one first (its "
            "certificate stays valid until it expires; `fleetdistill pki revoke` shuts its holder out)"
        )
    Authority(pki).issue_person(role, name, _positive(days), folder)
    typer.echo(f"{folder}: hand it to {name} over a safe way; it is used with --identity")


@pki_app.command("renew-server")
@one_sentence
def pki_renew_server(
    pki: PkiOption = DEFAULT_PKI,
    names: Annotated[str, typer.Option(help="As with init; by default those of the present certificate.")] = "",
    days: Annotated[float, typer.Option(help="Life of the certificate, in days.")] = SERVER_DAYS,
) -> None:
    """Makes a fresh server certificate; a running server takes it up. Example: fleetdistill pki renew-server"""
    authority = Authority(pki)
    authority.issue_server(_listed(names) or authority.server_names(), _positive(days))
    typer.echo(f"{pki}: the server's certificate is new; new connections get it")


@pki_app.command("rotate-ca")
@one_sentence
def pki_rotate_ca(pki: PkiOption = DEFAULT_PKI) -> None:
    """Begins a change of the CA; both are accepted. Example: fleetdistill pki rotate-ca"""
    rotate_authority(pki)
    typer.echo(
        f"{pki}: the new CA signs from now on and the old one is accepted; when every device has renewed its "
        "certificate and every person has a new one, end it with `fleetdistill pki forget-old-ca`"
    )


@pki_app.command("forget-old-ca")
@one_sentence
def pki_forget_old_ca(pki: PkiOption = DEFAULT_PKI) -> None:
    """Ends a change of the CA: the old one is no longer accepted. Example: fleetdistill pki forget-old-ca"""
    forget_old_authority(pki)
    typer.echo(f"{pki}: only certificates of the new CA are accepted")


@pki_app.command("revoke")
@one_sentence
def pki_revoke(
    role: Annotated[Role, typer.Option(help="operator or viewer.")],
    name: Annotated[str, typer.Option(help="Whose certificates.")],
    store: StoreOption = DEFAULT_STORE,
    pki: PkiOption = DEFAULT_PKI,
    reason: Annotated[str, typer.Option(help="Why; it stands in the store.")] = "",
) -> None:
    """Revokes a person, at their next call and for good. Example: fleetdistill pki revoke --role viewer --name alice"""
    if role is Role.DEVICE:
        raise ConfigurationError("devices are revoked with `fleetdistill devices revoke`")
    if not is_name(name):
        raise ConfigurationError(f"--name {name!r} must be 1 to 64 letters, digits, '-', '_' or '.'")
    warn_without_server(store)
    changed = open_store(store).credentials.revoke(f"{role}:{name}", reason)
    typer.echo(f"{role} {name!r} {'is revoked' if changed else 'was revoked before'}")
    if not (_folder(pki, role, name) / IDENTITY).exists():
        typer.echo(
            f"warning: {pki} knows no certificate of {role} {name!r}; the name is blocked all the same, but look "
            "whether it is the right one",
            err=True,
        )


@one_sentence
def enrol(
    count: Annotated[int, typer.Option(help="How many tokens, one for each device; at most 10,000.")] = 1,
    expires: Annotated[str, typer.Option(help="How long they are good for, such as 24h, 30m or 7d.")] = "24h",
    run: Annotated[str, typer.Option(help="Confine their devices to this run, which the store must have.")] = "",
    device: Annotated[
        list[str] | None,
        typer.Option(help="Make a token that only the device of this id can use, instead of --count; repeatable."),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="File to write them to, a line each, readable by you only; else printed.")
    ] = None,
    list_: Annotated[
        bool, typer.Option("--list", help="List the tokens instead, by the beginning of their hash.")
    ] = False,
    revoke: Annotated[
        list[str] | None, typer.Option(help="Revoke the unused tokens whose hash begins so instead; repeatable.")
    ] = None,
    store: StoreOption = DEFAULT_STORE,
    pki: PkiOption = DEFAULT_PKI,
    enrol_port: Annotated[
        int | None,
        typer.Option(help="Enrolment port as devices reach it; by default the one that the store's server took."),
    ] = None,
    server: ServerOption = None,
    identity: IdentityOption = None,
    as_json: JsonOption = False,
) -> None:
    """Makes one-time enrolment tokens, shown this once. Example: fleetdistill enrol --count 100 --out tokens.txt"""
    if list_ or revoke:
        if server is not None:
            text = "--list and --revoke work on a store of this machine, without --server: use them beside the server"
            raise ConfigurationError(text)
        _look_after_tokens(open_store(store), revoke or [], as_json)
        return
    _check_free(out)
    if device and count != 1:
        raise ConfigurationError("--device makes one token for each device; leave --count out")
    seconds = seconds_of("--expires", expires)
    if server is not None:
        with connect(server, identity) as remote:
            made = remote.tokens(count, seconds, run, device or ())
    else:
        # Tokens may be made before the first start of a server.
        given = (_port(enrol_port, store), count, seconds, run, device or ())
        made = create_tokens(Store.open(store), Authority(pki), *given)
    _hand_out(made, out)


def warn_without_server(directory: Path) -> None:
    """Revocations hold for the server of the very store that they stand in."""
    if served_run(directory) is None:
        typer.echo(f"warning: no server works on the store {directory}; if another one does, name its store", err=True)


def _look_after_tokens(store: Store, revoke: Sequence[str], as_json: bool) -> None:
    if not revoke:
        now = time.time()
        show(View({"tokens": [_token_row(row, now) for row in store.credentials.tokens()]}), as_json)
        return
    for prefix in revoke:
        if not re.fullmatch(r"[0-9a-f]{8,64}", prefix):
            text = "must be 8 to 64 hex digits; `fleetdistill enrol --list` shows them"
            raise ConfigurationError(f"--revoke {prefix!r} {text}")
    typer.echo(f"{counted(sum(store.credentials.revoke_tokens(prefix) for prefix in revoke), 'token')} revoked")


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


def _check_free(out: Path | None) -> None:
    """Before tokens are made that would have no place."""
    if out is not None and out.exists():
        raise ConfigurationError(
            f"{out} is there already and may hold tokens that nobody has used; name another file with --out, or "
            "delete this one"
        )


def _hand_out(tokens: list[str], out: Path | None) -> None:
    if out is None:
        typer.echo("\n".join(tokens))
        return
    try:
        write_private(out, "".join(f"{one}\n" for one in tokens).encode())
    except OSError as error:
        raise ConfigurationError(f"the tokens cannot be written to {out}: {in_words(error)}; make new ones") from error
    typer.echo(f"{out}: {counted(len(tokens), 'token')}, one for each device")


def _folder(pki: Path, role: Role, name: str) -> Path:
    if not is_name(name):
        raise ConfigurationError(f"the name {name!r} must be 1 to 64 letters, digits, '-', '_' or '.'")
    return pki / f"{role}-{name}"


def _listed(names: str) -> list[str]:
    return [one.strip() for one in names.split(",") if one.strip()]


def _positive(days: float) -> float:
    if not 0 < days <= 36_500:
        raise ConfigurationError(f"--days {days:g} must be above 0, and at most 36500")
    return days


def _port(given: int | None, store: Path) -> int:
    """The port that goes into tokens: devices have nowhere else to learn it."""
    if given is not None:
        if not 1 <= given <= 65535:
            raise ConfigurationError(f"--enrol-port {given} must be 1 to 65535")
        return given
    known = known_enrol_port(store)
    if known is None:
        text = f"no server of {store} has listened yet, so the tokens are for the enrolment port {ENROL_PORT}; with "
        typer.echo(f"warning: {text}another in [server] enrol_listen give it as --enrol-port", err=True)
    return ENROL_PORT if known is None else known
