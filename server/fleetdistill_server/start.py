"""Entry point of the command `fleetdistill`; handles signals before the slow imports.

The commands of a device need only the SDK. They run without the extra `server`, as on a small computer.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Sequence
from importlib import import_module
from importlib.metadata import entry_points

from fleetdistill.version import VERSION

__all__ = ["INTERRUPTED", "ctrl_c_interrupts"]

INTERRUPTED = 130
"""Exit status that shells report for a program stopped by Ctrl-C."""
DEVICE_COMMANDS = {
    "device": ("fleetdistill.device.command", "Inspects or erases the state directory of a device."),
    "doctor": ("fleetdistill.device.doctor", "Finds out what is wrong with a device."),
    "health": ("fleetdistill_server.operations.health", "Exits with 0 if a server replies."),
}
"""Module with `main`, and description, of each command that needs only the SDK; see also `_ENTRY_POINTS`."""
_ENTRY_POINTS = "fleetdistill.device_commands"
"""Group of the entry points with further ones, which are a `main`; the docstring of its module is the description."""


def main() -> None:
    """Runs the command line; signals during the imports of `serve` end it in the same way as later ones.

    Until then nothing is begun, so the handlers end the process at once. An exception of theirs could be lost: Python
    discards what is raised in a callback of a weak reference, of which imports have many.
    """
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # its own lines would stand before the error message
    command, *words = sys.argv[1:] or [""]
    if command == "device" or (command == "doctor" and _names_state(words)):
        sys.exit(import_module(DEVICE_COMMANDS[command][0]).main(words))
    if command == "serve" and "--check" not in words:
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda signum, frame: os._exit(0))
    if command == "simulate" and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _not_begun)
    sys.path.append(os.getcwd())  # appended, so that local files do not shadow installed modules
    try:
        from fleetdistill_server.cli.app import app

        app()
    except KeyboardInterrupt:
        print("interrupted before anything was done; run the command again", file=sys.stderr)
        sys.exit(INTERRUPTED)
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("fleetdistill"):
            raise
        sys.exit(_run_without_server(command, words, error.name or str(error)))


def _names_state(words: Sequence[str]) -> bool:
    return any(word.partition("=")[0] == "--state" for word in words)


def _run_without_server(command: str, words: Sequence[str], package: str) -> int:
    """Runs a command where the extra `server` is not installed; returns the exit status."""
    commands = DEVICE_COMMANDS | {
        point.name: (point.module, (import_module(point.module).__doc__ or "").partition("\n")[0])
        for point in entry_points(group=_ENTRY_POINTS)
    }
    examines_server = command == "doctor" and any(not word.startswith("-") for word in words)
    if command in commands and not examines_server:
        status: int = import_module(commands[command][0]).main(words)
        return status
    if command == "--version":
        print(VERSION)
        return 0
    if command in ("", "--help"):
        print("Usage: fleetdistill COMMAND ...\n\nCommands of a device:")
        print("\n".join(f"  {name:<12} {text}" for name, (_, text) in commands.items()))
        print("\nThe commands of a server need the extra server, and simulate the extra sim:")
        print("  pip install 'fleetdistill[server]'   pip install 'fleetdistill[sim]'")
        return 0
    from fleetdistill_server.extras import missing_of_command

    print(f"error: {missing_of_command(command, package)}", file=sys.stderr)
    print(f"Commands that work without it: {', '.join(commands)}", file=sys.stderr)
    return 1


def _not_begun(number: int, frame: object) -> None:
    os.write(sys.stderr.fileno(), b"interrupted before the simulation started; run the command again\n")
    os._exit(INTERRUPTED)


def ctrl_c_interrupts() -> None:
    """Restores the default behaviour of Ctrl-C, which raises KeyboardInterrupt; SIGTERM does it too from now on."""
    if signal.getsignal(signal.SIGINT) is _not_begun:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if threading.current_thread() is threading.main_thread():  # no other one may set a handler
        signal.signal(signal.SIGTERM, signal.default_int_handler)
