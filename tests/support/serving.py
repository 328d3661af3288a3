"""`fleetdistill serve` as a process, of a run with random knowledge."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from support.processes import COMMAND, PATIENCE_SECONDS, children, is_alive, wait_until
from typer.testing import CliRunner

from fleetdistill_server.cli.app import app
from fleetdistill_server.store.store import Store

RUN = "served"
ENGINE, FRONT = "fleetdistill_server.engine", "fleetdistill_server.front"
MANY_ROUNDS = 100_000


def write_config(directory: Path, **changes: Any) -> Path:
    """A run.toml for random knowledge; changes are `section_key=value`."""
    settings: dict[str, Any] = {
        "run.name": RUN,
        "run.method": "feddkc",
        "run.rounds": MANY_ROUNDS,
        "run.min_devices": 2,
        "contract.classes": 10,
        "contract.input_shape": [1, 8, 8],
        "method.server_epochs": 1,
        "server.listen": "127.0.0.1:0",
        "server.store": str(directory / "store"),
        "server.torch_device": "cpu",
        **{name.replace("_", ".", 1): value for name, value in changes.items()},
    }
    lines = []
    for section in ("run", "contract", "model", "method", "server"):
        lines.append(f"[{section}]")
        own = {name.partition(".")[2]: value for name, value in settings.items() if name.startswith(f"{section}.")}
        lines += [f"{name} = {value!r}" for name, value in own.items()]
    path = directory / "run.toml"
    path.write_text("\n".join(lines))
    return path


@dataclass
class Served:
    """A `fleetdistill serve` process and what it has said so far."""

    process: subprocess.Popen[str]
    said: list[str] = field(default_factory=list)
    seen: list[int] = field(default_factory=list)

    def port(self) -> int:
        """Where it says that it serves."""

        def found() -> int:
            assert self.process.poll() is None, self.said
            match = re.search(r"is served on 127\.0\.0\.1:(\d+)", "".join(self.said))
            return int(match.group(1)) if match else 0

        return wait_until(found, "the server to listen")

    def child(self, module: str) -> int:
        """Id of the front's or the engine's process."""
        pid = wait_until(lambda: children(self.process.pid, module), f"a process of {module}")[0]
        self.seen.append(pid)
        return pid


@contextlib.contextmanager
def serve(config: Path) -> Iterator[Served]:
    """Runs `fleetdistill serve`; at the end it and all its children are gone."""
    process = subprocess.Popen(
        [*COMMAND, "serve", str(config)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    served = Served(process)
    reader = threading.Thread(target=lambda: served.said.extend(iter(process.stdout.readline, "")))  # type: ignore[union-attr]
    reader.start()
    try:
        yield served
    finally:
        started = children(process.pid)
        process.terminate()
        try:
            process.wait(PATIENCE_SECONDS)
        finally:
            for item in [process.pid, *started, *(pid for pid in served.seen if _is_ours(pid))]:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(item, signal.SIGKILL)
        process.wait()
        reader.join()
        process.stdout.close()  # type: ignore[union-attr]


def _is_ours(pid: int) -> bool:
    """Orphans have lost their parent, but not their command line; another process may have got the id meanwhile."""
    return is_alive(pid) and "fleetdistill_server" in Path(f"/proc/{pid}/cmdline").read_text()


def completed(store: Store) -> int:
    row = store.runs.get(RUN)
    return row.completed_rounds if row else 0


def call(*words: str) -> str:
    result = CliRunner().invoke(app, list(words))
    assert result.exit_code == 0, result.output
    return result.output
