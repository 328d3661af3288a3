"""Prints the files of one round in the order in which they are needed, from a round that runs.

    python tools/paths.py            prints the table of docs/explanation/architecture.md
    python tools/paths.py --write    writes it there

A file is on the path if one of its functions has called the function of a moment below, directly or not, or if it
belongs to the method and runs. Files of the lab, which only drive the simulation, are left out.
"""

from __future__ import annotations

import argparse
import importlib
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any
from unittest.mock import patch

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "explanation" / "architecture.md"
BEGIN, END = "<!-- made by tools/paths.py -->", "<!-- end -->"
PACKAGES = {ROOT / "client_sdk" / "fleetdistill": "device", ROOT / "server" / "fleetdistill_server": "server"}
"""Folders that paths are relative to, and where their code runs."""
SIZE: dict[str, Any] = {"devices": 2, "rounds": 1, "train_limit": 100, "test_limit": 50}
METHODS = "fleetdistill/methods/", "fleetdistill_server/methods/"


@dataclass(frozen=True)
class Moment:
    """A moment of a round: what happens, and the function that is called then, as `module:Class.function`."""

    text: str
    function: str


OF_THE_METHOD = "the method's own files, of both halves"
MOMENTS = (
    Moment("the engine opens a round", "fleetdistill_server.store.runs:Runs.start_round"),
    Moment("the server half asks the devices; an ask is stored for each", "fleetdistill_server.store.asks:Asks.add"),
    Moment("a device receives its ask", "fleetdistill_server.intake.device_api:DeviceApi.next_ask"),
    Moment("it downloads the ask's payload", "fleetdistill.link.downloads:Downloads.fetch"),
    Moment("the device half computes an answer", "fleetdistill.methods.base:DeviceMethod.handle"),
    Moment("the answer is written to the outbox", "fleetdistill.state.outbox:Outbox.put"),
    Moment("it is uploaded and committed; a receipt returns", "fleetdistill_server.store.asks:Asks.accept_upload"),
    Moment("the device's new state takes effect", "fleetdistill.state.outbox:Outbox.promote"),
    Moment("the app's model is replaced", "fleetdistill.device.deployer:Deployer.deliver"),
    Moment("the engine commits checkpoint and round", "fleetdistill_server.store.runs:Runs.close_round"),
)


@contextmanager
def _watched(moment: Moment, stacks: dict[str, list[str]]) -> Iterator[None]:
    """Records, in the block, the files on the stack of the moment's last call."""
    module, _, name = moment.function.partition(":")
    owner: Any = importlib.import_module(module)
    *classes, function = name.split(".")
    for class_name in classes:
        owner = getattr(owner, class_name)
    original = getattr(owner, function)

    def record(*args: Any, **kwargs: Any) -> Any:
        frame: FrameType | None = sys._getframe()
        files = [original.__code__.co_filename]
        while frame is not None:
            files.append(frame.f_code.co_filename)
            frame = frame.f_back
        stacks[moment.text] = [short for file in reversed(files) if (short := _short(file))]
        return original(*args, **kwargs)

    with patch.object(owner, function, record):
        yield


def _short(file: str) -> str:
    """Returns a file as on the page; empty for a file of another package."""
    for package, where in PACKAGES.items():
        if Path(file).is_relative_to(package):
            return f"{where}: {Path(file).relative_to(package).as_posix()}"
    return ""


@contextmanager
def _methods_traced(files: dict[str, None], stacks: Mapping[str, object]) -> Iterator[None]:
    """Records, in the block, the files of methods of which a function runs while a round is open."""
    opened, closed = MOMENTS[0].text, MOMENTS[-1].text

    def record(frame: FrameType, event: str, argument: object) -> None:
        is_open = opened in stacks and closed not in stacks
        if event == "call" and is_open and any(folder in frame.f_code.co_filename for folder in METHODS):
            files[_short(frame.f_code.co_filename)] = None

    threading.setprofile(record)
    sys.setprofile(record)
    try:
        yield
    finally:
        sys.setprofile(None)
        threading.setprofile(None)


def trace(method: str) -> dict[str, list[str]]:
    """Returns the files of a round by moment, each where it is first needed, and those of the method."""
    from fleetdistill_lab import Simulation, simulate

    stacks: dict[str, list[str]] = {}
    ran: dict[str, None] = {}
    with tempfile.TemporaryDirectory() as folder, ExitStack() as watching:
        for moment in MOMENTS:
            watching.enter_context(_watched(moment, stacks))
        watching.enter_context(_methods_traced(ran, stacks))
        simulate(
            Simulation(
                method=method,
                link="memory",
                durable=True,
                with_alone=False,
                with_fedavg=False,
                out=Path(folder) / "out",
                **SIZE,
            )
        )
    missing = [moment.text for moment in MOMENTS if moment.text not in stacks]
    if missing:
        raise SystemExit(f"no function of {missing} ran in a round of {method}; mend MOMENTS in tools/paths.py")
    seen: set[str] = set()
    path: dict[str, list[str]] = {}
    for text, files in [*((moment.text, stacks[moment.text]) for moment in MOMENTS), (OF_THE_METHOD, list(ran))]:
        path[text] = [file for file in dict.fromkeys(files) if file not in seen]
        seen |= set(path[text])
    return path


def table() -> str:
    """Returns the tables of the page: the path of FedAvg's round, and what class statistics add to it."""
    fedavg, classstats = trace("fedavg"), trace("classstats")
    known = {file for files in fedavg.values() for file in files}
    more = [file for files in classstats.values() for file in files if file not in known]
    rows = [f"| {number} | {text} | {_cell(files)} |" for number, (text, files) in enumerate(fedavg.items(), 1)]
    return "\n".join(
        [
            f"A round of FedAvg runs through {len(known)} files:",
            "",
            "| | what happens | files that are new on the way there |",
            "|---|---|---|",
            *rows,
            "",
            f"Class statistics (`classstats`) add {len(more)}: {_cell(more)}.",
        ]
    )


def _cell(files: list[str]) -> str:
    return ", ".join(f"*device* `{file[8:]}`" if file.startswith("device: ") else f"`{file[8:]}`" for file in files)


def main(words: list[str]) -> int:
    """Prints or writes the table."""
    arguments = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    arguments.add_argument("--write", action="store_true", help="write the table into the page")
    made = table()
    if not arguments.parse_args(words).write:
        print(made)
        return 0
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    PAGE.write_text(f"{before}{BEGIN}\n{made}\n{END}{rest.partition(END)[2]}", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
