"""kill -9 at every failpoint: the run ends as if nobody had died. And what switches failpoints on, and what cannot."""

from __future__ import annotations

import ast
import errno
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from support.fleets import assert_no_upload_lost, record
from support.long import long_except
from support.small_run import DEVICES, FRAGILE, SmallRun, small_run, store_of

from fleetdistill.state import failpoints
from fleetdistill.state.failpoints import FAILPOINTS, VARIABLE, FailpointError
from fleetdistill_server.store.location import Location

ROOT = Path(__file__).parents[2]
WHO = {
    "front": ("disk.", "blob.", "front."),
    "engine": ("engine.contract.", "disk.", "engine.start.", "blob.", "engine."),
    FRAGILE: ("disk.", "device."),
}
"""Which points a process hits in a run, in the order in which it comes by; those of others have tests of their own."""
ELSEWHERE = (
    "engine.quarantine.",
    "engine.training.",
    "device.privacy.",
    "device.secure.",
    "device.roll-back.",
    "device.forget.",
)
"""Points that a run hits only with damage, long training, privacy, secure sums, a roll-back or an erasing device."""
_ENGINE = ("engine.contract.", "engine.start.", "blob.", "engine.asks.", "disk.before-", "engine.answer.")
WITH_OBJECTS = {**WHO, "engine": (*_ENGINE, "engine.short.", "disk.", "engine.")}
"""The same with an object store: files are renamed only where an object is first read, and read again once renamed."""


def points_of(prefixes: Sequence[str]) -> list[str]:
    result = (point for prefix in prefixes for point in FAILPOINTS if point.startswith(prefix))
    return list(dict.fromkeys(point for point in result if not point.startswith(ELSEWHERE)))


POINTS = {process: points_of(prefixes) for process, prefixes in WHO.items()}


def outcome(run: SmallRun) -> dict[str, Any]:
    """All that must be the same whoever was killed; every receipt that a device heard of is used or reported, once."""
    place = run.place
    with store_of(place) as store:
        heard = [place.receipts(name).read_text().splitlines() for name in DEVICES]
        assert_no_upload_lost(store, {receipt for item in heard for receipt in item})
        assert sum(len(set(item)) for item in heard) == len(store.asks.uploads("simulation"))
        result = record(store)
    names = ("state.safetensors", "delivered.safetensors")
    return {**result, "devices": [(place.work / item / name).read_bytes() for item in DEVICES for name in names]}


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    with small_run(tmp_path_factory.mktemp("undisturbed") / "run") as run:
        run.finish()
        result = outcome(run)
    assert {status for *_, status, _ in result["uploads"]} == {"used", "reported"}
    return result


@pytest.mark.slow
@pytest.mark.parametrize("process", long_except(POINTS, "engine"))
def test_kills_at_every_point_change_nothing(
    process: str, location: Location, undisturbed: dict[str, Any], tmp_path: Path
) -> None:
    """Each life ends at the next point of the table; so they stand there in the order in which a run comes by."""
    points = points_of((WITH_OBJECTS if location.blobs else WHO)[process])
    with small_run(tmp_path / "run", {process: [f"{point}=kill" for point in points]}, location) as run:
        run.finish()
        assert points[: run.kills(process)] == points, "a run does not come by the next point any more"
        assert outcome(run) == undisturbed


# --- the table


def hits() -> list[str]:
    """The name in every call of `failpoints.hit`."""
    files = [*(ROOT / "client_sdk").rglob("*.py"), *(ROOT / "server").rglob("*.py")]
    return [name for file in files for name in re.findall(r'failpoints\.hit\("([^"]+)"\)', file.read_text())]


def test_the_table_is_what_the_code_hits() -> None:
    assert set(hits()) == set(FAILPOINTS)
    calls = sum(file.read_text().count("failpoints.hit(") for file in (ROOT / "server").rglob("*.py"))
    calls += sum(file.read_text().count("failpoints.hit(") for file in (ROOT / "client_sdk").rglob("*.py"))
    documented = 2  # in the module's own docstrings
    assert calls - documented == len(hits()) - 1, "a call of failpoints.hit does not name its point"


def rows() -> dict[str, tuple[str, list[str]]]:
    """Failpoint to what may be lost there and the tests that kill there, from the page."""
    page = (ROOT / "docs" / "explanation" / "durability.md").read_text(encoding="utf-8")
    table = page.split("## Failpoints\n")[1].split("\n## ")[0]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines() if "`" in line]
    return {
        name.strip("`"): (loss, re.findall(r"`([^`]+)`", tests))
        for name, loss, tests in (row for row in cells if len(row) == 3)
    }


def test_the_page_has_every_failpoint() -> None:
    assert list(rows()) == list(FAILPOINTS)
    assert all(loss for loss, _ in rows().values())


@pytest.mark.parametrize("point", FAILPOINTS)
def test_the_tests_that_the_page_names_kill_there(point: str) -> None:
    """All cases of this file that kill there, or a function of another file that speaks of the point."""
    named = rows()[point][1]
    cases = [item for item in named if item.startswith("[")]
    assert cases == [f"[{process}]" for process, points in POINTS.items() if point in points]
    for test in named[len(cases) :]:
        path, _, function = test.partition("::")
        source = (ROOT / "tests" / path).read_text(encoding="utf-8")
        assert function in {item.name for item in ast.walk(ast.parse(source)) if isinstance(item, ast.FunctionDef)}, (
            test
        )
        assert all(word in source for word in point.rsplit(".", 1)), f"{path} does not speak of {point}"
    assert named


# --- switching on


@pytest.fixture(autouse=True)
def all_off() -> Iterator[None]:
    yield
    failpoints.switch_on("")


def run_python(code: str, value: str | None = None) -> subprocess.CompletedProcess[str]:
    environment = {name: text for name, text in os.environ.items() if name != VARIABLE}
    environment |= {VARIABLE: value} if value is not None else {}
    code = f"from fleetdistill.state import failpoints\n{code}"
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)


HIT = "failpoints.hit('disk.before-rename')"


@pytest.mark.parametrize("value", [None, "", " "])
def test_without_the_variable_a_hit_does_nothing_at_all(value: str | None) -> None:
    done = run_python("import dis; print(*(one.opname for one in dis.get_instructions(failpoints.hit)))", value)
    assert set(done.stdout.split()) <= {"RESUME", "LOAD_CONST", "RETURN_VALUE", "RETURN_CONST"}
    assert done.stderr == ""


def test_the_variable_kills_the_process_at_the_hit_that_it_names() -> None:
    code = f"for number in range(5): print(number, flush=True); {HIT}"
    done = run_python(code, "disk.before-fsync=exit; disk.before-rename=kill@3")
    assert (done.returncode, done.stdout.split()) == (-9, ["0", "1", "2"])


def test_a_process_says_at_its_start_that_it_will_fail() -> None:
    done = run_python("print('works')", "disk.before-rename=kill@3")
    assert done.stdout == "works\n"
    expected = f"warning: {VARIABLE} is set, so this process fails on purpose: disk.before-rename=kill@3\n"
    assert done.stderr == expected


def test_unknown_name_in_variable_is_refused_with_known_names() -> None:
    done = run_python("print('works')", "disk.before-renam=kill")
    assert (done.returncode, done.stdout) == (1, "")
    last = done.stderr.splitlines()[-1]
    assert "unknown failpoint 'disk.before-renam'" in last
    assert all(name in last for name in FAILPOINTS)


def test_exit_ends_the_process_at_once() -> None:
    done = run_python(f"import atexit; atexit.register(print, 'cleaned up'); {HIT}", "disk.before-rename=exit:7")
    assert (done.returncode, done.stdout) == (7, "")


@pytest.mark.parametrize(
    "action", ["", "stop", "kill:9", "sleep", "sleep:long", "error:ENOTHING", "exit:x", "kill@0", "kill@x"]
)
def test_an_unknown_action_is_refused(action: str) -> None:
    with pytest.raises(FailpointError, match="has action") as refusal:
        failpoints.switch_on(f"disk.before-rename={action}")
    assert repr(action) in str(refusal.value)


def test_an_error_is_that_of_the_operating_system() -> None:
    with failpoints.switched_on("disk.before-rename=error:ENOSPC;disk.before-fsync=error"):
        with pytest.raises(OSError, match="a failpoint") as full:
            failpoints.hit("disk.before-rename")
        with pytest.raises(OSError, match="a failpoint") as broken:
            failpoints.hit("disk.before-fsync")
    assert (full.value.errno, broken.value.errno) == (errno.ENOSPC, errno.EIO)
    failpoints.hit("disk.before-rename")


def test_only_the_named_hit_counts_and_a_star_counts_all() -> None:
    with failpoints.switched_on("disk.before-rename=error@2;*=error:ENOSPC@4"):
        failpoints.hit("disk.before-rename")
        failpoints.hit("disk.before-fsync")
        with pytest.raises(OSError, match="a failpoint"):
            failpoints.hit("disk.before-rename")
        with pytest.raises(OSError, match="a failpoint") as fourth:
            failpoints.hit("disk.before-fsync")
        failpoints.hit("disk.before-rename")
    assert fourth.value.errno == errno.ENOSPC


def test_failpoint_missing_from_table_is_found_if_any_is_on() -> None:
    with failpoints.switched_on("disk.before-rename=kill@9"), pytest.raises(FailpointError, match="not in FAILPOINTS"):
        failpoints.hit("disk.somewhere")
