"""Checks a server or a device against the wire format."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from fleetdistill.errors import FleetDistillError
from fleetdistill_lab.conformance import RUN_TOML, ListeningServer, Report, check_server

_ANY_PORT = "127.0.0.1:0"


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the checks and prints them; returns 0 if all passed, 1 otherwise and 2 if they could not be run."""
    options = _parser().parse_args(arguments)
    if options.run_toml:
        print(RUN_TOML, end="")
        return 0
    try:
        report = _check(options)
    except FleetDistillError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 2
    print(report)
    return 0 if report.passed else 1


def _check(options: argparse.Namespace) -> Report:
    if options.server is not None:
        return check_server(options.server, options.seconds)
    server = ListeningServer(options.listen)
    print(f"listening on {server.address}", flush=True)
    return server.wait(options.seconds)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="fleetdistill conformance",
        description="Checks a server or a device against docs/reference/wire-format.md.",
    )
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("server", nargs="?", metavar="HOST:PORT", help="play devices against this server, in plain text")
    what.add_argument(
        "--listen",
        nargs="?",
        const=_ANY_PORT,
        metavar="HOST:PORT",
        help=f"play a server against a device; default {_ANY_PORT}, a free port",
    )
    what.add_argument("--run-toml", action="store_true", help="print the run that a server must serve")
    parser.add_argument("--seconds", type=float, default=300.0, help="maximum duration; default 300")
    return parser


if __name__ == "__main__":
    sys.exit(main())
