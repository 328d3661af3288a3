"""Mutates the mathematics, one operator or number at a time, and looks whether its tests see it.

    PYTHONPATH=client_sdk:server:tests python -m mutation --mutants 100 --seed 1

Every mutant is a process forked from one that has loaded torch; the tests of its module run in it, up to the first
failure. A mutant that changes nothing that anybody could see (an equivalent one) counts as a survivor all the same.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import copy
import importlib.util
import os
import random
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from pathlib import Path

TESTS = Path(__file__).parents[1]
MATHEMATICS = {
    "fleetdistill.training.losses": ["training/test_losses.py", "methods/feddkd/test_feddkd.py"],
    "fleetdistill.methods.cdkt.transfer": ["methods/cdkt/test_cdkt.py"],
    "fleetdistill.methods.dafkd.training": [
        "methods/dafkd/test_losses.py",
        "methods/dafkd/test_ensemble.py",
        "methods/dafkd/test_device.py",
    ],
    "fleetdistill.methods.classstats_secure.encoding": ["methods/classstats_secure/test_encoding.py"],
    "fleetdistill.methods.classstats_secure.noise": ["methods/classstats_secure/test_noise.py"],
    "fleetdistill.secure.member": ["secure/test_member.py"],
    "fleetdistill.secure.primitives": ["secure/test_primitives.py", "secure/test_shares.py"],
    "fleetdistill.secure.session": ["secure/test_session.py", "secure/test_member.py"],
    "fleetdistill_server.methods.averaging": ["methods/test_averaging.py"],
    "fleetdistill_server.methods.feddkc.kkr": ["methods/feddkc/test_refinement.py"],
    "fleetdistill_server.methods.feddkc.skr": ["methods/feddkc/test_refinement.py"],
    "fleetdistill_server.methods.feddkc.kernels": ["methods/feddkc/test_refinement.py"],
    "fleetdistill_server.methods.classstats.merge": ["methods/classstats/test_one_exchange.py"],
    "fleetdistill_server.methods.classstats_secure.sum_server": ["methods/classstats_secure/test_plausibility.py"],
    "fleetdistill_server.methods.secure.secure_sum": ["methods/secure/test_unmasking.py"],
}
"""A module of formulas, and the tests that are about it."""
SECONDS = 120
"""A mutant that takes longer has been noticed: its loop does not end."""
SWAPS: dict[type[ast.AST], type[ast.AST]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Div,
    ast.Div: ast.Mult,
    ast.Pow: ast.Mult,
    ast.MatMult: ast.Mult,
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.And: ast.Or,
    ast.Or: ast.And,
    ast.USub: ast.UAdd,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
}


@dataclass(frozen=True)
class Mutant:
    """The place of one change in a module: the `number`th of those that can be changed."""

    module: str
    number: int
    line: int
    change: str


def source_of(module: str) -> Path:
    """Where a module's code is, without importing it."""
    result = PathFinder.find_spec(module.rpartition(".")[2], [str(_folder(module.rpartition(".")[0]))])
    assert result is not None
    assert result.origin is not None, module
    return Path(result.origin)


def _folder(package: str) -> Path:
    for entry in sys.path:
        folder = Path(entry, *package.split("."))
        if folder.is_dir():
            return folder
    raise ImportError(package)


def places(tree: ast.Module) -> Iterator[tuple[ast.AST, str]]:
    """Everything within functions that can be changed, in the file's order, and into what."""
    for function in ast.walk(tree):
        if not isinstance(function, ast.FunctionDef):
            continue
        for node in ast.walk(ast.Module(body=function.body, type_ignores=[])):
            for operator in _operators(node):
                if type(operator) in SWAPS:
                    yield node, f"{type(operator).__name__} -> {SWAPS[type(operator)].__name__}"
            if isinstance(node, ast.Constant) and isinstance(node.value, int | float) and not _is_bool(node):
                yield node, f"{node.value} -> {node.value + 1}"


def _is_bool(node: ast.Constant) -> bool:
    return isinstance(node.value, bool)


def _operators(node: ast.AST) -> list[ast.AST]:
    if isinstance(node, ast.BinOp | ast.AugAssign | ast.UnaryOp | ast.BoolOp):
        return [node.op]
    return list(node.ops[:1]) if isinstance(node, ast.Compare) else []


def mutants(module: str) -> list[Mutant]:
    """All mutants of a module."""
    result = places(ast.parse(source_of(module).read_text(encoding="utf-8")))
    return [Mutant(module, number, node.lineno, change) for number, (node, change) in enumerate(result)]  # type: ignore[attr-defined]


def mutated(mutant: Mutant) -> ast.Module:
    """The module's code with the one change."""
    tree = ast.parse(source_of(mutant.module).read_text(encoding="utf-8"))
    node, _ = list(places(tree))[mutant.number]
    if isinstance(node, ast.Constant):
        node.value += 1  # type: ignore[operator]
    elif isinstance(node, ast.Compare):
        node.ops[0] = SWAPS[type(node.ops[0])]()  # type: ignore[call-overload]
    else:
        node.op = SWAPS[type(node.op)]()  # type: ignore[attr-defined]
    return ast.fix_missing_locations(copy.deepcopy(tree))


class Mutating(SourceFileLoader):
    """Loads the mutant where the module is asked for."""

    def __init__(self, mutant: Mutant) -> None:
        super().__init__(mutant.module, str(source_of(mutant.module)))
        self.mutant = mutant

    def get_code(self, fullname: str) -> object:  # type: ignore[override]
        return compile(mutated(self.mutant), self.path, "exec")


class Finder:
    """Finds the mutated module before Python's own finders do."""

    def __init__(self, mutant: Mutant) -> None:
        self._mutant = mutant

    def find_spec(self, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        """As importlib asks."""
        return importlib.util.spec_from_loader(name, Mutating(self._mutant)) if name == self._mutant.module else None


def is_seen(mutant: Mutant | None, tests: list[str]) -> bool:
    """Whether a test fails, in a process of its own."""
    child = os.fork()
    if not child:
        _test(mutant, tests)
    until = time.monotonic() + SECONDS
    while time.monotonic() < until:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return status != 0
        time.sleep(0.02)
    os.kill(child, 9)
    os.waitpid(child, 0)
    return True


def _test(mutant: Mutant | None, tests: list[str]) -> None:
    import pytest

    if mutant is not None:
        assert mutant.module not in sys.modules, "it would not be mutated"
        sys.meta_path.insert(0, Finder(mutant))
    nothing = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nothing, 1)
    os.dup2(nothing, 2)
    status = 1
    with contextlib.suppress(BaseException):
        names = [str(TESTS / name) for name in tests]
        status = int(pytest.main(["-x", "-q", "-m", "not slow", "-p", "no:cacheprovider", "-p", "no:randomly", *names]))
    os._exit(status)


def main() -> int:
    """Prints every mutant, and how many mutants were seen."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mutants", type=int, default=100)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--module", action="append", choices=MATHEMATICS)
    wanted = parser.parse_args()
    chosen = {name: MATHEMATICS[name] for name in wanted.module or MATHEMATICS}
    everything = [mutant for name in chosen for mutant in mutants(name)]
    sample = random.Random(wanted.seed).sample(everything, min(wanted.mutants, len(everything)))
    import hypothesis  # noqa: F401  (all that takes long to load is loaded once, before the forks)
    import torch._dynamo  # noqa: F401

    for tests in {tuple(item) for item in chosen.values()}:
        assert not is_seen(None, list(tests)), f"{tests} fail without a mutant"
    seen = 0
    for mutant in sample:
        is_caught = is_seen(mutant, chosen[mutant.module])
        seen += is_caught
        print(f"{'seen' if is_caught else 'SURVIVES'}: {mutant.module}:{mutant.line}: {mutant.change}", flush=True)
    print(f"{seen} of {len(sample)} mutants were seen ({seen / len(sample):.0%}); there are {len(everything)} in all")
    return 0


if __name__ == "__main__":
    sys.exit(main())
