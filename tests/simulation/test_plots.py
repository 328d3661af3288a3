"""Report pictures: what is drawn, and that the file is a whole PNG of the stated size."""

from __future__ import annotations

import struct
import subprocess
import sys
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fleetdistill.errors import DataError
from fleetdistill_server.simulation.partition import Partition, dirichlet_by_class
from fleetdistill_server.simulation.plots import plot_curves, plot_partition, save_report_figure

figure_module = pytest.importorskip("matplotlib.figure", reason="matplotlib draws the pictures")

LABELS = np.repeat(np.arange(10), 30)
CLASSES = tuple("abcdefghij")


def _axes() -> Any:
    return figure_module.Figure().subplots()


def _save(path: Path, devices: int = 3, **changes: Any) -> Path:
    names = [f"device-{number}" for number in range(devices)]
    values: dict[str, Any] = {
        "labels": LABELS,
        "partition": dirichlet_by_class(LABELS, devices, 1.0, 0, min_size=1),
        "class_names": CLASSES,
        "device_names": names,
        "rounds": [1, 2],
        "fleet_by_device": {name: [0.2, 0.8] for name in names},
        "alone_by_device": {name: [0.3, 0.6] for name in names},
    }
    return save_report_figure(path, **(values | changes))


def _png_size(file: Path) -> tuple[int, int]:
    """Width and height, after the signature and every chunk's checksum were found right."""
    data = file.read_bytes()
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    position, kinds = 8, []
    while position < len(data):
        (length,) = struct.unpack_from(">I", data, position)
        chunk = data[position + 4 : position + 8 + length]
        assert struct.unpack_from(">I", data, position + 8 + length)[0] == zlib.crc32(chunk)
        kinds.append(chunk[:4])
        position += 12 + length
    assert (kinds[0], kinds[-1]) == (b"IHDR", b"IEND")
    width, height = struct.unpack_from(">II", data, 16)
    return width, height


class TestReportFigure:
    def test_it_is_a_whole_png_of_the_stated_width(self, tmp_path: Path) -> None:
        file = _save(tmp_path / "new" / "report.png", title="feddkc on letters")
        assert file == tmp_path / "new" / "report.png"
        assert _png_size(file) == (1800, 1440)

    def test_more_devices_make_it_taller(self, tmp_path: Path) -> None:
        width, height = _png_size(_save(tmp_path / "report.png", devices=20))
        assert width == 1800
        assert height > 2000

    def test_a_file_that_cannot_be_written_is_named(self, tmp_path: Path) -> None:
        (tmp_path / "file").write_text("in the way")
        with pytest.raises(DataError, match="cannot write the figure to"):
            _save(tmp_path / "file" / "report.png")

    def test_neither_import_nor_drawing_starts_pyplot(self, tmp_path: Path) -> None:
        """pyplot would look for a screen and keep every figure."""
        code = (
            "import sys; import fleetdistill_server.simulation.plots as plots; assert 'matplotlib' not in sys.modules;"
            "from fleetdistill_server.simulation.partition import iid; labels = [0, 1] * 5;"
            f"plots.save_report_figure({str(tmp_path / 'a.png')!r}, labels=labels, partition=iid(labels, 1, 0),"
            "class_names='ab', device_names=['d'], rounds=[1], fleet_by_device={'d': [0.5]}, alone_by_device={});"
            "assert 'matplotlib.pyplot' not in sys.modules"
        )
        path = [entry for entry in sys.path if entry]
        env_code = f"import sys; sys.path[:0] = {path!r}; {code}"
        result = subprocess.run([sys.executable, "-c", env_code], capture_output=True, text=True, check=False)
        assert result.returncode == 0, result.stderr


class TestPartitionPlot:
    def test_bubble_areas_follow_the_counts(self) -> None:
        """Device 0 holds 2 of class 0, device 1 holds 1 of class 0 and 4 of class 1: areas as 2 : 1 : 4."""
        labels = np.array([0, 0, 0, 1, 1, 1, 1])
        split = Partition("by_hand", (np.array([0, 1]), np.array([2, 3, 4, 5, 6])), {"alpha": 0.5, "seed": 7})
        ax = _axes()
        plot_partition(ax, labels, split, ["cat", "dog"], ["left", "right"])
        (bubbles,) = ax.collections
        assert bubbles.get_offsets().tolist() == [[0, 0], [0, 1], [1, 1]]
        sizes = bubbles.get_sizes()
        assert (sizes / sizes[1]).tolist() == pytest.approx([2, 1, 4])
        assert [text.get_text() for text in ax.get_yticklabels()] == ["left", "right"]
        assert [text.get_text() for text in ax.get_xticklabels()] == ["cat", "dog"]
        assert {"2", "5"} <= {text.get_text() for text in ax.texts}
        assert "by_hand, alpha 0.5, seed 7" in ax.get_title(loc="left")

    def test_a_hundred_classes_are_named_now_and_then(self) -> None:
        labels = np.repeat(np.arange(100), 5)
        ax = _axes()
        plot_partition(ax, labels, dirichlet_by_class(labels, 2, 1.0, 0), [str(i) for i in range(100)], ["a", "b"])
        assert [text.get_text() for text in ax.get_xticklabels()][:3] == ["0", "4", "8"]

    def test_names_that_do_not_fit_are_refused(self) -> None:
        split = dirichlet_by_class(LABELS, 3, 1.0, 0, min_size=1)
        with pytest.raises(DataError, match="2 device names for a partition of 3"):
            plot_partition(_axes(), LABELS, split, CLASSES, ["a", "b"])
        with pytest.raises(DataError, match=r"label 9 at row 270 is outside \[0, 9\)"):
            plot_partition(_axes(), LABELS, split, CLASSES[:9], ["a", "b", "c"])


class TestCurves:
    def test_means_are_bold_and_over_the_scored_devices(self) -> None:
        """Round 1: (0.2 + 0.4) / 2; round 2: one device was not scored; round 3: none was."""
        nan = float("nan")
        ax = _axes()
        plot_curves(ax, [1, 2, 3], {"a": [0.2, 0.6, nan], "b": [0.4, nan, nan]}, {"a": [0.1, 0.2, 0.3]})
        bold = [line.get_ydata() for line in ax.lines if line.get_linewidth() == 3 and len(line.get_ydata())]
        thin = [line for line in ax.lines if line.get_linewidth() == 1 and len(line.get_ydata())]
        np.testing.assert_allclose(bold, [[0.1, 0.2, 0.3], [0.3, 0.6, nan]])
        assert len(thin) == 3
        names = [text.get_text() for text in ax.get_legend().get_texts()]
        assert names == ["fleet: mean of 2 devices", "alone: mean of 1 devices, 30.0% at the end", "single devices"]

    def test_a_further_answer_is_a_dashed_mean_from_the_first_round_that_has_it(self) -> None:
        ax = _axes()
        both = {"a": [0.2, 0.6], "b": [0.4, 0.8]}
        plot_curves(ax, [1, 2], both, {}, {"personal": {"a": [None, 0.5], "b": [None, 0.7]}})
        (dashed,) = [line for line in ax.lines if line.get_linestyle() == "--" and len(line.get_ydata())]
        np.testing.assert_allclose(dashed.get_ydata(), [float("nan"), 0.6])
        names = [text.get_text() for text in ax.get_legend().get_texts()]
        assert names[1] == "fleet, personal answers on all classes: mean of 2 devices, 60.0% at the end"

    def test_curves_that_do_not_fit_are_refused(self) -> None:
        with pytest.raises(DataError, match=r"device 'a' \(fleet\) has 1 values for 2 rounds"):
            plot_curves(_axes(), [1, 2], {"a": [0.5]}, {})
        with pytest.raises(DataError, match=r"device 'b' \(fleet, personal answers .*\) has 1 values for 2 rounds"):
            plot_curves(_axes(), [1, 2], {"a": [0.5, 0.5]}, {}, {"personal": {"a": [None, 0.5], "b": [0.5]}})
        with pytest.raises(DataError, match="0 rounds, 0 devices"):
            plot_curves(_axes(), [], {}, {})
