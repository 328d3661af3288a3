"""The checks of tools/structure.py find what they are for, in a small project with one fault each."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[1]
FILES = {
    "client_sdk/fleetdistill/__init__.py": "",
    "client_sdk/fleetdistill/names.py": "def check(name: str) -> str:\n    return name\n" + "\n" * 60,
    "server/fleetdistill_lab/audit.py": "\n" * 61,
    "server/fleetdistill_server/__init__.py": "",
    "tests/test_names.py": "",
    "server/fleetdistill_server/store/__init__.py": "",
    "server/fleetdistill_server/store/states.py": "from fleetdistill.names import check\n" + "\n" * 60,
}


@pytest.fixture(scope="module")
def structure() -> ModuleType:
    spec = importlib.util.spec_from_file_location("structure", ROOT / "tools" / "structure.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["structure"] = module
    spec.loader.exec_module(module)
    return module


def problems(structure: ModuleType, folder: Path, changes: dict[str, str]) -> list[str]:
    """What the checks say of the small project after changes of its files, with the limits of before them."""
    for name, text in FILES.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    budgets = structure.measure(structure.read_modules(folder))
    for name, text in changes.items():
        (folder / name).write_text(text)
    modules = structure.read_modules(folder)
    return [
        *structure.check_budgets(modules, budgets),
        *structure.check_small_modules(modules, []),
        *structure.check_circles(modules, []),
        *structure.check_annexes(modules),
        *structure.check_rows(modules),
        *structure.check_statuses(modules),
        *structure.check_words(modules, {}),
        *structure.check_test_names(folder),
    ]


LONG = "\n" * 60
FAULTS = {
    "a folder with more lines": ({"client_sdk/fleetdistill/names.py": LONG * 2}, "the budget is 2 and 62"),
    "a folder with more files": ({"client_sdk/fleetdistill/more.py": ""}, "fleetdistill has 3 files"),
    "a small module with one importer": (
        {"client_sdk/fleetdistill/names.py": "def check(name: str) -> str:\n    return name\n"},
        "fleetdistill.names has 2 lines and one importer",
    ),
    "a circle under TYPE_CHECKING": (
        {
            "client_sdk/fleetdistill/names.py": "from typing import TYPE_CHECKING\n"
            "if TYPE_CHECKING:\n    from fleetdistill_server.store import states\n" + LONG
        },
        "import circle: fleetdistill.names, fleetdistill_server.store.states",
    ),
    "a circle in a function": (
        {
            "client_sdk/fleetdistill/names.py": "def check() -> None:\n"
            "    import fleetdistill_server.store.states\n" + LONG
        },
        "import circle",
    ),
    "an annex that imports a private name": (
        {"server/fleetdistill_lab/audit.py": "from fleetdistill.names import check\n" + LONG},
        "audit.py:1: fleetdistill.names has no check in its `__all__`",
    ),
    "rows outside the store": (
        {"client_sdk/fleetdistill/names.py": "from database import Row\n" + LONG},
        "names.py:1: imports `Row`",
    ),
    "SQL outside the store": (
        {"client_sdk/fleetdistill/names.py": 'NEWEST = "SELECT max(round) FROM rounds"\n' + LONG},
        "names.py:1: has SQL",
    ),
    "a status as a text": (
        {"client_sdk/fleetdistill/names.py": "def over(run):\n    return run.status == 'finished'\n" + LONG},
        "compares a status with 'finished'",
    ),
    "a test with a long name": (
        {"tests/test_names.py": f"def test_{'x' * 56}(): ...\n"},
        "has more than 60 characters",
    ),
    "a word that the field does not use": (
        {"client_sdk/fleetdistill/names.py": "_MOST_BYTES = 1\n" + LONG},
        "1 names begin with 'most_', at most 0 may; write 'max_'",
    ),
}


def test_the_small_project_has_no_fault(structure: ModuleType, tmp_path: Path) -> None:
    assert problems(structure, tmp_path, {}) == []


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_found(structure: ModuleType, tmp_path: Path, fault: str) -> None:
    changes, expected = FAULTS[fault]
    assert any(expected in problem for problem in problems(structure, tmp_path, changes))


def test_budgets_are_written_into_the_project(structure: ModuleType) -> None:
    text = '[tool.structure.budgets]\n"old" = [1, 2]\n\n[other]\n'
    written = structure.with_budgets(text, {"fleetdistill": (3, 400)})
    assert written == '[tool.structure.budgets]\n"fleetdistill" = [3, 400]\n\n[other]\n'
