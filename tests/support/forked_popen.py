"""`subprocess.Popen` for Python processes of the product, forked from one that has already imported torch.

Starting Python and torch costs seconds of processor time, and the suite starts hundreds of processes. A forked process
is as separate as any other: it runs its own `main` with its own arguments, environment, files and signals. Tests of a
cold start, or of a process's memory, are marked `cold_start` and start the real thing.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import re
import runpy
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from multiprocessing.reduction import DupFd
from pathlib import Path
from typing import IO, Any

from support.fork_server import forked
from support.processes import COMMAND, REGISTRY, start_of

from fleetdistill.state import failpoints

REAL_POPEN = subprocess.Popen


def popen(command: Any, **given: Any) -> Any:
    """Replaces `subprocess.Popen`: forks the command and the processes of the server, and starts any other program."""
    forks = isinstance(command, list) and command[0] == sys.executable
    forks = forks and (command[:3] == COMMAND or (command[1] == "-m" and command[2].startswith("fleetdistill_")))
    return ForkedPopen(command, **given) if forks else REAL_POPEN(command, **given)


class _File:
    """A file descriptor that is sent to a process while it starts."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __getstate__(self) -> Any:
        return DupFd(self.number)

    def __setstate__(self, sent: Any) -> None:
        self.number = sent.detach()


class ForkedPopen:
    """A forked `python -m MODULE ...` or `python -c CODE ...`, with what the suite uses of `subprocess.Popen`."""

    def __init__(
        self,
        command: Sequence[str],
        *,
        cwd: Path | None = None,
        env: Mapping[str, str] | None = None,
        stdin: Any = None,
        pass_fds: Sequence[int] = (),
        stdout: Any = None,
        stderr: Any = None,
        text: bool = False,
        start_new_session: bool = False,
    ) -> None:
        self.stdout: IO[Any] | None
        self.stderr: IO[Any] | None
        self.stdout, out = _pipe(text) if stdout == subprocess.PIPE else (None, _number(stdout, 1))
        self.stderr, err = _pipe(text) if stderr == subprocess.PIPE else (None, _number(stderr, 2))
        self.stdin: IO[Any] | None = None
        self._readers: list[threading.Thread] = []
        self._read: dict[int, Any] = {}  # texts by stream
        files = {number: _File(number) for number in pass_fds}
        if stdin == subprocess.PIPE:
            here, there = os.pipe()
            self.stdin, files[0] = os.fdopen(there, "wb"), _File(here)
        files |= {1: _File(out), 2: _File(out if stderr == subprocess.STDOUT else err)}
        self.args = command
        words, environment = [str(word) for word in command[1:]], dict(os.environ if env is None else env)
        environment[REGISTRY] = os.environ[REGISTRY]
        given = (words, str(cwd or Path.cwd()), environment, files, os.getpid(), start_new_session)
        self._process = forked(_run, *given)
        for stream, number in ((self.stdout, out), (self.stderr, err)):
            if stream is not None:
                os.close(number)
        if self.stdin is not None:
            os.close(here)
        assert self._process.pid is not None
        self.pid = self._process.pid
        with Path(os.environ[REGISTRY]).open("a") as registry:
            module = words[1] if words[0] == "-m" else "-"
            registry.write(f"{os.getpid()} {self.pid} {start_of(self.pid)} {module}\n")

    @property
    def returncode(self) -> int | None:
        """Exit status, negative for a signal; None while the process runs."""
        return self._process.exitcode

    def poll(self) -> int | None:
        """As `returncode`."""
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Exit status, once the process has ended. Raises subprocess.TimeoutExpired."""
        self._process.join(timeout)
        if self.returncode is None:
            raise subprocess.TimeoutExpired("a forked process", timeout or 0.0)
        return self.returncode

    def send_signal(self, number: int) -> None:
        """Sends a signal, unless the process has ended."""
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):  # another thread waits for the process, and was faster
                os.kill(self.pid, number)

    def terminate(self) -> None:
        """Sends SIGTERM."""
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """Sends SIGKILL."""
        self.send_signal(signal.SIGKILL)

    def communicate(self, input: str | None = None, timeout: float | None = None) -> tuple[Any, Any]:
        """What is left on the pipes, once the process has ended. Raises subprocess.TimeoutExpired."""
        if self.stdin is not None and input is not None:
            with self.stdin:
                self.stdin.write(input.encode())
        if not self._readers:  # a call after a timeout goes on with what was read
            streams = [stream for stream in (self.stdout, self.stderr) if stream is not None]
            self._readers = [
                threading.Thread(target=_read, args=(stream, self._read), daemon=True) for stream in streams
            ]
            for reader in self._readers:
                reader.start()
        self.wait(timeout)
        for reader in self._readers:
            reader.join()
        return self._read.get(id(self.stdout)), self._read.get(id(self.stderr))

    def __enter__(self) -> ForkedPopen:
        return self

    def __exit__(self, *error: object) -> None:
        for stream in (self.stdout, self.stderr):
            if stream is not None:
                stream.close()
        self.wait()


def _pipe(text: bool) -> tuple[IO[Any], int]:
    read, write = os.pipe()
    return os.fdopen(read, "r" if text else "rb"), write


def _number(file: Any, default: int) -> int:
    if file == subprocess.DEVNULL:
        return os.open(os.devnull, os.O_WRONLY)
    if file is None or file == subprocess.STDOUT:
        return default
    return int(file if isinstance(file, int) else file.fileno())


def _read(stream: IO[Any], texts: dict[int, Any]) -> None:
    with stream:
        texts[id(stream)] = stream.read()


def _run(
    words: list[str], folder: str, environment: dict[str, str], files: dict[int, _File], parent: int, session: bool
) -> None:
    for number, file in files.items():
        if number in (0, 1, 2):
            os.dup2(file.number, number)
    if 0 in files:
        sys.stdin = os.fdopen(0)  # multiprocessing has opened /dev/null
    if session:
        os.setsid()
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    starter = multiprocessing.parent_process()
    assert starter is not None
    me, of_others = os.getpid(), os.getppid
    os.getppid = lambda: of_others() if os.getpid() != me else parent if starter.is_alive() else 1
    subprocess.Popen = popen  # type: ignore[misc, assignment]
    failpoints.switch_on(environment.get(failpoints.VARIABLE, ""))  # not those with which the fork server was started
    _run_python([_renumbered(word, files) for word in words])


def _renumbered(word: str, files: Mapping[int, _File]) -> str:
    """The argument with the pipe ends of `--wakeups` as they are numbered in this process."""

    def here(end: re.Match[str]) -> str:
        return str(files[int(end[0])].number) if int(end[0]) in files else end[0]

    return re.sub(r"\d+", here, word) if re.fullmatch(r"(--wakeups=)?-?\d+(,-?\d+)+", word) else word


def _run_python(words: list[str]) -> None:
    option, what, *arguments = words
    sys.path[:0] = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path not in sys.path]
    if option == "-c":
        sys.argv = ["-c", *arguments]
        exec(compile(what, "<string>", "exec"), {"__name__": "__main__"})
    else:
        sys.argv = [what, *arguments]
        sys.modules.pop(what, None)  # runpy warns of a module that it runs a second time
        runpy.run_module(what, run_name="__main__", alter_sys=True)
