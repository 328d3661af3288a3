"""Makes the engines' processes match the store: the first runs in its queue have one, all others have none.

The store is the only truth. This object remembers only its own processes, so a supervisor can be killed at any time.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Sequence
from pathlib import Path

from fleetdistill.errors import StoreError
from fleetdistill.state import failpoints
from fleetdistill_server.config.server_config import ServerConfig
from fleetdistill_server.event_kinds import ENGINE_RESTARTED
from fleetdistill_server.logs import about
from fleetdistill_server.service.engine_files import delete_engine_files
from fleetdistill_server.service.engine_process import EngineProcess, EngineSlot
from fleetdistill_server.store.records import Run
from fleetdistill_server.store.store import Store

logger = logging.getLogger("fleetdistill.server.supervisor")


class Reconciliation:
    """Starts and ends engines.

    Args:
        store: The supervisor's store.
        config: The server's settings.
        slots: Places for engines.
        run: The only run that gets an engine; empty for all.
        log: File for the engines' standard error; None for the supervisor's.
        options: Further arguments of the engines.
        on_failed: Called with a run, the reason, and whether its state is damaged, when its engine was given up or
            replaced by another server's.

    Attributes:
        engines: The engines, by run.
    """

    def __init__(
        self,
        store: Store,
        config: ServerConfig,
        slots: Sequence[EngineSlot],
        run: str,
        log: Path | None,
        options: Sequence[str],
        on_failed: Callable[[str, str, bool], None],
    ) -> None:
        self._store = store
        self._config = config
        self._free = list(slots)
        self._count = len(slots)
        self._run = run
        self._log = log
        self._options = options
        self._on_failed = on_failed
        self._restarts: dict[str, int] = {}  # of engines that were ended, by run
        self._foreign: dict[str, str] = {}  # tokens of other servers' engines, by run
        self._released: dict[str, int | None] = {}  # what runs that gave up their engine waited for
        self.engines: dict[str, EngineProcess] = {}

    def look(self) -> None:
        """Compares the processes with the store once, and starts or ends some; does not wait for them."""
        queue = self._queue()
        self._released = {run.name: self._released[run.name] for run in queue if run.name in self._released}
        needed = {run.name: run for run in queue[: self._count]}
        known = dict(self.engines)
        for later in queue[self._count :]:
            engine = known.get(later.name)
            if engine is None or later.engine != engine.token:
                continue
            if self._store.run_control.release(engine.run, engine.token):
                self._released[engine.run] = later.waits_for
                logger.info("the run gives up its engine while it waits", extra=about(run=engine.run))
            else:  # its devices have come in this moment
                needed[engine.run] = later
        for name, engine in known.items():
            run = needed.get(name)
            if run is not None and run.engine == engine.token:
                self._look_after(engine)
            else:
                self._let_go(engine, run)
        for name, run in needed.items():
            if name not in known and self._free:  # what has just ended is looked at again before it gets another
                self._start(name, restarted=run.engine is not None)

    def stop(self, at_once: bool) -> None:
        """Ends all engines and waits for them."""
        for engine in self.engines.values():  # they end at the same time
            engine.end(at_once=True)
        for engine in self.engines.values():
            engine.stop(at_once)
            with contextlib.suppress(StoreError):
                self._store.run_control.free(engine.run, engine.token)

    def _queue(self) -> list[Run]:
        """Returns the queue without the runs that another server's engine took over."""
        queue = [run for run in self._store.run_control.queue() if self._run in ("", run.name)]
        return [run for run in queue if run.engine is None or self._foreign.get(run.name) != run.engine]

    def _start(self, run: str, *, restarted: bool) -> None:
        """Starts the engine of a run, which an engine of an earlier server may have worked on."""
        failpoints.hit("supervisor.engine.before-token")
        with self._store.transaction():
            token = self._store.run_control.assign(run)
            if token is None:
                return
            if restarted:
                self._store.history.add_event(run, ENGINE_RESTARTED, "the server had crashed and was started again")
        failpoints.hit("supervisor.engine.after-token")
        slot, waits_for = self._free.pop(0), self._released.pop(run, None)
        options = self._options if waits_for is None else (*self._options, "--waits-for", str(waits_for))
        try:
            self.engines[run] = EngineProcess(run, token, self._store, self._config, slot, self._log, *options)
        except BaseException:
            self._free.insert(0, slot)
            raise
        self.engines[run].child.restarts = self._restarts.pop(run, 0)
        failpoints.hit("supervisor.engine.after-start")

    def _look_after(self, engine: EngineProcess) -> None:
        engine.look()
        if not engine.failed:
            return
        held = True
        with contextlib.suppress(StoreError):  # the disk may be full too; the next look tries again
            held = self._store.run_control.stop_failed(engine.run, engine.token, engine.failed)
            self._drop(engine)
        if held:
            self._on_failed(engine.run, engine.failed, engine.is_damaged)

    def _let_go(self, engine: EngineProcess, queued: Run | None) -> None:
        """Ends the process of a run that needs none, or that another engine works on."""
        known_run = self._store.runs.get(engine.run)
        mine = known_run is not None and known_run.engine == engine.token
        if not engine.end(at_once=not mine):
            return
        self._drop(engine)
        if known_run is None:
            delete_engine_files(Path(self._config.server.store), engine.run)
            del self._restarts[engine.run]
        if queued is not None and queued.engine is not None:
            self._foreign[engine.run] = queued.engine
            self._on_failed(engine.run, f"run {engine.run!r} was taken over by another server", False)

    def _drop(self, engine: EngineProcess) -> None:
        del self.engines[engine.run]
        self._restarts[engine.run] = engine.child.restarts
        self._free.append(engine.slot)
