"""The process of one run of an experiment.

    python -m fleetdistill_lab.experiments.process FOLDER PARENT

FOLDER has the settings in simulation.toml, as for `fleetdistill simulate`, and gets the report. Standard output has a
line of JSON for each completed round. The process ends with its parent.
"""

from __future__ import annotations

import json
import sys
import time
from dataclasses import replace
from pathlib import Path

from fleetdistill.errors import FleetDistillError
from fleetdistill_server.service.processes import end_with_parent
from fleetdistill_server.start import INTERRUPTED, ctrl_c_interrupts

SETTINGS = "simulation.toml"
_SECONDS = "seconds.jsonl"


def main() -> int:
    """Runs the simulation, or continues it; returns the process's exit status."""
    folder = Path(sys.argv[1])
    end_with_parent(int(sys.argv[2]))
    try:
        ctrl_c_interrupts()
        _run(folder)
    except FleetDistillError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return INTERRUPTED
    return 0


def _run(folder: Path) -> None:
    from fleetdistill_lab.simulation.fleet import simulate
    from fleetdistill_lab.simulation.options import merge_settings, read_settings
    from fleetdistill_lab.simulation.progress import Progress

    wanted = replace(merge_settings(None, read_settings(folder / SETTINGS, ())), out=folder)
    began, seconds = time.monotonic(), round_seconds(folder)
    before = seconds[-1] if seconds else 0.0

    def note(done: Progress) -> None:
        if done.completed > len(seconds):
            seconds.append(before + time.monotonic() - began)
            with (folder / _SECONDS).open("a") as file:
                file.write(f"{json.dumps(seconds[-1])}\n")
        print(json.dumps({"completed": done.completed, "total": done.total}), flush=True)

    simulate(wanted, note, if_there="resume")


def round_seconds(folder: Path) -> list[float]:
    """Returns the seconds from the start of a run to the end of each round; those before a resume are counted once."""
    file = folder / _SECONDS
    return [float(line) for line in file.read_text().splitlines()] if file.exists() else []


if __name__ == "__main__":
    sys.exit(main())
