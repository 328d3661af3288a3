"""The command `fleetdistill device`: inspects and erases a state directory.

Needs only the SDK, and runs as `python -m fleetdistill.device` too. Exit statuses: 0 for success, 1 for an error, which
is printed as one sentence, and 2 for invalid usage.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from fleetdistill.errors import ConfigurationError, FleetDistillError, LinkError
from fleetdistill.printable import printable

if TYPE_CHECKING:
    from fleetdistill.device.inspection import Inspection

_ENTRIES = 10


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command; returns its exit status.

    Args:
        arguments: Arguments after `fleetdistill device`; None for those of this process.
    """
    parser = _parser()
    options = parser.parse_args(arguments)
    try:
        for line in options.run(options):
            print(line)
        sys.stdout.flush()
    except BrokenPipeError:  # the reader, such as `head`, has ended
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # the interpreter flushes once more
        return 0
    except FleetDistillError as error:
        print(f"error: {printable(str(error))}", file=sys.stderr)
        return 1
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="fleetdistill device", description="Inspects or erases a device.")
    commands = parser.add_subparsers(required=True, metavar="inspect | forget")
    inspecting = commands.add_parser(
        "inspect",
        help="show identity, model, rounds and what was sent",
        description="Shows what a state directory contains. Changes nothing, and works while the device runs.",
    )
    _add_directory(inspecting)
    inspecting.add_argument("--json", action="store_true", help="print JSON")
    inspecting.add_argument("--entries", type=int, default=_ENTRIES, metavar="N", help="newest messages to list (10)")
    inspecting.set_defaults(run=_inspect)
    forgetting = commands.add_parser(
        "forget",
        help="erase a state directory, and ask the server to delete the device's data",
        description="Asks the server to delete what the device has sent, then erases its state directory.",
    )
    _add_directory(forgetting)
    server = forgetting.add_mutually_exclusive_group()
    server.add_argument("--server", metavar="HOST:PORT", help="server of the run; by default the app's last one")
    server.add_argument("--local", action="store_true", help="only erase; do not ask the server")
    forgetting.add_argument("--insecure", action="store_true", help="allow plain text to another machine")
    forgetting.add_argument("--yes", action="store_true", help="do not ask for confirmation")
    forgetting.set_defaults(run=_forget)
    return parser


def _add_directory(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("state_dir", type=Path, metavar="STATE_DIR", help="Device(state_dir=...)")


# --- inspect


def _inspect(options: argparse.Namespace) -> Iterator[str]:
    from fleetdistill.device.inspection import inspect

    result = inspect(options.state_dir)
    if options.json:
        yield json.dumps({**asdict(result), "totals": asdict(result.ledger.totals)}, indent=1)
        return
    for name, value in _lines(result):
        yield f"{name:<14} {printable(str(value))}"
    entries = list(result.ledger.entries)[-options.entries :] if options.entries > 0 else []
    for entry in entries:
        columns = ", ".join(sorted({column for part in entry.columns.values() for column in part}))
        about = f"round {entry.round}, {entry.step}" if entry.round else f"{entry.samples} samples"
        receipt = entry.receipt or entry.code or entry.text
        yield printable(
            f"{_when(entry.time)}  {entry.kind:<8} {about}: {entry.bytes} bytes {columns} {entry.outcome} {receipt}"
        )


def _lines(found: Inspection) -> Iterator[tuple[str, object]]:
    totals = found.ledger.totals
    yield "device", f"{found.device or 'unknown'}, run {found.run or 'unknown'}, SDK {found.sdk or 'unknown'}"
    yield "model", f"{found.model or 'unknown'}, {found.parameters} parameters"
    size = found.files.get("model.onnx")
    yield "delivered", "no model.onnx yet" if size is None else f"model.onnx, {size} bytes"
    yield (
        "data",
        f"{found.samples} samples, version {found.data_version or 'unknown'}; allowed: "
        + (", ".join(found.allowed) or "unknown before the first check-in"),
    )
    yield "rounds", f"{found.rounds} rounds with a receipt; the last answer was of round {found.last_round}"
    if found.waiting is not None:
        yield "waiting", f"an answer of round {found.waiting[0]} has no receipt"
    messages = ", ".join(f"{kind} {count}" for kind, count in totals.messages.items())
    yield "sent", f"{totals.bytes} bytes; messages: {messages or 'none'}; receipts: {totals.receipts}"
    yield "columns sent", ", ".join(totals.columns) or "none"
    for month in found.ledger.months:
        yield f"  {month.month}", f"{month.bytes} bytes, {month.receipts} receipts"
    if found.releases:
        yield "privacy", f"epsilon {found.epsilon:.3g} spent in {found.releases} releases"
    for name in found.set_aside:
        yield "put aside", name
    if found.erasing:
        yield "erasing", "an erasure has begun; the next start completes it"
    for text in found.damage:
        yield "damaged", text


def _when(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(seconds))


# --- forget


def _forget(options: argparse.Namespace) -> Iterator[str]:
    from fleetdistill.device.inspection import inspect
    from fleetdistill.state.directory import erase_directory

    result = inspect(options.state_dir)
    _confirm(options, result.device)
    unknown = not result.run and not result.damage and not result.ledger.totals.messages
    recorded = False if options.local or unknown else _request(options)
    erase_directory(options.state_dir)
    kept = ", but its privacy ledger: releases stay spent" if result.releases else ""
    yield f"{options.state_dir}: the device is erased{kept}"
    if unknown:
        yield "the device has never checked in: no server has its data"
    elif recorded:
        yield (
            f"the server has recorded the request to delete the data of {result.device}: before the next round, or at "
            "once if the run is over. Nothing deletes them while only a front runs (serve --only front); then its "
            f"operator can run: {_operator_command(result.run, result.device)}"
        )
    else:
        command = _operator_command(result.run, result.device or "DEVICE")
        yield f"the server was not asked; its operator can run: {command}"


def _confirm(options: argparse.Namespace, device: str) -> None:
    """Raises ConfigurationError unless the user agrees."""
    if options.yes:
        return
    question = f"Erase device {device or 'unknown'} in {options.state_dir.absolute()} permanently? [y/N] "
    if not sys.stdin.isatty() or input(printable(question)).strip().lower() != "y":
        raise ConfigurationError("nothing was erased; answer y, or pass --yes")


def _request(options: argparse.Namespace) -> bool:
    """Asks the server to delete the device's data. Raises LinkError, with advice, if it is unavailable."""
    from fleetdistill.device.arguments import check_transport_security
    from fleetdistill.device.contact import open_link, request_forgetting
    from fleetdistill.device.identity import load_identity
    from fleetdistill.link.credentials import is_enrolled
    from fleetdistill.state.directory import Storage
    from fleetdistill.state.saved_profile import PROFILE

    with contextlib.ExitStack() as stack:
        storage = Storage(options.state_dir)
        stack.callback(storage.close)
        server = options.server or storage.load_identity().get("server")
        if server is None:
            raise ConfigurationError(
                f"{options.state_dir} names no server; pass --server HOST:PORT, or --local to only erase"
            )
        check_transport_security(server, options.insecure, is_enrolled(options.state_dir))
        identity = load_identity(storage, "", None)
        link = open_link(server, None, options.state_dir, identity.device)
        stack.callback(link.close)
        try:
            return request_forgetting(link, identity, accepted=storage.load(PROFILE) is not None)
        except LinkError as error:
            raise LinkError(
                f"{error}; nothing was erased. Try again later, pass --server HOST:PORT if it has another "
                "address, or --local to only erase"
            ) from error


def _operator_command(run: str, device: str) -> str:
    """Returns the command with which the server's operator deletes a device's data."""
    command = f"fleetdistill devices forget {run or 'RUN'} {device}"
    return command if run else f"{command}, with the run's name for RUN"
