"""Checks the structure of the product's packages against `[tool.structure]` in pyproject.toml; `make check` runs it.

CONTRIBUTING.md says why. Every limit is today's number: a commit that raises one says why, and one that reaches a lower
number writes it down, so that nothing grows back unseen.

    python tools/structure.py            # prints what is wrong; exits with 1 if anything is
    python tools/structure.py --write    # writes today's budgets of files and lines into pyproject.toml
"""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).parents[1]
ROOTS = ("client_sdk", "server")
CORE = ("fleetdistill", "fleetdistill_server")
GENERATED = "wire/v1"
SMALL_LINES = 60
MAX_TEST_NAME = 60
STATUSES = (
    *("created", "preparing", "running", "paused", "stopped", "finished", "cancelled"),
    *("open", "closed", "short", "undone", "answered", "out", "acknowledged", "used", "reported"),
)
EXPERIMENTS = "fleetdistill_lab.experiments.results"
"""The one module outside the store that has a database of its own."""
SQL = re.compile(r"\s*(SELECT\s|INSERT INTO\s|UPDATE \w+ SET\s|DELETE FROM\s|CREATE (TABLE|INDEX)\s|WITH \w+ AS )")
WORDS = {"most_": "max_", "least_": "min_", "longest_": "max_", "largest_": "max_", "led_": "control_"}
"""Beginnings of names, and what the name begins with in the field's words."""


class Module:
    """A source file, with its name, its lines and its syntax tree."""

    def __init__(self, path: Path, base: Path) -> None:
        parts = path.relative_to(base).with_suffix("").parts
        self.path = path
        self.is_package = parts[-1] == "__init__"
        self.name = ".".join(parts[:-1] if self.is_package else parts)
        self.text = path.read_text(encoding="utf-8")
        self.lines = len(self.text.splitlines())
        self.tree = ast.parse(self.text)

    @property
    def folder(self) -> str:
        """The package and its first folder, such as `fleetdistill_server/store`."""
        parts = self.name.split(".")
        return "/".join(parts[:2]) if len(parts) > 2 or self.is_package else parts[0]


def read_modules(root: Path) -> dict[str, Module]:
    """Returns the modules of the product by name, without generated ones."""
    files = [(root / base, path) for base in ROOTS for path in sorted((root / base).rglob("*.py"))]
    modules = [Module(path, base) for base, path in files if GENERATED not in path.as_posix()]
    return {module.name: module for module in modules}


def imports_of(module: Module, modules: Mapping[str, Module]) -> set[str]:
    """Returns the modules that a module imports anywhere, under TYPE_CHECKING and inside functions included."""
    result = set()
    for node in ast.walk(module.tree):
        if isinstance(node, ast.ImportFrom) and node.module:
            names = (f"{node.module}.{alias.name}" for alias in node.names)
            result |= {name if name in modules else node.module for name in names}
        elif isinstance(node, ast.Import):
            result |= {alias.name for alias in node.names}
    return {name for name in result if name in modules and name != module.name}


def check_budgets(modules: Mapping[str, Module], budgets: Mapping[str, Sequence[int]]) -> Iterator[str]:
    """Yields the folders with more files or lines than their budget `[files, lines]`."""
    for folder, (files, lines) in measure(modules).items():
        max_files, max_lines = budgets.get(folder, (0, 0))
        if files > max_files or lines > max_lines:
            yield (
                f"{folder} has {files} files and {lines} lines, the budget is {max_files} and {max_lines}; make it "
                "smaller, or raise the budget in pyproject.toml with the reason in the commit"
            )


def measure(modules: Mapping[str, Module]) -> dict[str, tuple[int, int]]:
    """Returns the numbers of files and lines by folder."""
    folders = defaultdict[str, list[int]](list)
    for module in modules.values():
        folders[module.folder].append(module.lines)
    return {folder: (len(lines), sum(lines)) for folder, lines in sorted(folders.items())}


def check_small_modules(modules: Mapping[str, Module], allowed: Sequence[str]) -> Iterator[str]:
    """Yields modules below 60 lines with one importer that are not allowed, and allowed ones that are none."""
    importers = Counter[str]()
    for module in modules.values():
        if not module.is_package:
            importers.update(imports_of(module, modules))
    small = {
        module.name
        for module in modules.values()
        if not module.is_package and module.lines < SMALL_LINES and importers[module.name] == 1
    }
    for name in sorted(small - set(allowed)):
        yield f"{name} has {modules[name].lines} lines and one importer; it belongs in the module that imports it"
    for name in sorted(set(allowed) - small):
        yield f"small_modules lists {name}, which is no small module with one importer any more; remove it"


def check_circles(modules: Mapping[str, Module], allowed: Sequence[Sequence[str]]) -> Iterator[str]:
    """Yields the import circles that are not allowed. Packages are left out: their `__init__` only exports names."""
    graph = {name: set() if module.is_package else imports_of(module, modules) for name, module in modules.items()}
    circles = [circle for circle in strongly_connected(graph) if len(circle) > 1]
    known = [sorted(circle) for circle in allowed]
    for circle in circles:
        if circle not in known:
            yield f"import circle: {', '.join(circle)}; move what they share into one of them or a third module"
    for circle in known:
        if circle not in circles:
            yield f"known_circles lists {', '.join(circle)}, which is no circle any more; remove it"


def strongly_connected(graph: Mapping[str, set[str]]) -> list[list[str]]:
    """Returns the strongly connected components of a graph, each sorted (Tarjan 1972)."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    components = []

    def visit(node: str) -> None:
        index[node] = low[node] = len(index)
        stack.append(node)
        for other in sorted(graph[node]):
            if other not in index:
                visit(other)
                low[node] = min(low[node], low[other])
            elif other in stack:
                low[node] = min(low[node], index[other])
        if low[node] == index[node]:
            place = stack.index(node)
            components.append(sorted(stack[place:]))
            del stack[place:]

    sys.setrecursionlimit(10_000)
    for node in sorted(graph):
        if node not in index:
            visit(node)
    return components


def check_annexes(modules: Mapping[str, Module]) -> Iterator[str]:
    """Yields the names that an annex imports from the core although the `__all__` of their module lacks them."""
    core = {name: module for name, module in modules.items() if name.split(".")[0] in CORE}
    public = {name: public_names(module) for name, module in core.items()}
    for module in modules.values():
        if module.name.split(".")[0] in CORE:
            continue
        for node in ast.walk(module.tree):
            if not isinstance(node, ast.ImportFrom) or (node.module or "") not in core:
                continue
            for alias in node.names:
                if alias.name not in public[node.module or ""]:
                    yield f"{module.path}:{node.lineno}: {node.module} has no {alias.name} in its `__all__`"


def public_names(module: Module) -> set[str]:
    """Returns the names in a module's `__all__`; empty without one."""
    for node in module.tree.body:
        if isinstance(node, ast.Assign) and any(ast.unparse(target) == "__all__" for target in node.targets):
            return set(ast.literal_eval(node.value))
    return set()


def check_rows(modules: Mapping[str, Module]) -> Iterator[str]:
    """Yields modules outside the store that use the database's rows or have SQL of their own."""
    for module in modules.values():
        if ".store." in f"{module.name}." or module.name == EXPERIMENTS:
            continue
        for node in ast.walk(module.tree):
            if isinstance(node, ast.ImportFrom) and any(alias.name == "Row" for alias in node.names):
                yield f"{module.path}:{node.lineno}: imports `Row`; return a record of the store instead"
            elif isinstance(node, ast.Constant) and isinstance(node.value, str) and SQL.match(node.value):
                yield f"{module.path}:{node.lineno}: has SQL, which belongs in the store"


def check_statuses(modules: Mapping[str, Module]) -> Iterator[str]:
    """Yields comparisons of a status with a text outside the store, which has enums for them."""
    for module in modules.values():
        if ".store." in module.name:
            continue
        for node in ast.walk(module.tree):
            if not isinstance(node, ast.Compare) or "status" not in ast.unparse(node):
                continue
            texts = [item for item in ast.walk(node) if isinstance(item, ast.Constant) and item.value in STATUSES]
            for text in texts:
                yield f"{module.path.name}:{node.lineno}: compares a status with {text.value!r}; use the enum"


def check_words(modules: Mapping[str, Module], max_uses: Mapping[str, int]) -> Iterator[str]:
    """Yields an error if more names than before begin with a word that the field does not use."""
    uses = Counter[str]()
    for module in modules.values():
        for name in defined_names(module.tree):
            plain = name.lstrip("_").lower()
            uses.update(word for word in WORDS if plain.startswith(word))
    for word, instead in WORDS.items():
        limit = max_uses.get(word, 0)
        if uses[word] > limit:
            yield f"{uses[word]} names begin with {word!r}, at most {limit} may; write {instead!r}"
        elif uses[word] < limit:
            yield f"only {uses[word]} names begin with {word!r}: set its number in pyproject.toml to that"


def defined_names(tree: ast.AST) -> Iterator[str]:
    """Yields the names of functions, classes, arguments and assigned variables."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.arg):
            yield node.arg
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id


def check_test_names(root: Path) -> Iterator[str]:
    """Yields the tests whose names have more than 60 characters."""
    for path in sorted((root / "tests").rglob("test_*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef) and node.name.startswith("test_") and len(node.name) > MAX_TEST_NAME:
                yield f"{path}:{node.lineno}: {node.name} has more than {MAX_TEST_NAME} characters"


def main(arguments: Sequence[str]) -> int:
    """Runs all checks; returns the exit status."""
    project = ROOT / "pyproject.toml"
    modules = read_modules(ROOT)
    if "--write" in arguments:
        project.write_text(with_budgets(project.read_text(encoding="utf-8"), measure(modules)), encoding="utf-8")
    limits = tomllib.loads(project.read_text(encoding="utf-8"))["tool"]["structure"]
    problems = [
        *check_budgets(modules, limits["budgets"]),
        *check_small_modules(modules, limits["small_modules"]),
        *check_circles(modules, limits["known_circles"]),
        *check_annexes(modules),
        *check_rows(modules),
        *check_statuses(modules),
        *check_words(modules, limits["max_words"]),
        *check_test_names(ROOT),
    ]
    print("\n".join(problems), end="\n" if problems else "")
    return 1 if problems else 0


def with_budgets(text: str, folders: Mapping[str, tuple[int, int]]) -> str:
    """Returns pyproject.toml with these budgets."""
    rows = "".join(f'"{folder}" = [{files}, {lines}]\n' for folder, (files, lines) in folders.items())
    return re.sub(r"(?m)^\[tool\.structure\.budgets\]\n(?:^\".*\n)*", f"[tool.structure.budgets]\n{rows}", text)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
