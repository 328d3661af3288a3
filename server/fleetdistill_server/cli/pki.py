"""`fleetdistill pki`: certificates for the server, operators and viewers."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from fleetdistill.errors import ConfigurationError
from fleetdistill.link.credentials import IDENTITY
from fleetdistill.names import NAME_RULE, is_name
from fleetdistill.printable import printable
from fleetdistill_server.cli.options import (
    DEFAULT_STORE,
    IdentityOption,
    ServerOption,
    StoreOption,
    report_errors,
)
from fleetdistill_server.intake.operator_log import local_call
from fleetdistill_server.operations.client import connect
from fleetdistill_server.operations.source import LocalStore, open_store
from fleetdistill_server.security.certificates import Role, check_hosts
from fleetdistill_server.security.pki import (
    PERSON_DAYS,
    SERVER_DAYS,
    Authority,
    forget_old_authority,
    make_authority,
    rotate_authority,
)
from fleetdistill_server.security.revocation import (
    check_known_person,
    check_not_revoked,
    check_rotation,
    has_person,
    is_last_operator,
    is_of_old_ca,
    shut_out,
)
from fleetdistill_server.service.serve_lock import serving
from fleetdistill_server.store.location import has_store
from fleetdistill_server.store.operator_calls import Outcome
from fleetdistill_server.views.health import problems_of_processes

__all__ = ["DEFAULT_PKI", "PkiOption", "warn_of_other_run", "warn_without_server"]

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
    check_hosts(_list_names(names))
    _positive(days)
    folder = _folder(pki, Role.OPERATOR, operator)
    authority = make_authority(pki)
    authority.issue_server(_list_names(names), days)
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
    store: StoreOption = DEFAULT_STORE,
) -> None:
    """Creates an identity for an operator or viewer. Example: fleetdistill pki issue --role viewer --name alice"""
    folder = out or _folder(pki, role, name)
    if has_store(store):
        check_not_revoked(open_store(store), role, name)
    if (folder / IDENTITY).exists():
        if is_of_old_ca(pki, folder / IDENTITY):
            raise ConfigurationError(
                f"{folder} contains an identity of another CA; delete this directory and repeat the "
                "command, or choose another one with --out"
            )
        raise ConfigurationError(
            f"{folder} already contains an identity; choose another directory with --out, or delete this one. Its "
            "certificate stays valid until it expires or is revoked with `fleetdistill pki revoke`"
        )
    Authority(pki).issue_person(role, name, _positive(days), folder)
    _record(store, "IssuePerson", {"role": role, "name": name, "days": days})
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
    store: StoreOption = DEFAULT_STORE,
) -> None:
    """Renews the server's certificate; a running server reloads it. Example: fleetdistill pki renew-server"""
    authority = Authority(pki)
    try:
        before = authority.server_names()
    except ConfigurationError:  # a damaged certificate is replaced, if the names are given
        if not names:
            raise
        before = []
    renewed = _list_names(names) or before
    authority.issue_server(renewed, _positive(days))
    _record(store, "RenewServerCertificate", {"names": renewed, "days": days})
    now = authority.server_names()
    typer.echo(f"{pki}: renewed the server's certificate for {', '.join(now)}; new connections use it")
    if lost := [name for name in before if name not in now]:
        typer.echo(f"warning: devices that use {' or '.join(lost)} cannot connect any more", err=True)


@pki_app.command("rotate-ca")
@report_errors
def pki_rotate_ca(pki: PkiOption = DEFAULT_PKI, store: StoreOption = DEFAULT_STORE) -> None:
    """Starts a CA rotation; the old CA is still accepted. Example: fleetdistill pki rotate-ca"""
    rotate_authority(pki)
    _record(store, "RotateCa", {})
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

    Lists the devices, operators and viewers who still have a certificate of the old CA and would be shut out. Revokes
    the open enrolment tokens that contain the old CA.
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
    tokens = 0 if opened is None else opened.credentials.revoke_open_tokens(Authority(pki).created_at)
    _record(store, "ForgetOldCa", {"shut_out": out.names, "revoked_tokens": tokens})
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
        typer.Option("--yes", help="Also revoke yourself, the PKI's last operator, or a person unknown to the PKI."),
    ] = False,
) -> None:
    """Revokes an operator or viewer permanently. Example: fleetdistill pki revoke --role viewer --name alice"""
    if role is Role.DEVICE:
        raise ConfigurationError("--role is device; use `fleetdistill devices revoke` to revoke a device")
    if not is_name(name):
        raise ConfigurationError(f"--name is {name!r}, must be {NAME_RULE}")
    if server is not None:
        with connect(server, identity) as remote:
            revoked = remote.revoke_person(role, name, reason, confirmed=yes)
        known = revoked.known
    else:
        warn_without_server(store)
        opened = open_store(store)
        if role is Role.OPERATOR and not yes and is_last_operator(pki, opened, name):
            raise ConfigurationError(
                f"{name!r} is the last operator in {pki} who is not revoked; create another one with "
                "`fleetdistill pki issue --role operator`, or confirm with --yes"
            )
        if not yes:
            check_known_person(opened, pki, role, name, str(pki))
        revoked = LocalStore(store).revoke_person(role, name, reason)
        known = has_person(pki, role, name)
    typer.echo(f"{role} {name!r} {'is revoked' if revoked.changed else 'was already revoked'}")
    if not known:
        place = pki if server is None else "the server's PKI"
        typer.echo(
            f"warning: {place} contains no identity of {role} {name!r}, which may have been issued with --out; the "
            "name is revoked anyway, permanently. Check the name",
            err=True,
        )


def _record(store: Path, call: str, arguments: Mapping[str, Any]) -> None:
    """Records what was done with the PKI beside the operators' calls, if there is a store yet."""
    if has_store(store):
        open_store(store).operator_calls.add(local_call(call, arguments), Outcome().words)


def warn_without_server(directory: Path, run: str = "") -> None:
    """Warns if no server works on the store: revocations and started runs concern only the servers of their store.

    Args:
        directory: The store's directory.
        run: A run that was started; its server may serve only another one.
    """
    served_now = serving(directory)
    if served_now is not None:
        warn_of_other_run(served_now.run, run)
        for problem in problems_of_processes(directory):
            typer.echo(f"warning: {problem}", err=True)
    else:
        text = f"warning: no server is running on the store {directory}; use --store to name your server's store"
        typer.echo(f"{text}, or start one with `fleetdistill serve`", err=True)


def warn_of_other_run(served: str, run: str) -> None:
    """Warns if a server serves only another run (`served`, empty for all runs) than the one that was started."""
    if run and served not in ("", run):
        text = f"warning: the server serves only run {printable(served)!r}, so run {run!r} waits for another server"
        typer.echo(f"{text}; `fleetdistill serve server.toml` serves all runs of the store", err=True)


def _folder(pki: Path, role: Role, name: str) -> Path:
    if not is_name(name):
        raise ConfigurationError(f"the name is {name!r}, must be {NAME_RULE}")
    return pki / f"{role}-{name}"


def _list_names(names: str) -> list[str]:
    return [item.strip() for item in names.split(",") if item.strip()]


def _positive(days: float) -> float:
    if not 0 < days <= 36_500:
        raise ConfigurationError(f"--days is {days:g}, must be above 0 and at most 36500")
    return days
