"""The process that copies figures: started beside a server or a simulation, and started again if it dies."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path

from fleetdistill_console.tracking.follower import Followed, Follower
from fleetdistill_console.tracking.mlflow_tracker import ENVIRONMENT, MlflowTracker
from fleetdistill_console.tracking.targets import MLFLOW, Target, Tracking, read_targets
from fleetdistill_console.tracking.tensorboard_tracker import TensorBoardTracker
from fleetdistill_console.tracking.tracker import Tracker
from fleetdistill_server.logs import configure
from fleetdistill_server.service.processes import child_environment

logger = logging.getLogger("fleetdistill.server.tracking")
_VARIABLE = "FLEETDISTILL_TRACKING"
"""Variable that hands over what is followed, and where to: an argument would show a password to other users."""
_LOOK_SECONDS = 1.0
_RESTART_SECONDS = 10.0
LAST_SECONDS = 60.0
"""How long the end of a server or a simulation waits for the last figures."""


def track_store(
    targets: Iterable[str], store: Path, run: str, log_options: Sequence[str]
) -> contextlib.AbstractContextManager[None]:
    """Returns what copies the figures of a store while its block runs; the targets are checked at once.

    Args:
        targets: Values of `--track`.
        store: Directory of the store.
        run: Name of the run; empty for all runs.
        log_options: As for `track`.

    Raises:
        ConfigurationError: As `read_targets`.
    """
    return track(Followed(str(store.resolve()), run), Tracking(read_targets(targets)), log_options)


@contextlib.contextmanager
def track(followed: Followed, tracking: Tracking, log_options: Sequence[str] = ()) -> Iterator[None]:
    """Copies figures while the block runs, and the last ones after it.

    Args:
        followed: The runs.
        tracking: Where to; without targets this does nothing.
        log_options: `--log-format` and `--log-level` of the process.
    """
    if not tracking.targets:
        yield
        return
    over = threading.Event()
    keeper = threading.Thread(target=_keep_running, args=(followed, tracking, log_options, over), daemon=True)
    keeper.start()
    try:
        yield
    finally:
        over.set()
        keeper.join()


def _keep_running(followed: Followed, tracking: Tracking, log_options: Sequence[str], over: threading.Event) -> None:
    process = _start(followed, tracking, log_options)
    while not over.wait(_LOOK_SECONDS):
        if process.poll() is not None and not over.wait(_RESTART_SECONDS):
            logger.warning("the tracking process exited with status %s; restarting it", process.returncode)
            _end(process)
            process = _start(followed, tracking, log_options)
    _end(process)
    try:
        process.wait(LAST_SECONDS)
    except subprocess.TimeoutExpired:
        logger.warning("the last figures were not written within %g s; the next start writes them", LAST_SECONDS)
        process.kill()
        process.wait()


def _end(process: subprocess.Popen[bytes]) -> None:
    """Ends the process's input, on which it exits. Unlike a signal, this also reaches a process that still starts."""
    assert process.stdin is not None
    process.stdin.close()


def _start(followed: Followed, tracking: Tracking, log_options: Sequence[str]) -> subprocess.Popen[bytes]:
    handed = {"followed": asdict(followed), "tracking": asdict(tracking)}
    environment = {**ENVIRONMENT, **child_environment(), _VARIABLE: json.dumps(handed)}
    command = [sys.executable, "-m", "fleetdistill_console.tracking", *log_options]
    # In a new session, so that Ctrl-C reaches only the parent; MLflow prints the URI to standard output.
    return subprocess.Popen(
        command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, start_new_session=True
    )


def main(words: Sequence[str]) -> int:
    """Follows what the environment names until standard input ends; `words` are the log options."""
    stopped = threading.Event()
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # systemd sends it to every process of a service, too early for this
    options = dict(zip(words[::2], words[1::2], strict=True))
    configure("tracking", options.get("--log-format", "text"), options.get("--log-level", "INFO"))
    handed = json.loads(os.environ.pop(_VARIABLE))
    targets = [Target(**item) for item in handed["tracking"].pop("targets")]
    _hide([secret for target in targets for secret in target.secrets])
    followers = [
        Follower(
            Followed(**handed["followed"]), str(target), partial(_connect, target, handed["tracking"]["experiment"])
        )
        for target in targets
    ]
    threads = [threading.Thread(target=follower.follow, args=(stopped,), daemon=True) for follower in followers]
    for thread in threads:
        thread.start()
    sys.stdin.buffer.read()
    stopped.set()
    for thread in threads:
        thread.join()
    return 0


def _connect(target: Target, experiment: str) -> Tracker:
    if target.kind == MLFLOW:
        return MlflowTracker(target.where, experiment)
    return TensorBoardTracker(Path(target.where), experiment)


class _Hidden(logging.Filter):
    """Removes users and passwords of URIs from all lines, also from those of libraries."""

    def __init__(self, secrets: Sequence[str]) -> None:
        super().__init__()
        self._secrets = secrets

    def filter(self, record: logging.LogRecord) -> bool:
        text = record.getMessage()
        for secret in self._secrets:
            text = text.replace(secret, "")
        record.msg, record.args = text, ()
        return True


def _hide(secrets: Sequence[str]) -> None:
    for handler in logging.getLogger().handlers:
        handler.addFilter(_Hidden(secrets))
    for library in ("mlflow", "urllib3"):  # the follower logs each failure itself, and seldom
        logging.getLogger(library).setLevel(logging.CRITICAL)
