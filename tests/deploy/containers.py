"""Builds deploy/Containerfile and starts services of deploy/compose.yaml without a container engine.

A build runs the file's own RUN lines; packages come from this environment instead of an index. A service has a
read-only root, the image's user without privileges, its volumes, and a network that it shares with the other services
and that has no way out. What stays of this machine is /usr. Linux, as root.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from support.processes import PATIENCE_SECONDS

ROOT = Path(__file__).parents[2]
PYTHON = {"PATH": "/opt/bin:/opt/python/bin:/usr/sbin:/usr/bin:/sbin:/bin", "PYTHONPATH": "/opt/packages"}
NO_INDEX = {"PIP_NO_INDEX": "1", "PIP_DISABLE_PIP_VERSION_CHECK": "1", "PIP_BREAK_SYSTEM_PACKAGES": "1"}
_TOOLS = ("unshare", "nsenter", "setpriv", "chroot", "mount", "ip")
_OWN = ("fleetdistill", "__editable__", "_virtualenv")
"""Beginnings of names that an image does not take from this environment: the product itself."""


def why_not() -> str:
    """Why this machine cannot do it; empty if it can."""
    if missing := [tool for tool in _TOOLS if shutil.which(tool) is None]:
        return f"{', '.join(missing)} not installed"
    tried = ["unshare", "--mount", "--net", "mount", "-t", "tmpfs", "tmpfs", "/mnt"]
    if subprocess.run(tried, capture_output=True, check=False).returncode:
        return "this user may not mount, as in most containers"
    return ""


@dataclass
class Image:
    """The root directory of an image and what its last stage says."""

    root: Path
    environment: dict[str, str] = field(default_factory=dict)
    workdir: str = "/"
    user: str = "0:0"
    entrypoint: list[str] = field(default_factory=list)
    command: list[str] = field(default_factory=list)
    healthcheck: list[str] = field(default_factory=list)

    def words(self, given: Mapping[str, Any]) -> list[str]:
        """The command line of a service, as Compose puts it together."""
        entrypoint = given.get("entrypoint", self.entrypoint)
        command = given.get("command", [] if "entrypoint" in given else self.command)
        return [word.replace("$$", "$") for word in [*entrypoint, *command]]


def stages(containerfile: Path) -> dict[str, list[tuple[str, str]]]:
    """The instructions of each stage by its name; the first pair of each is ("FROM", base)."""
    text = re.sub(r"^\s*#.*\n", "", containerfile.read_text(), flags=re.MULTILINE).replace("\\\n", " ")
    result: dict[str, list[tuple[str, str]]] = {}
    name = ""
    for line in filter(str.strip, text.splitlines()):
        word, _, rest = line.strip().partition(" ")
        if word == "FROM":
            base, _, name = rest.partition(" AS ")
            result[name] = [("FROM", base)]
        elif name:
            result[name].append((word, re.sub(r"\s+", " ", rest)))
    return result


class Builder:
    """Builds the stages of a Containerfile on top of /usr and this Python, in a folder."""

    def __init__(self, containerfile: Path, work: Path) -> None:
        self._stages, self._work = stages(containerfile), work
        self._built: dict[str, Image] = {}

    def build(self, name: str) -> Image:
        """Builds a stage and those that it needs, once."""
        if name not in self._built:
            (_, base), *rest = self._stages[name]
            root = self._work / name
            if base in self._stages:
                result = self.build(base)
                subprocess.run(["cp", "--archive", result.root, root], check=True)
                image = Image(root, dict(result.environment), result.workdir, result.user)
                image.entrypoint, image.command, image.healthcheck = (
                    result.entrypoint,
                    result.command,
                    result.healthcheck,
                )
            else:
                image = Image(_bare_root(root), dict(PYTHON))
            for word, given in rest:
                self._step(image, word, given)
            self._built[name] = image
        return self._built[name]

    def _step(self, image: Image, word: str, given: str) -> None:
        if word in ("ENV", "ARG"):
            for item in shlex.split(given):
                key, _, value = item.partition("=")
                image.environment[key] = value.replace("$PATH", image.environment["PATH"])
        elif word == "RUN":
            run_in(image, ["sh", "-ec", given], NO_INDEX, user="0:0", read_only=False)
        elif word == "COPY":
            self._copy(image, given.split())
        elif word == "WORKDIR":
            image.workdir = given
            (image.root / given.strip("/")).mkdir(parents=True, exist_ok=True)
        elif word == "USER":
            image.user = given
        elif word in ("ENTRYPOINT", "CMD"):
            setattr(image, "command" if word == "CMD" else "entrypoint", json.loads(given))
        elif word == "HEALTHCHECK":
            image.healthcheck = json.loads(given.partition(" CMD ")[2])
        else:
            assert word in ("VOLUME", "EXPOSE"), word

    def _copy(self, image: Image, words: list[str]) -> None:
        context = ROOT
        if words[0].startswith("--from="):
            context = self.build(words.pop(0).partition("=")[2]).root
        *sources, target = words
        for source in sources:
            result, to = context / source.strip("/"), image.root / os.path.join(image.workdir, target).strip("/")
            if result.is_dir():
                shutil.copytree(result, to, symlinks=True, dirs_exist_ok=True)
            else:
                shutil.copy(result, to / result.name)


def _bare_root(root: Path) -> Path:
    """What an image of Python has, but for /usr and Python itself, which a process gets when it starts."""
    for name in ("etc", "opt/bin", "opt/python", "opt/packages", "proc", "dev", "tmp", "usr", "var/lib", "srv", "mnt"):
        (root / name).mkdir(parents=True, exist_ok=True)
    for name in ("bin", "sbin", "lib", "lib64"):
        if (Path("/") / name).is_symlink():
            (root / name).symlink_to(os.readlink(Path("/") / name))
    (root / "opt/bin/python").symlink_to(f"/opt/python/bin/python{sys.version_info[0]}.{sys.version_info[1]}")
    (root / "opt/bin/pip").write_text('#!/bin/sh\nexec python -m pip "$@"\n')
    (root / "opt/bin/pip").chmod(0o755)
    for number, folder in enumerate(_packages()):
        (root / f"opt/packages-{number}").mkdir()
        for item in Path(folder).iterdir():
            link = root / "opt/packages" / item.name
            if not item.name.lower().startswith(_OWN) and item.suffix != ".pth" and not link.is_symlink():
                link.symlink_to(f"/opt/packages-{number}/{item.name}")
    for name in ("passwd", "group", "shadow", "gshadow", "ld.so.cache", "login.defs"):
        with contextlib.suppress(FileNotFoundError):
            shutil.copy(Path("/etc") / name, root / "etc" / name)
    (root / "etc/hosts").write_text("127.0.0.1 localhost\n")
    return root


def _packages() -> list[str]:
    return [path for path in sys.path if path.endswith("site-packages")]


def _script(image: Image, words: Sequence[str], user: str, read_only: bool, volumes: Mapping[str, str]) -> str:
    """A shell script that mounts an image's root, makes it the root directory and becomes the command."""
    fixed = {"/usr:ro": "/usr", "/opt/python:ro": sys.base_prefix}
    fixed |= {f"/opt/packages-{number}:ro": folder for number, folder in enumerate(_packages())}
    lines = [f"mount --bind {shlex.quote(str(image.root))} /mnt", *map(_mount_point, volumes)]
    if read_only:
        lines += ["mount -o remount,bind,ro /mnt", "mount -t tmpfs tmpfs /mnt/tmp", "chmod 1777 /mnt/tmp"]
    for given, source in {**fixed, **volumes}.items():
        target, _, mode = given.partition(":")
        lines += [_mount_point(given), f"mount --bind {shlex.quote(source)} /mnt{target}"]
        lines += [f"mount -o remount,bind,ro /mnt{target}"] if mode == "ro" else []
    lines += ["mount --rbind /proc /mnt/proc", "mount --rbind /dev /mnt/dev"]
    uid, _, gid = user.partition(":")
    drop = ["setpriv", f"--reuid={uid}", f"--regid={gid}", "--clear-groups"]
    drop += ["--no-new-privs", "--inh-caps=-all", "--bounding-set=-all"] if uid != "0" else []
    inside = f'cd {shlex.quote(image.workdir)} && exec "$@"'
    lines.append(f"exec chroot /mnt {shlex.join([*drop, 'sh', '-c', inside, 'sh', *words])}")
    return "\n".join(lines)


def _mount_point(given: str) -> str:
    """Makes what a volume is mounted on, unless it is there: a file for a configuration, else a directory."""
    path = "/mnt" + given.partition(":")[0]
    made = f"mkdir -p {os.path.dirname(path)} && touch {path}" if path.endswith(".toml") else f"mkdir -p {path}"
    return f"[ -e {path} ] || {{ {made}; }}"


def start_in(
    image: Image,
    words: Sequence[str],
    environment: Mapping[str, str],
    *,
    user: str = "",
    read_only: bool = True,
    volumes: Mapping[str, str] = {},
    network: int | None = None,
    output: Any = subprocess.PIPE,
) -> subprocess.Popen[str]:
    """Starts a command in an image.

    Args:
        image: The image.
        words: The command.
        environment: Variables in addition to the image's.
        user: uid:gid, by default the image's.
        read_only: Whether only volumes and /tmp can be written.
        volumes: Path in the container, with `:ro` behind it where it cannot be written, to a path of this machine.
        network: Process whose network the command joins; None for a network of its own.
        output: Where standard output and standard error go.
    """
    script = _script(image, words, user or image.user, read_only, volumes)
    enter = ["unshare", "--net"] if network is None else ["nsenter", f"--net=/proc/{network}/ns/net"]
    command = [*enter, "unshare", "--mount", "--propagation", "private", "sh", "-euc", script]
    return subprocess.Popen(
        command, env={**image.environment, **environment}, stdout=output, stderr=subprocess.STDOUT, text=True
    )


def run_in(image: Image, words: Sequence[str], environment: Mapping[str, str], **options: Any) -> str:
    """Runs a command in an image to its end and returns its output; fails if the command does."""
    process = start_in(image, words, environment, **options)
    said, _ = process.communicate(timeout=PATIENCE_SECONDS)
    assert process.returncode == 0, (list(words), said)
    return said


@contextlib.contextmanager
def network() -> Iterator[int]:
    """A network with a loopback interface only, as long as the block lasts; yields a process in it."""
    words = ["unshare", "--net", "sh", "-ec", "ip link set lo up; echo up; exec sleep infinity"]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as holder:
        try:
            assert holder.stdout is not None
            assert holder.stdout.readline() == "up\n"
            yield holder.pid
        finally:
            holder.kill()
