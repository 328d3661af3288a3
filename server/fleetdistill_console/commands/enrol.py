"""`fleetdistill enrol`: one-time tokens with which devices get their certificates."""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from fleetdistill.errors import ConfigurationError, in_words
from fleetdistill.link.credentials import write_private
from fleetdistill_console.tables import show
from fleetdistill_server.cli.options import (
    DEFAULT_STORE,
    IdentityOption,
    JsonOption,
    ServerOption,
    StoreOption,
    parse_duration,
    report_errors,
)
from fleetdistill_server.cli.pki import DEFAULT_PKI, PkiOption
from fleetdistill_server.intake.operator_log import local_call, local_log
from fleetdistill_server.operations.client import connect
from fleetdistill_server.operations.source import create_logged_tokens, open_store
from fleetdistill_server.security.pki import (
    Authority,
)
from fleetdistill_server.security.tokens import enrol_port_for_tokens, state_of
from fleetdistill_server.store.operator_calls import Outcome
from fleetdistill_server.store.records import Token
from fleetdistill_server.store.store import Store
from fleetdistill_server.texts import counted, when
from fleetdistill_server.views.runs import View


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
        arguments = (_port(enrol_port, store), count, seconds, run, device or ())
        made = create_logged_tokens(Store.open(store), Authority(pki), *arguments)
    _write_tokens(made, out)


def _list_or_revoke(store: Store, revoke: Sequence[str], as_json: bool) -> None:
    if not revoke:
        now = time.time()
        show(View({"tokens": [_token_row(token, now) for token in store.credentials.tokens()]}), as_json)
        return
    for prefix in revoke:
        if not re.fullmatch(r"[0-9a-f]{8,64}", prefix):
            text = "must be 8 to 64 lowercase hex digits; `fleetdistill enrol --list` shows the hashes"
            raise ConfigurationError(f"--revoke is {prefix!r}, {text}")
        if not any(token.hash.hex().startswith(prefix) for token in store.credentials.tokens()):
            raise ConfigurationError(f"there is no token {prefix!r}; `fleetdistill enrol --list` shows the hashes")
    text = local_log(store).commit(
        local_call("RevokeTokens", {"hashes": list(revoke)}),
        lambda store: f"{counted(sum(map(store.credentials.revoke_tokens, revoke)), 'token')} revoked",
        lambda text: Outcome(text=text),
    )
    typer.echo(text)


def _token_row(token: Token, now: float) -> dict[str, str]:
    return {
        "token": token.hash.hex()[:16],
        "state": state_of(token, now),
        "run": token.run,
        "for_device": token.for_device,
        "device": token.device or "",
        "created": when(token.created_at),
        "expires": when(token.expires_at),
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
        write_private(out, "".join(f"{token}\n" for token in tokens).encode())
    except OSError as error:
        raise ConfigurationError(f"cannot write the tokens to {out}: {in_words(error)}; create new tokens") from error
    typer.echo(f"{out}: {counted(len(tokens), 'token')}, one per device")


def _port(port: int | None, store: Path) -> int:
    """Returns the enrolment port to be written into tokens."""
    if port is not None:
        if not 1 <= port <= 65535:
            raise ConfigurationError(f"--enrol-port is {port}, must be 1 to 65535")
        return port
    return enrol_port_for_tokens(store)
