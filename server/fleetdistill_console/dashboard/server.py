"""Starts the dashboard's process: checks where it may listen, and serves the pages until it is stopped.

The pages show a store, a server, or the run of a finished simulation with what only its report contains.
"""

from __future__ import annotations

import contextlib
import ipaddress
import json
import os
import socket
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from fleetdistill.errors import ConfigurationError
from fleetdistill_console.dashboard.board import Board, Feed
from fleetdistill_server.operations.client import open_source
from fleetdistill_server.operations.source import LocalStore, Source
from fleetdistill_server.store.states import RoundStatus
from fleetdistill_server.views.reading import Query
from fleetdistill_server.views.runs import TableRow, View

DEFAULT_PORT = 8090


def run_dashboard(
    store: Path,
    server: str | None,
    identity: Path | None,
    *,
    host: str,
    port: int,
    title: str,
    token_file: Path | None,
    names: Sequence[str],
    on_listening: Callable[[str], object],
) -> None:
    """Serves the pages until the process receives SIGINT or SIGTERM.

    Args:
        store: Directory of the store that is shown, unless `server` is given.
        server: host:port of the server that is shown, or None.
        identity: Directory with the identity for `server`.
        host: Address to listen on; without a server with TLS, a loopback address.
        port: Port to listen on; 0 for a free one.
        title: Title of every page.
        token_file: File with the token of whoever may open the pages; None for a new one.
        names: Further host names under which browsers open the pages.
        on_listening: Called with the address of the first page once it can be opened. The address contains the token
            unless that is in a file.

    Raises:
        ConfigurationError: There is no store in the directory, the identity or the token cannot be read, or the
            dashboard cannot listen on this address.
    """
    _check_host(host, server)
    with open_source(store, server, identity) as source, bind(host, port) as bound, _running(source) as feed:
        board = Board(feed, title, server or str(store.resolve()), server or "")
        _serve(board, bound, token_file, names, on_listening)


def show_simulation(out: Path, on_listening: Callable[[str], object]) -> None:
    """Serves the page of a finished simulation's run on a free loopback port, until SIGINT or SIGTERM.

    Args:
        out: The simulation's output directory.
        on_listening: Called with the address of the run's page, which contains the token.

    Raises:
        ConfigurationError: The directory does not contain a simulation with a report.
    """
    simulated = SimulatedRun(out)
    (run,) = simulated.runs().lists["runs"]
    with bind("127.0.0.1", 0) as bound, _running(simulated) as feed:
        board = Board(feed, "fleetdistill simulate", str(out.resolve()))
        _serve(board, bound, None, (), on_listening, f"runs/{run['run']}")


@contextlib.contextmanager
def _running(source: Source) -> Iterator[Feed]:
    feed = Feed(source)
    feed.start()
    try:
        yield feed
    finally:
        feed.stop()


def _check_host(host: str, server: str | None) -> None:
    name, _, port = host.rpartition(":")
    if name and ":" not in name and port.isdecimal():
        raise ConfigurationError(f"--listen is {host}, expected a host without a port: --listen {name} --port {port}")
    if server is None and not is_loopback(host):
        raise ConfigurationError(
            f"--listen is {host}, but a dashboard of a store may only listen on a loopback address such as 127.0.0.1, "
            "because it cannot tell who calls; use --server with an identity, or forward the port with ssh"
        )


def is_loopback(host: str) -> bool:
    """Returns whether an address can only be reached from this machine."""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def bind(host: str, port: int) -> socket.socket:
    """Returns a socket that listens on an address. Raises ConfigurationError if it cannot be."""
    bound = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        bound.bind((host, port))
        bound.listen()  # browsers wait from now on, even if they are faster than the start
    except OSError as error:
        bound.close()
        text = f"the dashboard cannot listen on {host}:{port} ({error.strerror})"
        raise ConfigurationError(f"{text}; choose another --port, or 0 for a free one") from error
    return bound


def _serve(
    board: Board,
    bound: socket.socket,
    token_file: Path | None,
    names: Sequence[str],
    on_listening: Callable[[str], object],
    path: str = "",
) -> None:
    with tempfile.TemporaryDirectory(prefix="fleetdistill-dashboard-") as own:
        os.environ["NICEGUI_STORAGE_PATH"] = own  # read on import; by default it would write to the working directory
        os.environ["MATPLOTLIB"] = "false"  # NiceGUI would import it
        from fleetdistill_console.dashboard import session, site

        host, port = bound.getsockname()[:2]
        shown = f"[{host}]" if ":" in host else host
        token = session.new_token() if token_file is None else session.read_token(token_file)
        address = f"http://{shown}:{port}/{path}" + (f"?token={token}" if token_file is None else "")
        access = session.Access(token, [shown, *names], port, board.problem_for_monitors)
        site.serve(board, bound, access, lambda: on_listening(address))


class SimulatedRun(LocalStore):
    """Reads a simulation's store; adds the accuracy of devices alone, and the classes of their training data.

    Args:
        out: The simulation's output directory.

    Raises:
        ConfigurationError: The directory does not contain a simulation with a report.
    """

    def __init__(self, out: Path) -> None:
        super().__init__(out / "work" / "store")
        try:
            self._report: dict[str, Any] = json.loads((out / "report.json").read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise ConfigurationError(f"{out} contains no report of a simulation; complete it with --resume") from error

    def read(self, query: Query) -> View:
        """Reads one view."""
        if query.view == "rounds":
            every = super().read(Query("rounds", query.run)).lists["rounds"]
            alone = with_alone(every, self._report["alone_accuracy_by_round"])
            return View({"rounds": [row for row in alone if row["round"] > query.after]})
        if query.view == "classes":
            return View(
                {"devices": training_classes(self._report["devices"])}, {"classes": self._report["class_names"]}
            )
        return super().read(query)


def with_alone(rounds: Sequence[TableRow], by_device: Mapping[str, Sequence[float]]) -> list[TableRow]:
    """Returns rounds with the mean accuracy of the devices that trained alone for as many rounds.

    Args:
        rounds: All rounds of the run.
        by_device: Accuracy after each round of local-only training, by device; empty without this control.
    """
    means = iter([fmean(rates) for rates in zip(*by_device.values(), strict=True)])
    return [
        {**row, "alone_accuracy": next(means, None) if row["status"] == RoundStatus.CLOSED else None} for row in rounds
    ]


def training_classes(devices: Sequence[TableRow]) -> list[TableRow]:
    """Returns the devices of a report as in the view `classes`."""
    return [
        {
            "device": device["name"],
            "split": "train",
            "counts": {str(label): count for label, count in enumerate(device["samples_by_class"]) if count},
        }
        for device in devices
    ]
