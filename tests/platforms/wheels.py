"""`make wheels`: resolves every extra of pyproject.toml to wheels for each system and Python version; downloads none.

    python tests/platforms/wheels.py                     every system, Python version and extra
    python tests/platforms/wheels.py --extras train tls  two extras

`uv pip compile --only-binary :all:` resolves for another system with that system's environment markers. `pip download
--platform` would evaluate them for the system that it runs on, such as torch's dependencies on CUDA packages. Needs a
package index; prints no address of one.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import sysconfig
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PYTHONS = ("3.11", "3.12", "3.13")
SYSTEMS = {
    "Linux x86-64": "x86_64-manylinux_2_28",
    "Linux arm64": "aarch64-manylinux_2_28",
    "macOS arm64": "aarch64-apple-darwin",
    "Windows x86-64": "x86_64-pc-windows-msvc",
    "macOS x86-64": "x86_64-apple-darwin",
}
"""Systems by their name in the table, as uv calls them."""
BASE = "(base)"
"""Name of the dependencies without any extra."""
_PIN = re.compile(r"^([\w.-]+)==(\S+)", re.MULTILINE)


@dataclass(frozen=True)
class Resolved:
    """Result of one extra on one system with one Python version.

    Attributes:
        versions: Versions by package; empty if a package has no wheel.
        missing: uv's reason; empty if every package has a wheel.
    """

    versions: Mapping[str, str]
    missing: str = ""


Table = dict[tuple[str, str, str], Resolved]
"""Results by extra, system and Python version."""


def extras() -> list[str]:
    """Returns the names of pyproject.toml's extras after `BASE`."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    return [BASE, *project["optional-dependencies"]]


def uv_command(extra: str, system: str, python: str) -> list[str]:
    """Returns the command that resolves one extra to wheels, without downloading them."""
    uv = Path(sysconfig.get_path("scripts")) / "uv"
    command = [str(uv), "pip", "compile", "pyproject.toml", "--quiet", "--no-header", "--no-annotate"]
    command += ["--only-binary", ":all:", "--python-version", python, "--python-platform", SYSTEMS[system]]
    return command + ([] if extra == BASE else ["--extra", extra])


def resolve(extra: str, system: str, python: str) -> Resolved:
    """Resolves one extra for one system and Python version."""
    done = subprocess.run(uv_command(extra, system, python), cwd=ROOT, capture_output=True, text=True)
    if done.returncode == 0:
        return Resolved(dict(_PIN.findall(done.stdout)))
    return Resolved({}, reason(done.stderr))


def reason(text: str) -> str:
    """Returns uv's message as one line without addresses."""
    line = " ".join(re.sub(r"[│╰─▶×]", " ", text).split())
    return re.sub(r"\S+://\S+", "(address)", line.partition("cause: ")[2] or line)


def cell(of_pythons: Mapping[str, Resolved]) -> str:
    """Returns a cell of the table: `ok`, or the Python versions for which a wheel is missing."""
    without = [python for python, one in of_pythons.items() if one.missing]
    if not without:
        return "ok"
    return "no wheel" if len(without) == len(of_pythons) else f"no wheel for {', '.join(without)}"


def as_table(found: Table) -> str:
    """Returns the table of extras and systems as Markdown."""
    systems = list(dict.fromkeys(system for _, system, _ in found))
    lines = ["| extra | " + " | ".join(systems) + " |", "|---" * (len(systems) + 1) + "|"]
    for extra in dict.fromkeys(extra for extra, _, _ in found):
        cells = [
            cell({python: one for (name, where, python), one in found.items() if (name, where) == (extra, system)})
            for system in systems
        ]
        lines.append(f"| {extra} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def versions(found: Table) -> str:
    """Returns each package with all its resolved versions, as Markdown."""
    known: dict[str, set[str]] = {}
    for item in found.values():
        for package, version in item.versions.items():
            known.setdefault(package, set()).add(version)
    return "\n".join(f"* {package} {', '.join(sorted(known[package]))}" for package in sorted(known))


def reasons(found: Table) -> Iterator[str]:
    """Yields one line for each reason why wheels are missing, with the places where they are."""
    places: dict[str, list[str]] = {}
    for (extra, system, python), one in found.items():
        if one.missing:
            places.setdefault(one.missing, []).append(f"{extra} on {system} with Python {python}")
    for missing, where in places.items():
        yield f"{'; '.join(where)}: {missing}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Resolves everything and prints the table, the versions and what is missing."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--extras", nargs="*", default=extras())
    parser.add_argument("--systems", nargs="*", choices=SYSTEMS, default=list(SYSTEMS))
    given = parser.parse_args(arguments)
    result: Table = {}
    for extra in given.extras:
        for system in given.systems:
            for python in PYTHONS:
                result[extra, system, python] = resolve(extra, system, python)
                print(f"{extra}, {system}, Python {python}: {result[extra, system, python].missing or 'ok'}")
    print("", as_table(result), "", versions(result), "", *reasons(result), sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
