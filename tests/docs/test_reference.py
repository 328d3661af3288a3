"""The documentation holds against the code: commands, tables, links, and the code blocks that people copy."""

from __future__ import annotations

import dataclasses
import inspect
import re
import subprocess
import sys
import tomllib
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any, get_args

import pytest
import typer
from pydantic import BaseModel

import fleetdistill
from fleetdistill import errors
from fleetdistill.methods import METHODS, config_class
from fleetdistill.wire.codes import MEANINGS
from fleetdistill_lab.experiments.metrics import METRICS
from fleetdistill_lab.simulation.data.datasets import DATASETS
from fleetdistill_lab.simulation.data.partition import PARTITIONS
from fleetdistill_lab.simulation.data.test_parts import TEST_PARTS
from fleetdistill_server.cli.app import app
from fleetdistill_server.config.run_config import RunConfig, load_run_config
from fleetdistill_server.event_kinds import GUARD
from fleetdistill_server.store.states import TRANSITIONS

ROOT = Path(__file__).parents[2]
PAGES = sorted(
    path
    for path in ROOT.rglob("*.md")
    if not {part for part in path.relative_to(ROOT).parts if part.startswith(".")} and "out" not in path.parts
)
# Pages whose Python blocks are meant to be copied.
COPIED = (
    "README.md",
    "docs/reference/delivery.md",
    "docs/reference/device.md",
    "docs/reference/models.md",
    "docs/how-to/test-your-app.md",
    "docs/how-to/tls.md",
)


_SOURCE_FOLDERS = ("client_sdk/fleetdistill", "server/fleetdistill_server", "server")
"""Folders to which the pages' file names are relative."""


def _text(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def _section(page: str, heading: str) -> str:
    """From a heading to the next one."""
    result = re.search(rf"^#+ {re.escape(heading)}$(.*?)(?=^#+ |\Z)", _text(page), re.MULTILINE | re.DOTALL)
    assert result, f"{page} has no section {heading!r}"
    return result[1]


def _rows(text: str) -> list[list[str]]:
    """Cells of every table row below a table's head."""
    lines = [line for line in text.splitlines() if line.startswith("|")]
    heads = {number for number, line in enumerate(lines) if re.fullmatch(r"\|[-| ]+\|", line)}
    kept = [line for number, line in enumerate(lines) if number not in heads and number + 1 not in heads]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in kept]


@pytest.mark.parametrize("page", [str(path.relative_to(ROOT)) for path in PAGES])
def test_every_table_has_a_head(page: str) -> None:
    """A blank line within a table makes text of the rows behind it."""
    outside = re.sub(r"^```.*?^```", "", _text(page), flags=re.MULTILINE | re.DOTALL)
    for table in re.findall(r"(?:^\|.*\n)+", outside, re.MULTILINE):
        assert re.match(r".*\n\|[-|: ]+\|\n", table), table[:200]


def test_every_metric_of_experiments_is_listed() -> None:
    rows = _rows(_section("docs/how-to/run-experiments.md", "Metrics"))
    assert {name for row in rows for name in re.findall(r"`(\w+)`", row[0])} == set(METRICS)


@pytest.mark.parametrize(
    ("heading", "known"), [("Choose how the data are partitioned", PARTITIONS), ("Choose the test rows", TEST_PARTS)]
)
def test_every_partition_and_test_part_is_listed(heading: str, known: Collection[str]) -> None:
    rows = _rows(_section("docs/tutorials/your-model-and-data.md", heading))
    assert [row[0].split("`")[1] for row in rows] == list(known)


def _blocks(page: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", _text(page), re.MULTILINE | re.DOTALL)


def _commands(command: Any, path: tuple[str, ...] = ("fleetdistill",)) -> dict[str, Any]:
    """Every command that can be called, by its words."""
    if not hasattr(command, "list_commands"):
        return {" ".join(path): command}
    inner = {name: command.get_command(None, name) for name in command.list_commands(None)}
    # A group may do something by itself, as `fleetdistill devices` does.
    own = {" ".join(path): command} if len(path) > 1 and command.invoke_without_command else {}
    return own | {name: leaf for word, one in inner.items() for name, leaf in _commands(one, (*path, word)).items()}


COMMANDS = _commands(typer.main.get_command(app))


def test_the_pages_and_commands_are_found() -> None:
    assert {path.name for path in PAGES} >= {
        "README.md",
        "CHANGELOG.md",
        "feddkc.md",
        "wire-format.md",
        "architecture.md",
    }
    assert len(COMMANDS) >= 6


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_stands_in_a_tutorial_or_a_how_to(command: str) -> None:
    guides = [_text(str(path.relative_to(ROOT))) for path in PAGES if path.parent.name in ("tutorials", "how-to")]
    assert any(re.search(rf"^{command}\b", text, re.MULTILINE) for text in guides)


def test_the_readme_is_short() -> None:
    assert len(_text("README.md").splitlines()) <= 120


def _table(text: str, after: str) -> list[list[str]]:
    """Returns the cells of the first table after a text, without its rule."""
    rows = re.search(r"^(\|.*\n)+", text[text.index(after) :], re.MULTILINE)
    assert rows
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in rows[0].splitlines() if "---" not in line]


def _best(cells: Sequence[str]) -> str:
    """Returns the largest of each of two numbers, such as `82.2 / 93.9`."""
    pairs = [[float(number) for number in cell.split("/")] for cell in cells]
    return " / ".join(f"{max(numbers)}" for numbers in zip(*pairs, strict=True))


def test_the_readmes_controls_are_those_of_the_measurements() -> None:
    head, *measured = _table(_text("benchmarks/RESULTS.md"), "**Every control, unused seeds.**")
    rows = {row[0].strip("*"): row[1:] for row in measured}
    controls = list(rows.values())[:8]
    assert list(rows)[7] == "means only: predictors on own rows moved"
    expected = {
        "best control": [_best(cells) for cells in zip(*controls, strict=True)],
        "one exchange": rows["closed form, df // 15 (default)"],
        "refined": rows["refined head, R 5"],
        "refined less best": rows["refined less the best of the controls"],
    }
    shown = _table(_text("README.md"), "**Against the best control**")[1:]
    of_low, of_high = (0, 2, 4, 6, 7), (1, 3, 5, None, 8)  # columns of the measurements with α 0.1 and 0.5
    assert [item[:16] for item in head[1:3]] == ["digits α 0.1", "digits α 0.5"]
    for columns, block in ((of_low, shown[:4]), (of_high, shown[4:])):
        for _, name, *cells in block:
            for column, cell in zip(columns, cells[:5], strict=True):  # the last is of another table
                assert cell == expected[name][column] if column is not None else cell in ("", "not measured")


@pytest.mark.parametrize("page", [str(path.relative_to(ROOT)) for path in PAGES])
def test_commands_on_a_page_exist_with_their_options(page: str) -> None:
    lines = [line for block in _blocks(page, "(?:sh|console)") for line in block.splitlines()]
    for line in lines:
        if not line.startswith("fleetdistill "):
            continue
        words = line.split("#")[0].split()
        result = [known for known in COMMANDS if words[: len(known.split())] == known.split()]
        name = max(result, key=len, default=None)
        assert name, f"{page}: there is no command {line!r}"
        known_options = {option for param in COMMANDS[name].params for option in (*param.opts, *param.secondary_opts)}
        assert {word for word in words if word.startswith("--")} <= known_options, f"{page}: {line!r}"


def test_the_error_table_is_the_codes() -> None:
    page = {row[0].strip("`"): row[1:] for row in _rows(_section("docs/reference/errors.md", "Codes of the server"))}
    code = {str(c.value): [m.status, "yes" if m.final else "no", m.text] for c, m in MEANINGS.items()}
    assert page == code


def _defaults(model: type[BaseModel], section: str = "") -> dict[tuple[str, str], Any]:
    """(section, key) to default of everything in run.toml but the method's own settings."""
    result: dict[tuple[str, str], Any] = {}
    for name, field in model.model_fields.items():
        inner = next(iter(get_args(field.annotation)), field.annotation)  # of a section that may be missing
        if isinstance(inner, type) and issubclass(inner, BaseModel):
            result |= _defaults(inner, name)
        elif section:
            result[section, field.alias or name] = "required" if field.is_required() else field.default
    return result


def test_the_reference_of_run_toml_is_the_model() -> None:
    rows = {(row[0], row[1]): row[2] for row in _rows(_section("docs/reference/run-toml.md", "run.toml")) if row[1]}
    expected = _defaults(RunConfig)
    assert rows.keys() == expected.keys()
    for key, default in expected.items():
        assert (
            _value(rows[key]) == pytest.approx(default) if isinstance(default, float) else _value(rows[key]) == default
        )


def _value(cell: str) -> Any:
    text = cell.strip("`")
    if text == "required":
        return text
    if re.fullmatch(r"\d+/\d+", text):
        above, below = text.split("/")
        return int(above) / int(below)
    return tomllib.loads(f"value = {text}")["value"]


@pytest.mark.parametrize("page", METHODS)
def test_the_settings_of_a_method_are_its_configuration(page: str) -> None:
    rows = {row[0]: row[1] for row in _rows(_section(f"docs/reference/methods/{page}.md", "Settings"))}
    of_class = dataclasses.fields(config_class(page))
    fields = {item.name: "required" if item.default is dataclasses.MISSING else item.default for item in of_class}
    assert list(rows) == list(fields)
    for name, default in fields.items():
        if default is not None:  # None is filled in from the number of classes; the page says how
            assert _value(rows[name]) == default, name


_SOURCES = {
    path: path.read_text(encoding="utf-8")
    for root in ("client_sdk/fleetdistill", "server", "protos")
    for pattern in ("*.py", "*.proto")
    for path in (ROOT / root).rglob(pattern)
}
PAPERS = [page for page in METHODS if page != "fedavg"]
"""Methods whose page has the steps of a round and a table of symbols."""


@pytest.mark.parametrize("page", PAPERS)
def test_round_steps_are_functions_of_the_methods_halves(page: str) -> None:
    halves = "\n".join(
        text for path, text in _SOURCES.items() if "methods" in path.parts and page.split("_")[0] in path.as_posix()
    )
    named = [
        name
        for row in _rows(_section(f"docs/reference/methods/{page}.md", "A round"))
        for name in re.findall(r"`(?:\w+\.)?(\w+)`", row[-1])
    ]
    assert named
    assert [name for name in named if not re.search(rf"(?:def|class) {name}\b", halves)] == []


@pytest.mark.parametrize("page", PAPERS)
def test_the_symbols_of_a_method_stand_for_names_in_the_code(page: str) -> None:
    rows = _rows(_section(f"docs/reference/methods/{page}.md", "Symbols"))
    assert rows
    code = "\n".join(_SOURCES.values())
    names = {
        name for row in rows for cell in row for item in re.findall(r"`([\w.]+)`", cell) for name in item.split(".")
    }
    files = {item for row in rows for cell in row for item in re.findall(r"`([\w/]+\.(?:py|proto))`", cell)}
    assert [file for file in files if not any(path.as_posix().endswith(f"/{file}") for path in _SOURCES)] == []
    names -= {part for file in files for part in file.split(".")}
    assert [name for name in sorted(names) if not re.search(rf"\b{name}\b", code)] == []


@pytest.mark.parametrize("page", [str(path.relative_to(ROOT)) for path in PAGES if path.name != "CHANGELOG.md"])
def test_files_that_a_page_names_exist(page: str) -> None:
    files = set(re.findall(r"`((?:\w+/)+\w+\.(?:py|proto|md))`", _text(page)))
    roots = [ROOT, *(ROOT / package for package in _SOURCE_FOLDERS), ROOT / "tests"]
    assert [file for file in sorted(files) if not any((root / file).is_file() for root in roots)] == []


def test_examples_load_and_name_what_exists() -> None:
    assert load_run_config(ROOT / "examples/classstats.toml").run.rounds == 0
    config = load_run_config(ROOT / "examples/run.toml")
    assert config.run.name == "digits"
    assert config.run.min_devices == 3
    assert config.server.listen.startswith("127.0.0.1:")
    for script in re.findall(r"examples/\w+\.\w+", " ".join(path.read_text() for path in PAGES)):
        assert (ROOT / script).is_file(), script


def test_architecture_draws_the_transitions_of_statuses() -> None:
    """The table is written here, so that a change of `TRANSITIONS` prints what belongs on the page."""
    rows = [
        f"| {kind.__name__.removesuffix('Status').lower()} | {status} | {', '.join(following) or 'nothing'} |"
        for kind, transitions in TRANSITIONS.items()
        for status, following in transitions.items()
    ]
    assert "\n".join(["| of a | from | to |", "|---|---|---|", *rows]) in _text("docs/explanation/architecture.md")


@pytest.mark.parametrize("page", ["explanation/architecture.md", "reference/processes.md", "reference/store.md"])
def test_pages_name_files_that_exist(page: str) -> None:
    for path in re.findall(r"`((?:\w+/)*\w+\.py)`", _text(f"docs/{page}")):
        assert any((root / path).is_file() for root in map(ROOT.joinpath, _SOURCE_FOLDERS)), path


def test_page_of_the_store_has_its_tables() -> None:
    made = re.findall(r"CREATE TABLE (\w+)", _text("server/fleetdistill_server/store/schema.py"))
    assert [row[0].strip("`") for row in _rows(_section("docs/reference/store.md", "Tables of the store"))] == made


@pytest.mark.long
def test_architecture_has_the_files_of_a_traced_round() -> None:
    """Repair it with `python tools/paths.py --write`."""
    command = [sys.executable, "tools/paths.py"]
    made = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert made.stdout.strip() in _text("docs/explanation/architecture.md")
    assert len(_text("docs/explanation/architecture.md").split()) <= 1500


def test_sdk_page_has_every_argument_column_event_error_and_file() -> None:
    page = "docs/reference/device.md"
    arguments = inspect.signature(fleetdistill.Device).parameters
    listed = [row[0].strip("`") for row in _rows(_section(page, "Arguments of `Device`")) if len(row) == 3]
    assert listed == list(arguments)
    columns = [row[0].strip("`") for row in _rows(_section(page, "What may leave: `allow`"))]
    assert tuple(columns) == fleetdistill.COLUMNS
    code = "\n".join(path.read_text() for path in (ROOT / "client_sdk/fleetdistill/device").glob("*.py"))
    said = set(re.findall(r'\.\w*emit\w*\(\s*(?:Event\()?"([\w-]+)"', code))
    for pair in re.findall(r'kind = "([\w-]+)" if .+ else "([\w-]+)"', code):
        said |= set(pair)
    assert {row[0].strip("`") for row in _rows(_section("docs/reference/events.md", "Events of a device"))} == said
    own = {name for name, value in vars(errors).items() if isinstance(value, type) and name != "FleetDistillError"}
    assert own <= set(re.findall(r"`(\w+)`", _section("docs/reference/errors.md", "Errors of the SDK")))


def test_the_operators_page_has_every_kind_of_event() -> None:
    sources = "\n".join(path.read_text() for path in (ROOT / "server/fleetdistill_server").rglob("*.py"))
    written = set(re.findall(r'(?:add_event\(\s*\w+|\.event\()(?:, )?\s*"([a-z-]+)"', sources))
    written |= {f"{name}{GUARD}" for name in re.findall(r'\.guard\(\s*"([a-z]+)"', sources)}
    listed = {
        row[0].strip("`") for row in _rows(_section("docs/reference/events.md", "Events of a run")) if row[0][:1] == "`"
    }
    assert {"refused", "late", "declined", "teacher-guard", "divergence-guard", "maturity-guard"} <= written
    assert written <= listed


@pytest.mark.parametrize("page", [str(path.relative_to(ROOT)) for path in PAGES])
def test_relative_links_lead_somewhere(page: str) -> None:
    for target in re.findall(r"\]\(([^)]+)\)", _text(page)):
        if "://" not in target and not target.startswith("#"):
            assert ((ROOT / page).parent / target.split("#")[0]).exists(), target


@pytest.mark.parametrize("page", [str(path.relative_to(ROOT)) for path in PAGES])
def test_no_page_knows_a_machine(page: str) -> None:
    assert not re.search(r"(?<![\w.])/(?:work|home|root|Users|tmp|mnt)/", _text(page))


@pytest.mark.parametrize(("page", "block"), [(page, block) for page in COPIED for block in _blocks(page, "python")])
def test_python_blocks_compile_and_their_imports_work(page: str, block: str) -> None:
    compile(block, page, "exec")
    for line in re.findall(r"^(?:from|import) .*$", block, re.MULTILINE):
        exec(line, {})


@pytest.mark.parametrize("page", ["classstats", "classstats_private"])
def test_class_statistics_name_lines_that_are_in_the_mathematics(page: str) -> None:
    """Docstrings and comments name a formula by its line in the page's section, such as (line `merge`)."""
    sources = sorted((ROOT / "client_sdk/fleetdistill/methods" / page).glob("*.py"))
    text = _text(f"docs/reference/methods/{page}.md").split("\n## The mathematics\n")[1].split("\n## ")[0]
    lines = re.findall(r"^    (\w+) ", text, re.MULTILINE)
    named = [
        name for path in sources for name in re.findall(r"(?:\(line `|# line )(\w+)", path.read_text(encoding="utf-8"))
    ]
    assert len(named) >= 5
    assert set(named) <= set(lines)


def test_the_sdk_pages_model_runs() -> None:
    block = next(block for block in _blocks("docs/reference/device.md", "python") if "split_sequential" in block)
    exec(block, {})


def test_built_in_data_sets_are_listed() -> None:
    """In the tutorial, and in the help of the option."""
    page = _section("docs/tutorials/your-model-and-data.md", "A built-in data set")
    assert set(re.findall(r"`([a-z0-9-]+)`", page.partition("|---|")[2])) == set(DATASETS)
    (said,) = (param.help for param in COMMANDS["fleetdistill simulate"].params if param.name == "dataset")
    assert set(re.findall(r"[a-z0-9-]+", said.partition("the path")[0])) >= set(DATASETS)
