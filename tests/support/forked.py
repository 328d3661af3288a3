"""Front, engine and devices as real processes that start in milliseconds, for tests that kill many of them.

Each process is forked from one that has imported torch. It can be told to kill itself (SIGKILL) at a failpoint, so that
a test meets a moment that is too short to be hit from outside. Not for Windows.
"""

from __future__ import annotations

import os
import runpy
import select
import signal
import subprocess
import sys
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import TYPE_CHECKING, Any

from support.fork_server import forked
from support.forked_popen import popen
from support.processes import PATIENCE_SECONDS, wait_until
from support.stores import object_store_environment

from fleetdistill import Step
from fleetdistill.state import failpoints
from fleetdistill_lab.simulation.links.links import save_specs
from fleetdistill_lab.simulation.spec.device import DeviceSpec, make_compute, make_device
from fleetdistill_server.config.section import as_toml
from fleetdistill_server.intake.device_api import DeviceApi
from fleetdistill_server.intake.memory_link import MemoryLink
from fleetdistill_server.store.store import Store

if TYPE_CHECKING:
    from support.fleets import Prepared


class Pipe:
    """A wake-up pipe with a name, so that a process that is not our child can open it too."""

    def __init__(self, path: Path) -> None:
        self.path = path
        os.mkfifo(path)
        self.end = os.open(path, os.O_RDWR | os.O_NONBLOCK)
        weakref.finalize(self, os.close, self.end)

    def poke(self) -> None:
        """Wakes the reader."""
        os.write(self.end, b"x")

    @property
    def is_empty(self) -> bool:
        """Whether the reader has taken everything."""
        return not select.select([self.end], [], [], 0)[0]


class Forked:
    """One process at a time, started again after each death."""

    def __init__(self, target: Callable[..., None], *args: Any) -> None:
        self._target, self._args = target, args
        self.process: ForkServerProcess | None = None
        self.lives = 0

    def start(self, points: str = "") -> None:
        """Starts it with these failpoints, as `failpoints.switch_on` takes them; the target gets them first."""
        assert not self.is_alive
        self.lives += 1
        self.process = forked(self._target, points, *self._args)

    def kill(self) -> None:
        """SIGKILL, if it lives."""
        if self.process is not None:
            self.process.kill()
            self.process.join()

    def work(self, other: Callable[[], None]) -> None:
        """Lets something else go on again and again until the process has died or ended."""
        while self.is_alive:
            other()
            assert self.process is not None
            self.process.join(0.01)

    def wait_for_the_end(self, seconds: float = 120.0) -> None:
        """Waits until the process has ended well."""
        assert self.process is not None
        self.process.join(seconds)
        assert self.process.exitcode == 0, f"the process ended with {self.process.exitcode} (None: not yet)"

    @property
    def is_alive(self) -> bool:
        """Whether it runs."""
        return self.process is not None and self.process.is_alive()

    @property
    def was_killed(self) -> bool:
        """Whether it died of SIGKILL; fails if it ended in any other way than well."""
        assert self.process is not None
        assert self.process.exitcode in (0, -signal.SIGKILL), f"the process ended with {self.process.exitcode}"
        return self.process.exitcode != 0


class ForkedEngine(Forked):
    """The engine's own `main` over the run's store on the disk."""

    def __init__(self, prepared: Prepared) -> None:
        config, _, work = prepared
        (work / "run.toml").write_text(as_toml(config))
        self.pipe = Pipe(work / "engine.fifo")
        self.front_pipe = Pipe(work / "front.fifo")
        super().__init__(
            _run_engine, work / "run.toml", self.pipe.path, self.front_pipe.path, object_store_environment()
        )

    def wait_until_it_waits(self) -> None:
        """Returns once the engine has done everything that it can do without another answer, or has ended."""
        self.pipe.poke()  # its event loop, and so the pipe, has its turn only while the engine waits
        wait_until(lambda: self.pipe.is_empty or not self.is_alive, "the engine to wait")


def _run_engine(points: str, config: Path, pipe: Path, front_pipe: Path, environment: dict[str, str]) -> None:
    os.environ.update(environment)
    from fleetdistill_server.engine.process import main

    ends = [os.open(path, os.O_RDWR | os.O_NONBLOCK) for path in (pipe, front_pipe)]
    failpoints.switch_on(points)
    sys.argv = ["engine", str(config), "--wakeups", f"{ends[0]},{ends[1]}"]
    sys.exit(main())


def forked_device(spec: DeviceSpec, store: str, pipe: Pipe) -> Forked:
    """A device that reaches the store on the disk through a device API of its own."""
    return Forked(_run_device, spec, store, pipe.path)


def _run_device(points: str, spec: DeviceSpec, store: str, pipe: Path) -> None:
    end = os.open(pipe, os.O_RDWR | os.O_NONBLOCK)

    def wake_engine() -> None:
        os.write(end, b"x")

    api = DeviceApi(Store.open(Path(store)), wake_engine=wake_engine)
    failpoints.switch_on(points)
    with make_device(spec, MemoryLink(api), compute=partial(make_compute, spec)) as device:
        while device.step(0.0) is not Step.FINISHED:
            select.select([], [], [], 0.005)


def forked_grpc_devices(specs: Sequence[DeviceSpec], port: int, *, keep_open: bool) -> Forked:
    """A process of simulated devices, which call a front. They stay open, or are closed whenever they wait for work."""
    return Forked(_run_grpc_devices, list(specs), port, 1 << 30 if keep_open else 0)


def _run_grpc_devices(points: str, specs: list[DeviceSpec], port: int, max_waiting_bytes: int) -> None:
    from fleetdistill_lab.simulation.links.multiplexer import run_devices

    failpoints.switch_on(points)
    sys.exit(run_devices(specs, f"127.0.0.1:{port}", max_waiting_bytes))


def forked_host(specs: Sequence[DeviceSpec], port: int, hook: Path | None = None) -> ForkServerProcess:
    """The host of two processes of devices. SIGTERM arrives in a hook of its first fork, which touches `hook`."""
    return forked(_run_host, save_specs(specs), port, hook)


def _run_host(specs: Path, port: int, hook: Path | None) -> None:
    from fleetdistill_lab.simulation.links.device_host import main

    def terminate() -> None:
        assert hook is not None
        hook.touch()
        os.kill(os.getpid(), signal.SIGTERM)

    if hook is not None:
        os.register_at_fork(after_in_parent=terminate)
    address = f"127.0.0.1:{port}"
    sys.argv = ["host", str(specs), "--server", address, "--processes", "2", "--parent", str(os.getppid())]
    sys.exit(main())


class ForkedProgram(Forked):
    """A command (`fleetdistill ...`) or a script (`path.py ...`) with its arguments; what it prints goes to a file.

    What it starts of the product is forked too; see `support.forked_popen`.
    """

    def __init__(self, words: Sequence[str | Path], log: Path, folder: Path | None = None, **environment: str) -> None:
        self.log = log
        where, texts = folder or Path.cwd(), [str(word) for word in words]
        super().__init__(_run_program, texts, log.resolve(), where, list(sys.path), environment)

    def send(self, number: signal.Signals) -> None:
        """Sends a signal."""
        assert self.process is not None
        assert self.process.pid is not None
        os.kill(self.process.pid, number)

    def ended(self, seconds: float = PATIENCE_SECONDS) -> int | None:
        """Exit status, once it has ended by itself; None if it has not by then."""
        assert self.process is not None
        self.process.join(seconds)
        return self.process.exitcode

    @property
    def said(self) -> str:
        """What it has printed so far, on both streams."""
        return self.log.read_text() if self.log.exists() else ""


def _run_program(
    points: str, words: list[str], log: Path, folder: Path, path: list[str], environment: dict[str, str]
) -> None:
    os.chdir(folder)
    os.environ.update(environment)
    with log.open("ab") as file:
        for stream in (1, 2):
            os.dup2(file.fileno(), stream)
    failpoints.switch_on(points)
    subprocess.Popen = popen  # type: ignore[misc, assignment]
    sys.argv, sys.path[:] = words, path
    if words[0].endswith(".py"):
        sys.path.insert(0, str(Path(words[0]).resolve().parent))
        runpy.run_path(words[0], run_name="__main__")
    else:
        from fleetdistill_server.start import main

        main()


def forked_forget_command(store: Path, run: str, device: str) -> Forked:
    """`fleetdistill devices forget` on a store that nobody serves; it ends well once that is done."""
    return Forked(_forget, store, run, device)


def _forget(points: str, directory: Path, run: str, device: str) -> None:
    from fleetdistill_server.engine.forgetting import ask_to_forget

    store = Store.open(directory)
    failpoints.switch_on(points)
    sys.exit(0 if ask_to_forget(store, run, device, served=False) else 1)


def forked_device_forget(state_dir: Path) -> Forked:
    """`fleetdistill device forget`, in a process that can be killed while it erases."""
    return Forked(_forget_device, state_dir)


def _forget_device(points: str, state_dir: Path) -> None:
    from fleetdistill.device.command import main

    failpoints.switch_on(points)
    sys.exit(main(["forget", str(state_dir), "--local", "--yes"]))
