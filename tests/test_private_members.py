"""Tests use public names: what reaches for a private member of our packages is counted, and has a reason here."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
MOST = 48
"""Fewer is better: look for a public way first."""
REASONS = {
    "spoils what the product has no switch for, to see that a test of it can fail": (
        *("_asked", "_check_values", "_fits", "_request", "_due", "_check_unique", "_check_step", "_FULL"),
    ),
    "lowers a bound that no test can reach": ("_max_answer_bytes", "_max_bytes", "_storage", "_downloads"),
    "an app never gets what computes for it": ("_check_in", "_backend"),
    "looks at the link of a device, or puts another event sink under it": ("_parts", "_lock", "_api"),
    "a device that is asked and never answers": ("_handler",),
    "halts an engine between two of its steps": ("_close", "_store"),
    "a sweep, or an error, in the middle of a commit": ("_commit", "_guard"),
    "nothing may be left in memory, which has no public view": (
        *("_streams", "_staging", "_states", "_thread", "_jobs", "_calls"),
    ),
    "a cache or a lease whose seconds pass at once, or have passed": ("_registered", "_leases", "_away"),
    "a forked process uses the fork server of its parent": ("_forkserver",),
    "a browser's event loop stays open between tests that start loops of their own": ("_set_running_loop",),
    "what the standard library has found out about this system": (
        *("_USE_CP_SENDFILE", "_use_fd_functions", "_ntuple_diskusage"),
    ),
}
"""Why tests reach for a private member, and for which."""
PUBLIC = ("_asdict", "_replace", "_exit")
"""Of named tuples and `os`: public for all their underscore."""


def private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__") and name not in PUBLIC


def reaches(path: Path) -> Iterator[tuple[int, str]]:
    """Lines where a file takes a private member of something that it does not define itself."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    nodes = list(ast.walk(tree))
    own = {node.name for node in nodes if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)}
    attributes = [node for node in nodes if isinstance(node, ast.Attribute)]
    own |= {node.attr for node in attributes if isinstance(node.ctx, ast.Store) and _is_self(node)}
    own |= {node.target.id for node in nodes if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)}
    for node in nodes:
        if isinstance(node, ast.Attribute) and private(node.attr) and not _is_self(node) and node.attr not in own:
            yield node.lineno, node.attr
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("fleetdistill"):
            yield from ((node.lineno, name.name) for name in node.names if private(name.name))
        elif isinstance(node, ast.Call) and _patches(node):
            yield from ((node.lineno, arg.value) for arg in node.args[1:2] if _names_private(arg))  # type: ignore[attr-defined]


def _is_self(node: ast.Attribute) -> bool:
    return isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")


def _patches(node: ast.Call) -> bool:
    return isinstance(node.func, ast.Attribute) and node.func.attr in ("setattr", "delattr")


def _names_private(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, str) and private(node.value)


@cache
def found() -> list[tuple[str, int, str]]:
    return [
        (str(path.relative_to(TESTS)), line, name)
        for path in sorted(TESTS.rglob("*.py"))
        for line, name in reaches(path)
    ]


@pytest.mark.long
def test_few_tests_reach_for_private_members() -> None:
    assert len(found()) <= MOST, "\n".join(map(str, found()))


@pytest.mark.long
def test_each_private_member_that_is_reached_for_has_a_reason() -> None:
    named = {name for names in REASONS.values() for name in names}
    assert {name for _, _, name in found()} == named
