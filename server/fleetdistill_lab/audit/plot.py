"""Draws reconstructed images below their originals."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from torch import Tensor

from fleetdistill.errors import StateError
from fleetdistill_lab.audit.pictures import Pictures

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_SHOWN = 14
_INCHES = 0.62


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
