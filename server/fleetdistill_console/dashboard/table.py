"""Tables of rows that change: sorted, filtered and scrolled in the browser, which is sent only the changed rows."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from nicegui import ui

ID = "id"
"""Column that identifies a row."""

_LINK = """params => {
  const link = document.createElement('a');
  link.href = params.data.%s;
  link.textContent = params.value;
  return link;
}"""
_OPEN_LINK = """params => {
  if (params.event.key !== 'Enter') return;
  params.event.target.closest('.ag-cell').querySelector('a')?.click();
}"""
"""AG Grid gives the focus to the cell, so Enter would do nothing."""
_NATURAL = "(a, b) => String(a ?? '').localeCompare(String(b ?? ''), 'en', {numeric: true})"
_TIME = "params => (params.value ?? '').slice(0, %d).replace('T', ' ')"
_LENGTHS = {"day": 10, "minute": 16, "second": 19}
_BYTES = """params => {
  const value = params.value;
  if (value === null || value === undefined) return '';
  if (value >= 1e9) return (value / 1e9).toFixed(2) + ' GB';
  if (value >= 1e6) return (value / 1e6).toFixed(2) + ' MB';
  return value >= 1e3 ? (value / 1e3).toFixed(1) + ' kB' : value + ' B';
}"""
_DURATION = """params => {
  const value = params.value;
  if (value === null || value === undefined) return '';
  if (value < 60) return value.toFixed(0) + ' s';
  if (value < 3600) return Math.round(value / 60) + ' min';
  return value < 172800 ? (value / 3600).toFixed(1) + ' h' : (value / 86400).toFixed(1) + ' d';
}"""
_PERCENT = "params => params.value === null || params.value === undefined ? '' : (100 * params.value).toFixed(1) + ' %'"
_NUMBER = "params => params.value === null || params.value === undefined ? '' : params.value.toLocaleString('en-US')"


def text(field: str, heading: str, **more: Any) -> dict[str, Any]:
    """Returns a column of text, sorted as people do: d2 before d10."""
    shown = {"filter": "agTextColumnFilter", ":comparator": _NATURAL}
    return {"field": field, "headerName": heading, **shown, **more}


def link(field: str, heading: str, path: str, **more: Any) -> dict[str, Any]:
    """Returns a column of links; the column `path` of the rows, which is not shown, has their addresses."""
    return {**text(field, heading), ":cellRenderer": _LINK % path, **more}


def number(field: str, heading: str, **more: Any) -> dict[str, Any]:
    """Returns a column of numbers."""
    shown = {"filter": "agNumberColumnFilter", "type": "rightAligned", ":valueFormatter": _NUMBER}
    return {"field": field, "headerName": heading, **shown, **more}


def time(field: str, heading: str, *, to: str = "minute", **more: Any) -> dict[str, Any]:
    """Returns a column of times, ISO 8601 in UTC, shown to the day, minute or second."""
    return text(field, heading, **{":valueFormatter": _TIME % _LENGTHS[to], **more})


def size(field: str, heading: str, **more: Any) -> dict[str, Any]:
    """Returns a column of numbers of bytes, shown in kB, MB or GB."""
    return number(field, heading, **{":valueFormatter": _BYTES, **more})


def seconds(field: str, heading: str, **more: Any) -> dict[str, Any]:
    """Returns a column of numbers of seconds, shown in s, min, h or d."""
    return number(field, heading, **{":valueFormatter": _DURATION, **more})


def rate(field: str, heading: str, **more: Any) -> dict[str, Any]:
    """Returns a column of rates from 0 to 1, shown in percent."""
    return number(field, heading, **{":valueFormatter": _PERCENT, **more})


_MAX_AT_ONCE = 12
"""Largest number of rows of a table that is as high as its rows."""
_ORDER = """params => {
  const names = params.clientWidth < 640 ? %s : %s;
  params.api.applyColumnState({state: names.map(colId => ({colId})), applyOrder: true});
}"""
_HEIGHT = f"""params => params.api.setGridOption(
  'domLayout', params.api.getDisplayedRowCount() > {_MAX_AT_ONCE} ? 'normal' : 'autoHeight')"""
_ANY_COLUMN = {
    "sortable": True,
    "resizable": True,
    "floatingFilter": False,
    "minWidth": 70,
    "flex": 1,
    "wrapHeaderText": True,  # headings use more lines in a narrow column instead of being cut off
    "autoHeaderHeight": True,
}


class LiveTable:
    """A table whose rows are identified by their column `id`.

    A table with few rows is as high as these; a narrow one shows its most important columns first.

    Args:
        caption: What the table shows; read by screen readers.
        columns: Its columns, from the functions above. In a window of 1,280 pixels there
            are 1,190 for the sum of their `minWidth`, and of `width` where they are pinned.
        empty: Text shown while there are no rows.
        height: Height as CSS of a table with many rows, which are scrolled.
        first: Fields of the columns that come first in a narrow window; the others follow.
    """

    def __init__(
        self,
        caption: str,
        columns: Sequence[dict[str, Any]],
        empty: str,
        height: str = "24rem",
        first: Sequence[str] = (),
    ) -> None:
        self._rows: dict[str, Mapping[str, Any]] = {}
        usual = [column["field"] for column in columns]
        narrow = [*first, *(name for name in usual if name not in first)]
        self._loading = True
        options = {
            "columnDefs": list(columns),
            "defaultColDef": _ANY_COLUMN,
            "rowData": [],
            "loading": True,  # else it would say that there are no rows before the first ones have been read
            ":getRowId": "params => String(params.data.id)",
            "ensureDomOrder": True,  # screen readers read the rows as they are sorted
            "enableCellTextSelection": True,
            "overlayNoRowsTemplate": f"<span>{escape(empty)}</span>",
            "animateRows": False,
            ":onGridReady": f"params => params.api.setGridAriaProperty('label', {json.dumps(caption)})",
            ":onCellKeyDown": _OPEN_LINK,
            "domLayout": "autoHeight",
            ":onModelUpdated": _HEIGHT,  # also while it is filtered
            ":onGridSizeChanged": _ORDER % (json.dumps(narrow), json.dumps(usual)),
        }
        self.grid = ui.aggrid(options, auto_size_columns=False).classes("fd-table").style(f"height: {height}")

    def show(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Shows rows; only the differences to the previous call are sent."""
        new = {str(row[ID]): row for row in rows}
        change = {
            "add": [row for name, row in new.items() if name not in self._rows],
            "update": [row for name, row in new.items() if name in self._rows and self._rows[name] != row],
            "remove": [{ID: name} for name in self._rows if name not in new],
        }
        self._rows = new
        if self._loading:
            self._loading = False
            self.grid.run_grid_method("setGridOption", "loading", False)
        if not any(change.values()):
            return
        if len(new) > _MAX_AT_ONCE:  # before all rows would be drawn; after the transaction `_HEIGHT` decides
            self.grid.run_grid_method("setGridOption", "domLayout", "normal")
        self.grid.run_grid_method("applyTransaction", change)

    def filter(self, text: str) -> None:
        """Shows only the rows that contain each word of a text."""
        self.grid.run_grid_method("setGridOption", "quickFilterText", text)
