"""Exports a run's model in a process of its own, for a front, which imports no torch: STORE RUN FILE.

Prints one JSON object: `bytes` and `max_difference`, or `error`.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from fleetdistill.errors import FleetDistillError
from fleetdistill_server.engine.export import export_server_model
from fleetdistill_server.service.processes import end_with_parent
from fleetdistill_server.store.store import Store


def main(store: str, run: str, file: str) -> None:
    """Exports the model and prints the result."""
    end_with_parent()
    try:
        report = export_server_model(Store.open(Path(store)), run, Path(file))
    except FleetDistillError as error:
        print(json.dumps({"error": str(error)}))
        return
    print(json.dumps({"bytes": report.bytes, "max_difference": report.max_difference}))


if __name__ == "__main__":
    main(*sys.argv[1:])
