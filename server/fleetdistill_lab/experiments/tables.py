"""Tables of an experiment: on the terminal, as CSV and LaTeX, and for the page."""

from __future__ import annotations

import csv
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

from fleetdistill_lab.experiments.changes import Change
from fleetdistill_lab.experiments.definition import join_names
from fleetdistill_lab.experiments.metrics import METRICS
from fleetdistill_lab.experiments.results import ModelRow
from fleetdistill_lab.experiments.summary import LEVEL, EqualBytes, Line, Pair, Summary
from fleetdistill_server.texts import readable_bytes

if TYPE_CHECKING:
    import rich.table

__all__ = [
    "ClassAccuracy",
    "Table",
    "change_table",
    "claim_table",
    "equal_bytes_table",
    "fit",
    "format_value",
    "model_table",
    "printed_table",
    "rich_table",
    "save_csv",
    "save_latex",
    "short_table",
    "summary_table",
]


@dataclass(frozen=True)
class Table:
    """A table of texts.

    Attributes:
        title: Its title.
        header: Titles of the columns; the first column has names.
        rows: Texts of the cells.
        strong: Rows and columns of the cells to emphasize: the best mean of a column.
        note: What is to be known of this table only, for below it.
        width: Number of columns that stay together where the table is split, such as those of a grid point; 0 if it is
            not split.
    """

    title: str
    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    strong: frozenset[tuple[int, int]] = frozenset()
    note: str = ""
    width: int = 0

    def blocks(self, width: int) -> list[Table]:
        """Returns the table in parts with all its rows that fit a width one below the other, in characters."""
        first, *sizes = _sizes([self.header, *self.rows])
        if not self.width or first + sum(sizes) <= width:
            return [self]
        of_point = sum(max(sizes[at :: self.width]) for at in range(self.width))
        step = self.width * max(1, (width - first) // of_point)
        return [
            replace(
                self,
                header=[self.header[0], *self.header[at : at + step]],
                rows=[[row[0], *row[at : at + step]] for row in self.rows],
                strong=frozenset((row, 1 + column - at) for row, column in self.strong if at <= column < at + step),
            )
            for at in range(1, len(self.header), step)
        ]


def format_value(value: float | None, spread: float | None, unit: str, sign: str = "") -> str:
    """Formats a value with its spread; rates as percent without the sign."""
    if value is None:
        return ""
    if unit == "bytes":
        return readable_bytes(round(value))
    scale = 100.0 if unit == "percent" else 1.0
    text = f"{scale * value:{sign}.1f}"
    return text if spread is None else f"{text} ± {scale * spread:.1f}"


def model_table(lines: Sequence[Line], title: str, *, with_p: bool = True) -> Table:
    """Returns a table of all models, in percent and percentage points; p values are those of the lines."""
    bases = {line.base for line in lines if line.base}
    several = len(bases) > 1
    compared = ("difference" if several else f"from {''.join(bases) or lines[0].name}", *["p"] * with_p)
    header = ("", "all classes", *compared, "own classes", *compared, "bytes", "exchanges", *["from"] * several)
    rows = [
        (
            line.name + _seeds_text(line),
            format_value(line.accuracy, line.accuracy_spread, "percent") or "not scored",
            format_value(line.difference, line.difference_spread, "percent", "+"),
            *[_p_text(line.p)] * with_p,
            format_value(line.own_accuracy, line.own_accuracy_spread, "percent") or "not scored",
            format_value(line.own_difference, line.own_difference_spread, "percent", "+"),
            *[_p_text(line.own_p)] * with_p,
            readable_bytes(round(line.bytes)),
            f"{line.exchanges:.3g}",
            *[line.base] * several,
        )
        for line in lines
    ]
    return Table(title, header, rows)


def _seeds_text(of: Line | Pair | EqualBytes) -> str:
    return f" ({of.seeds} of {of.wanted} seeds)" if 0 < of.seeds < of.wanted else ""


def _p_text(p: float | None) -> str:
    return "" if p is None else f"{p:.2g}"


def short_table(metric: str, summaries: Sequence[Summary], printed: Mapping[str, Mapping[str, float]]) -> Table:
    """Returns the table of one metric for the terminal: a row for each method and a column for each grid point.

    A star marks a difference from the reference with a p value of at most 5 %. Arguments as for `summary_table`.
    """
    points = list(dict.fromkeys(one.point for one in summaries))
    by_key = {(one.label, one.point): one for one in summaries}
    rows = []
    for label in dict.fromkeys(one.label for one in summaries):
        row = [label]
        for point in points:
            one, value = by_key[label, point], printed.get(label, {}).get(point)
            star = "*" if one.p is not None and one.p <= LEVEL and METRICS[metric].unit == "percent" else ""
            source = "" if value is None else f" (source: {value:g})"
            row.append(f"{_mean_text(one, metric)}{star}{source}")
        rows.append(row)
    return Table(METRICS[metric].title, ("", *points) if points != [""] else ("", metric), rows)


def summary_table(
    metric: str,
    summaries: Sequence[Summary],
    reference: str,
    printed: Mapping[str, Mapping[str, float]],
    source: str = "in the source",
) -> Table:
    """Returns the table of one metric: a row for each method, and for each grid point its mean and difference.

    Args:
        metric: Name of the metric.
        summaries: Its summaries.
        reference: Label from which differences are.
        printed: Values that the source prints, by label and point; shown as they are.
        source: Title of the columns with printed values.
    """
    unit, better = METRICS[metric].unit, METRICS[metric].higher_is_better
    points = list(dict.fromkeys(one.point for one in summaries))
    by_key = {(one.label, one.point): one for one in summaries}
    labels = list(dict.fromkeys(one.label for one in summaries))
    has_differences = len(labels) > 1 and unit != "bytes"
    has_printed = any(point in of for of in printed.values() for point in points)
    header = [""]
    strong = set[tuple[int, int]]()
    for point in points:
        found = {label: by_key[label, point] for label in labels}
        complete = all(one.seeds + one.missing == one.wanted for one in found.values())
        means = {label: one.mean for label, one in found.items() if one.mean is not None}
        if means and complete and len(labels) > 1:
            best = (max if better else min)(means, key=means.__getitem__)
            strong.add((labels.index(best), len(header)))
        header.append(point or "mean")
        header += [f"from {reference}", "p"] if has_differences else []
        header += [source] if has_printed else []
    rows = []
    for label in labels:
        row = [label]
        for point in points:
            one = by_key[label, point]
            row.append(_mean_text(one, metric))
            if has_differences:
                row.append(format_value(one.difference, one.difference_spread, unit, "+"))
                row.append(_p_text(one.p))
            if has_printed:
                value = printed.get(label, {}).get(point)
                row.append("" if value is None else f"{value:g}")
        rows.append(row)
    width = 1 + 2 * has_differences + has_printed
    return Table(f"{METRICS[metric].title}{_UNITS.get(unit, '')}", header, rows, frozenset(strong), width=width)


_UNITS = {"percent": ", in percent", "bytes": ", mean over seeds"}
"""What the title of a metric's table says of its unit, or of figures without a spread."""


@dataclass(frozen=True)
class PrintedValue:
    """A value that the source prints for a label, at a grid point of its own scale."""

    label: str
    point: str
    value: float


@dataclass(frozen=True)
class ClassAccuracy:
    """Mean accuracy on one class over seeds: of the `global` model, or of the `devices`' models."""

    label: str
    point: str
    model: str
    name: str
    accuracy: float


def printed_table(metric: str, printed: Mapping[str, Mapping[str, float]]) -> Table:
    """Returns the table of values that the source prints, by label and by grid points of its own scale."""
    points = list(dict.fromkeys(point for of in printed.values() for point in of))
    rows = [[label, *(f"{of[point]:g}" if point in of else "" for point in points)] for label, of in printed.items()]
    return Table(f"{METRICS[metric].title}, as the source prints it", ("", *points), rows, width=1)


def _mean_text(one: Summary, metric: str) -> str:
    if one.missing:
        text = "never" if METRICS[metric].needs_target else "none"
        return f"{text} in {one.missing} of {one.missing + one.seeds}" if one.seeds else text
    if not one.seeds:
        return f"failed ({one.failed} of {one.wanted} seeds)" if one.failed else "not run"
    text, failed = (
        format_value(one.mean, one.spread, METRICS[metric].unit),
        f", {one.failed} failed" if one.failed else "",
    )
    return f"{text} ({one.seeds} of {one.wanted} seeds{failed})" if one.seeds < one.wanted else text


def equal_bytes_table(found: Sequence[EqualBytes], reference: str) -> Table:
    """Returns the table of differences at equal bytes: a row for each method, and three columns for each grid point."""
    points = list(dict.fromkeys(one.point for one in found))
    by_key = {(one.label, one.point): one for one in found}
    rows = [
        [label, *chain.from_iterable(_equal_bytes_texts(by_key.get((label, point))) for point in points)]
        for label in dict.fromkeys(one.label for one in found)
    ]
    header = ["", *chain.from_iterable((point or f"from {reference}", "p", "after rounds") for point in points)]
    title = f"Accuracy on all classes, difference from {reference} at equal bytes, in percentage points"
    return Table(title, header, rows, width=3)


def _equal_bytes_texts(one: EqualBytes | None) -> tuple[str, str, str]:
    if one is None or one.rounds is None or one.reference_rounds is None:
        return "", "", "" if one is None else "none within the bytes"
    text = format_value(one.difference, one.difference_spread, "percent", "+") + _seeds_text(one)
    return text, _p_text(one.p), f"{one.rounds:g} and {one.reference_rounds:g}"


def claim_table(text: str, metric: str, pairs: Sequence[Pair]) -> Table:
    """Returns the table of a claim's pairs; a lead is above 0 if the claimed order holds."""
    unit = METRICS[metric].unit
    rows = [
        (
            f"{pair.better} > {pair.worse}",
            format_value(pair.difference, None, unit, "+") + _seeds_text(pair) if unit != "bytes" else "",
            f"{pair.wins} of {pair.pairs}",
            _p_text(pair.p),
            pair.verdict,
        )
        for pair in pairs
    ]
    title = f"{text} ({METRICS[metric].title})" if text else METRICS[metric].title
    return Table(title, ("claimed order", "mean lead", "ahead in", "p", "here"), rows)


def change_table(changes: Sequence[Change]) -> Table:
    """Returns a table of the metrics that differ between two experiments."""
    rows = [
        (
            join_names(change.label, change.point),
            change.metric,
            format_value(change.before, None, METRICS[change.metric].unit),
            format_value(change.after, None, METRICS[change.metric].unit),
            str(change.seeds),
            _p_text(change.p),
            "same" if change.same_settings else "changed",
        )
        for change in changes
    ]
    return Table("Metrics that differ", ("", "metric", "first", "second", "seeds", "p", "settings"), rows)


def rich_table(table: Table) -> rich.table.Table:
    """Returns a table for the terminal, whose texts are no markup."""
    from rich.box import SIMPLE_HEAD
    from rich.markup import escape
    from rich.table import Table as RichTable
    from rich.text import Text

    title = escape(table.title)
    result = RichTable(
        title=title, title_justify="left", box=SIMPLE_HEAD, padding=(0, 1), show_edge=False, pad_edge=False
    )
    result.add_column(Text(table.header[0]), no_wrap=True)
    for name in table.header[1:]:
        result.add_column(Text(name), justify="right", no_wrap=True)
    for row in table.rows:
        result.add_row(*map(Text, row))
    return result


def fit(table: Table, width: int) -> list[Table]:
    """Returns a table in parts that a terminal of so many columns shows whole.

    A table that is too wide has its grid points as rows, and columns that still do not fit in further tables.

    Args:
        table: A table whose columns are grid points if its first header is empty.
        width: Number of the terminal's columns.
    """
    lines = [table.header, *table.rows]
    sizes = _sizes(lines)
    if sum(sizes) <= width:
        return [table]
    if not table.header[0] and len(table.header) > 2:
        lines = [list(line) for line in zip(*lines, strict=True)]
        sizes = _sizes(lines)
    parts = [list[int]()]
    for at, size in enumerate(sizes[1:], 1):
        if parts[-1] and sizes[0] + sum(sizes[part] for part in parts[-1]) + size > width:
            parts.append([])
        parts[-1].append(at)
    header, *rows = lines
    return [
        replace(
            table,
            title=f"{table.title}, continued" if number else table.title,
            header=[header[at] for at in (0, *part)],
            rows=[[row[at] for at in (0, *part)] for row in rows],
        )
        for number, part in enumerate(parts)
    ]


def _sizes(lines: Sequence[Sequence[str]]) -> list[int]:
    """Returns the width of each column of `rich_table`, with what separates it from the next one."""
    from rich.cells import cell_len

    return [max(map(cell_len, column)) + 3 for column in zip(*lines, strict=True)]


def save_csv(
    rows: Table | Iterable[ModelRow | Summary | Pair | EqualBytes | PrintedValue | ClassAccuracy], file: Path
) -> None:
    """Writes a table's texts, or rows with full precision; rates are in [0, 1]."""
    found = [] if isinstance(rows, Table) else list(rows)
    with file.open("w", newline="", encoding="utf-8") as opened:
        if isinstance(rows, Table):
            csv.writer(opened).writerows([rows.header, *rows.rows])
        if found:
            writer = csv.DictWriter(opened, [field.name for field in fields(found[0])])
            writer.writeheader()
            writer.writerows(asdict(row) for row in found)


def save_latex(table: Table, file: Path, label: str, note: str = "", *, of_texts: bool = False) -> None:
    """Writes a LaTeX table, which needs the package booktabs.

    It is as wide as a journal's column or else as its page. Grid points that do not fit side by side stand one below
    the other, and they and many rows continue in further tables before one is higher than a page.

    Args:
        table: The table.
        file: The file.
        label: Label of the table, for references; those of further tables have a number.
        note: What its figures are, for below it.
        of_texts: Whether columns that do not fit the page are broken into lines.
    """
    kind, blocks = "table", table.blocks(_COLUMN)
    is_narrow = len(blocks[0].header) < min(_MIN_COLUMNS, len(table.header))
    if is_narrow or any(sum(_sizes([block.header, *block.rows])) > _COLUMN for block in blocks):
        kind, blocks = "table*", table.blocks(_PAGE)
    columns = "r" * (len(blocks[0].header) - 1)
    if not table.width:
        firsts = range(0, len(table.rows) or 1, _MAX_ROWS)
        blocks = [replace(table, rows=table.rows[at : at + _MAX_ROWS], strong=frozenset()) for at in firsts]
    if of_texts and sum(_sizes([table.header, *table.rows])) > _PAGE:
        columns = len(columns) * rf"p{{{0.8 / len(columns):.2f}\textwidth}}"
    each = max(1, _MAX_ROWS // (1 + len(table.rows)))
    lines = []
    for number, first in enumerate(range(0, len(blocks), each), 1):
        _, *rows = chain.from_iterable(map(_latex_rows, blocks[first : first + each]))
        lines += [
            rf"\begin{{{kind}}}[t]",
            rf"\caption{{{_escape(table.title)}{', continued' * (number > 1)}}}",
            rf"\label{{{label}{f'-{number}' if number > 1 else ''}}}",
            r"\centering\footnotesize",
            rf"\begin{{tabular}}{{l{columns}}}",
            r"\toprule",
            *rows,
            r"\bottomrule",
            r"\end{tabular}",
            *([rf"\par\smallskip\raggedright {_escape(note)}"] if note and number == 1 else []),
            rf"\end{{{kind}}}",
        ]
    file.write_text("\n".join([*lines, ""]), encoding="utf-8")


_COLUMN, _PAGE = 56, 116
"""Characters of a line in a journal's column and on its page, with the space between columns counted as three."""
_MIN_COLUMNS, _MAX_ROWS = 4, 40
_LATEX = {
    "&": r"\&",
    "%": r"\%",
    "_": r"\_",
    "#": r"\#",
    "$": r"\$",
    "{": r"\{",
    "}": r"\}",
    "^": r"\textasciicircum{}",
    "~": r"\textasciitilde{}",
    "\\": r"\textbackslash{}",
    "±": r"$\pm$",
    ">": "$>$",
    "<": "$<$",
    "→": r"$\to$",
}


def _escape(text: str) -> str:
    escaped = "".join(_LATEX.get(character, character) for character in text)
    return re.sub(r"(?<![\w$])[-+](?=\d)", r"$\g<0>$", escaped)


def _latex_rows(table: Table) -> list[str]:
    """Returns the lines of a table's header and rows, with a rule above each."""
    lines = [list(map(_escape, line)) for line in (table.header, *table.rows)]
    for row, column in table.strong:
        lines[row + 1][column] = rf"\textbf{{{lines[row + 1][column]}}}"
    header, *rows = (rf"{' & '.join(line)} \\" for line in lines)
    return [r"\midrule", header, r"\midrule", *rows]
