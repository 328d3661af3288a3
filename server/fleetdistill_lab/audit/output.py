"""Shows an audit's report: as a table, as JSON, and reconstructed images below their originals."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.box import SIMPLE_HEAD
from rich.table import Table
from torch import Tensor

from fleetdistill.errors import StateError
from fleetdistill.methods.feddkd.config import MIN_BATCH
from fleetdistill_lab.audit.audit import AuditReport
from fleetdistill_lab.audit.pictures import Pictures
from fleetdistill_server.views.runs import View

if TYPE_CHECKING:
    from matplotlib.axes import Axes

NOTHING = "–"
"""Shown where a part cannot be tested for single rows; not 0, because nothing was measured."""
_NOT_ATTACKED = "not attacked"
"""Shown for tensors of the method that no attack reads."""
_BLANK = [""] * 4
_SHOWN = 14
_INCHES = 0.62


def tables(shown: View) -> list[Table | str]:
    """Returns the table of an audit's parts, and the lines that explain it."""
    facts, rows = shown.facts, shown.lists["parts"]
    table = Table(title=_title(facts), title_justify="left", box=SIMPLE_HEAD, pad_edge=False)
    for name in ("part", "attack", f"linked (of {facts['decoys'] + 1:,})", "95 %", "auc", "tpr1"):
        table.add_column(name, justify="left" if name in ("part", "attack") else "right")
    for row in rows:
        table.add_row(row["part"], *([_NOT_ATTACKED, *_BLANK] if row["part"] in facts["unattacked"] else _cells(row)))
    classes = NOTHING if facts["classes"] is None else f"{facts['classes']:.2f}"
    pictures = [_pictures(shown.lists["pictures"])] if "pictures" in shown.lists else []
    further = [*_unattacked(facts), *_sums(facts), *_bound(facts), *_warnings(facts), _meaning(facts, rows)]
    return [table, *pictures, f"classes: {classes}", *further]


def view(report: AuditReport, pictures: Sequence[Pictures] | None = None) -> View:
    """Returns a report as a view with one row for each part and attack, and one for each kind of pictures."""
    parts: list[dict[str, Any]] = []
    for name, attacks in report.parts.items():
        parts += [{"part": name, "attack": attack, **asdict(one)} for attack, one in attacks.items()]
        parts += [] if attacks else [{"part": name, "attack": None}]
    facts = {
        name: getattr(report, name)
        for name in ("method", "public_set", "devices", "rounds", "trained_rows", "attacked_rows", "decoys", "classes")
    }
    facts |= {"smallest_batch": report.smallest_batch, "sums": list(report.sums)}
    facts |= {"unattacked": {name: list(columns) for name, columns in report.unattacked.items()}}
    worst = report.worst
    facts |= {"linked": None if worst is None else worst.linked, "bound": report.bound, "chance": report.chance}
    lists = {"parts": parts}
    if pictures is not None:
        lists["pictures"] = [
            {"part": one.part, "source": one.source, "pictures": len(one.pictures), **one.figures()} for one in pictures
        ]
    return View(lists, facts)


def write_json(shown: View, out: Path) -> Path:
    """Writes audit.json to a directory, which is created, and returns its path.

    Raises:
        StateError: The directory cannot be written.
    """
    file = out / "audit.json"
    try:
        out.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(json.loads(shown.json()), indent=1) + "\n")
    except OSError as error:
        raise StateError(f"cannot write {file}: {error}; choose another --out directory") from error
    return file


def _unattacked(facts: dict[str, Any]) -> list[str]:
    """Returns a line for each part of tensors of the method: what it is declared to contain."""
    return [
        f"{name}: {_NOT_ATTACKED}, because no attack of the audit reads these tensors. They are declared to "
        f"contain {', '.join(columns) or 'no columns'} of the device, and may show its rows and class shares."
        for name, columns in facts["unattacked"].items()
    ]


def _cells(row: dict[str, Any]) -> list[str]:
    if row["attack"] is None:
        return [NOTHING] * 5
    low, high = row["interval"]
    numbers = [f"{row['linked']:.3f}", f"{low:.3f} to {high:.3f}", f"{row['auc']:.3f}", f"{row['tpr1']:.3f}"]
    return [row["attack"], *numbers]


def _pictures(rows: Sequence[dict[str, Any]]) -> Table | str:
    if not rows:
        return f"pictures: {NOTHING}"
    table = Table(title="pictures", title_justify="left", box=SIMPLE_HEAD, pad_edge=False)
    for name in ("part", "made from", "pictures", "SSIM", "PSNR in dB", "reidentified"):
        table.add_column(name, justify="left" if name in ("part", "made from") else "right")
    for row in rows:
        figures = [f"{row['ssim']:.2f}", f"{row['psnr']:.1f}", f"{row['reidentified']:.2f}"]
        table.add_row(row["part"], row["source"], str(row["pictures"]), *figures)
    return table


def _sums(facts: dict[str, Any]) -> list[str]:
    """Returns a line about what the server has of devices that sum securely."""
    if not facts["sums"]:
        return []
    sizes = " and of ".join(f"{size} devices" for size in facts["sums"])
    worst = NOTHING if facts["linked"] is None else f"{facts['linked']:.3f}"
    return [
        f"The server has the sum of {sizes}, and sees no single device's part, which this audit does not attack; "
        f"linked for the sum: {worst}. Secure sums are not yet reviewed by a cryptographer: an error in them could "
        "show the server a part."
    ]


def _bound(facts: dict[str, Any]) -> list[str]:
    if facts["bound"] is None:
        return []
    return [f"The devices' noise bounds linked at {facts['bound']:.4f}, whatever the attack."]


def _warnings(facts: dict[str, Any]) -> list[str]:
    """Returns a line for gradients of few rows, whatever this attack finds in them."""
    batch = facts["smallest_batch"]
    if batch is None or batch >= MIN_BATCH:
        return []
    return [
        f"A device sent a gradient of {batch} {'row' if batch == 1 else 'rows'}: gradients of fewer than {MIN_BATCH} "
        "rows can be inverted to the rows by stronger attacks."
    ]


def _title(facts: dict[str, Any]) -> str:
    return (
        f"{facts['method']} on {facts['public_set']}: {facts['devices']} devices, {facts['trained_rows']:,} rows, "
        f"{facts['rounds']} {'round' if facts['rounds'] == 1 else 'rounds'}"
    )


def _meaning(facts: dict[str, Any], rows: Sequence[dict[str, Any]]) -> str:
    chance, said = facts["chance"], list[str]()
    if facts["linked"] is not None:
        said.append(
            f"linked: share of {facts['attacked_rows']} rows that stand out among {facts['decoys']} other rows of "
            f"their class (chance {chance['linked']:.3f}); auc: share of those below (chance 0.5); tpr1: above 99 % of "
            "them (chance 0.01)."
        )
    if any(row["attack"] is None and row["part"] not in facts["unattacked"] for row in rows):
        said.append(f"{NOTHING}: the part cannot be tested for single rows.")
    if facts["classes"] is None:
        said.append(f"classes {NOTHING}: no part that the audit reads depends on the class shares of a device.")
    else:
        said.append("classes: how well the class shares of a device are known, 1 exactly, 0 as by a uniform guess.")
    return " ".join([*said, "See docs/explanation/privacy.md."])


def draw(found: Sequence[Pictures], file: Path) -> Path:
    """Writes a PNG with two rows for each kind of picture, originals and reconstructions; returns its path.

    Raises:
        StateError: The file cannot be written.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(_INCHES * _SHOWN + 2.6, 2 * _INCHES * len(found) + 0.4 * len(found)), layout="constrained")
    FigureCanvasAgg(figure)
    for part, one in zip(figure.subfigures(len(found), squeeze=False)[:, 0], found, strict=True):
        figures = one.figures()
        part.suptitle(
            f"{one.part}: {one.source}. SSIM {figures['ssim']:.2f}, PSNR {figures['psnr']:.1f} dB, reidentified "
            f"{figures['reidentified']:.2f} of {len(one.pictures)}",
            fontsize=8,
            ha="left",
            x=0.01,
        )
        axes = part.subplots(2, _SHOWN, squeeze=False)
        for row, (name, images) in enumerate(((one.compared, one.originals), ("from messages", one.pictures))):
            axes[row][0].set_ylabel(name, fontsize=7, rotation=0, ha="right", va="center")
            for column, ax in enumerate(axes[row]):
                _show(ax, images[column] if column < len(images) else None)
    try:
        figure.savefig(file, dpi=110)
    except OSError as error:
        raise StateError(f"cannot write {file}: {error}; choose another --out directory") from error
    return file


def _show(ax: Axes, image: Tensor | None) -> None:
    ax.set_xticks([])
    ax.set_yticks([])
    for spine in ax.spines.values():
        spine.set_visible(False)
    if image is not None:
        shown = image[0] if len(image) != 3 else image.permute(1, 2, 0)
        ax.imshow(shown.numpy(), cmap="gray", vmin=0, vmax=1)
