"""Report pictures: what is drawn, and that the file is a whole PNG of the stated size."""

from __future__ import annotations

import itertools
import re
import struct
import subprocess
import sys
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fleetdistill.errors import ConfigurationError, DataError
from fleetdistill_lab.simulation.report.comparison import Curve
from fleetdistill_lab.simulation.report.device_plots import (
    SINGLE_LINES,
    DeviceCurves,
    apart,
    plot_gains,
    plot_rounds,
)
from fleetdistill_lab.simulation.report.plots import (
    MAX_HEIGHT,
    MAX_ROWS,
    PANELS,
    devices_drawn,
    plot_comparison,
    plot_partition,
    save_report_figure,
)

figure_module = pytest.importorskip("matplotlib.figure", reason="matplotlib draws the pictures")

pytestmark = pytest.mark.pictures

CLASSES = tuple("abcdefghij")


def _axes() -> Any:
    return figure_module.Figure().subplots()


def curve(name: str, kilobytes: list[float], accuracy: list[float | None], devices: tuple[float, ...] = ()) -> Curve:
    return Curve(name, [1000 * kilobyte for kilobyte in kilobytes], accuracy, list(devices))


def _save(path: Path, devices: int = 3, **changes: Any) -> Path:
    names = [f"device-{number}" for number in range(devices)]
    values: dict[str, Any] = {
        "counts_jc": np.full((devices, 10), 30),
        "partition": "iid",
        "class_names": CLASSES,
        "device_names": names,
        "curves": [curve("feddkc", [1, 2], [0.2, 0.8])],
        "by_device": DeviceCurves({name: [0.2, 0.8] for name in names}),
        "alone": 0.3,
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
        assert _png_size(file) == (1800, 2284)

    def test_one_exchange_has_no_picture_of_rounds(self, tmp_path: Path) -> None:
        file = _save(tmp_path / "report.png", by_device=DeviceCurves({"device-0": [0.8]}))
        assert _png_size(file) == (1800, 2284 - 780)

    @pytest.mark.parametrize(
        "devices", [3 * MAX_ROWS, *(pytest.param(number, marks=pytest.mark.long) for number in (10, MAX_ROWS, 1000))]
    )
    def test_no_number_of_devices_makes_it_taller_than_the_limit(self, tmp_path: Path, devices: int) -> None:
        width, height = _png_size(_save(tmp_path / "report.png", devices=devices))
        assert 2284 < height <= MAX_HEIGHT
        assert 1300 < width <= 1800

    @pytest.mark.long
    @pytest.mark.parametrize(
        ("panels", "millimetres"), [(["rounds"], 84), (["gains", "gains"], 84), (["data", "gains"], 174), (PANELS, 174)]
    )
    def test_chosen_panels_are_as_wide_as_a_column_or_a_page(
        self, tmp_path: Path, panels: list[str], millimetres: int
    ) -> None:
        """A PDF states its size in points, of which an inch has 72."""
        file = _save(tmp_path / "a.pdf", panels=panels)
        width, _ = re.findall(rb"/MediaBox \[ 0 0 ([\d.]+) ([\d.]+) \]", file.read_bytes())[0]
        assert float(width) == pytest.approx(millimetres / 25.4 * 72, abs=0.01)

    def test_a_pdf_has_truetype_fonts(self, tmp_path: Path) -> None:
        data = _save(tmp_path / "a.pdf", title="feddkc on letters").read_bytes()
        assert b"/FontFile2" in data
        assert b"/Type3" not in data

    def test_an_svg_has_the_text_of_the_chosen_panels_only(self, tmp_path: Path) -> None:
        titles = {"traffic": "by traffic", "rounds": "by round", "data": "Training data", "gains": "at the end"}
        for chosen in PANELS:
            texts = re.findall(r"<text [^>]*>(.*?)</text>", _save(tmp_path / "a.svg", panels=[chosen]).read_text())
            assert [name for name, title in titles.items() if title in " ".join(texts)] == [chosen]

    def test_rows_keep_their_devices_without_the_panel_beside(self, tmp_path: Path) -> None:
        rates: dict[str, list[float | None]] = {"a": [0.2, 0.8], "b": [0.3, 0.7]}
        given: dict[str, Any] = {"counts_jc": np.ones((2, 10)), "device_names": ["a (resnet2)", "b (resnet4)"]}
        file = _save(tmp_path / "a.svg", by_device=DeviceCurves(rates), panels=["gains"], **given)
        texts = re.findall(r"<text [^>]*>(.*?)</text>", file.read_text())
        assert {"a", "b"} <= set(texts), "without their models, in a column"

    def test_chosen_panels_without_scores_say_so(self, tmp_path: Path) -> None:
        file = _save(tmp_path / "a.svg", by_device=DeviceCurves({"device-0": [0.8]}), panels=["rounds"])
        assert "nothing was scored for rounds" in file.read_text()

    @pytest.mark.parametrize(
        ("name", "panels", "message"),
        [
            ("a.gif", [], "unknown figure 'gif'.* one of png, pdf, svg"),
            ("a.png", ["round"], "unknown panel 'round'; did you mean 'rounds'.* one of traffic, rounds, data, gains"),
        ],
    )
    def test_unknown_types_and_panels_are_refused(
        self, tmp_path: Path, name: str, panels: list[str], message: str
    ) -> None:
        with pytest.raises(ConfigurationError, match=message):
            _save(tmp_path / name, panels=panels)
        assert not (tmp_path / name).exists()

    def test_few_devices_are_all_drawn(self) -> None:
        assert devices_drawn(_curves(MAX_ROWS), MAX_ROWS) == list(range(MAX_ROWS))

    def test_of_many_devices_worst_best_and_ranks_between_are_drawn(self) -> None:
        count = 2 * MAX_ROWS - 1
        rates = {f"d{number}": [number * 37 % count / count] for number in range(count)}
        drawn = devices_drawn(DeviceCurves(rates), count)
        ranks = sorted(round(rates[f"d{row}"][0] * count) for row in drawn)
        assert ranks == list(range(0, count, 2))
        assert drawn == sorted(drawn)

    def test_devices_without_scores_are_not_drawn_beside_scored_ones(self) -> None:
        rates: dict[str, list[float | None]] = {f"d{number}": [None] for number in range(50)}
        assert len(devices_drawn(DeviceCurves(rates), 50)) == MAX_ROWS
        rates["d7"], rates["d30"] = [0.5], [0.4]
        assert devices_drawn(DeviceCurves(rates), 50) == [7, 30]

    def test_a_file_that_cannot_be_written_is_named(self, tmp_path: Path) -> None:
        (tmp_path / "file").write_text("in the way")
        with pytest.raises(DataError, match="cannot write the figure to"):
            _save(tmp_path / "file" / "report.png")

    @pytest.mark.long
    def test_neither_import_nor_drawing_starts_pyplot(self, tmp_path: Path) -> None:
        """pyplot would look for a screen and keep every figure."""
        code = (
            "import sys; import fleetdistill_lab.simulation.report.plots as plots;"
            "assert 'matplotlib' not in sys.modules;"
            f"plots.save_report_figure({str(tmp_path / 'a.png')!r}, counts_jc=[[1, 2]], partition='iid',"
            "class_names='ab', device_names=['d'], curves=[plots.Curve('a', [1000.0], [0.5])],"
            "by_device=plots.DeviceCurves({'d': [0.5]}));"
            "assert 'matplotlib.pyplot' not in sys.modules"
        )
        path = [entry for entry in sys.path if entry]
        env_code = f"import sys; sys.path[:0] = {path!r}; {code}"
        result = subprocess.run([sys.executable, "-c", env_code], capture_output=True, text=True, check=False)
        assert result.returncode == 0, result.stderr


class TestPartitionPlot:
    def test_bubble_areas_follow_the_counts(self) -> None:
        """Device 0 holds 2 of class 0, device 1 holds 1 of class 0 and 4 of class 1: areas as 2 : 1 : 4."""
        ax = _axes()
        plot_partition(ax, [[2, 0], [1, 4]], ["cat", "dog"], ["left", "right"], "by_hand, alpha 0.5, seed 7")
        (bubbles,) = ax.collections
        assert bubbles.get_offsets().tolist() == [[0, 0], [0, 1], [1, 1]]
        sizes = bubbles.get_sizes()
        assert (sizes / sizes[1]).tolist() == pytest.approx([2, 1, 4])
        assert [text.get_text() for text in ax.get_yticklabels()] == ["left", "right"]
        assert [text.get_text() for text in ax.get_xticklabels()] == ["cat", "dog"]
        assert {"2", "5"} <= {text.get_text() for text in ax.texts}
        assert "by_hand, alpha 0.5, seed 7" in ax.get_title(loc="left")

    def test_a_hundred_classes_are_named_now_and_then(self) -> None:
        ax = _axes()
        plot_partition(ax, np.ones((2, 100)), [str(i) for i in range(100)], ["a", "b"], "iid")
        assert [text.get_text() for text in ax.get_xticklabels()][:3] == ["0", "4", "8"]

    def test_names_that_do_not_fit_are_refused(self) -> None:
        counts = np.ones((3, 10))
        with pytest.raises(DataError, match=r"2 device names and 10 class names for counts of shape \[3, 10\]"):
            plot_partition(_axes(), counts, CLASSES, ["a", "b"], "iid")
        with pytest.raises(DataError, match="9 class names"):
            plot_partition(_axes(), counts, CLASSES[:9], ["a", "b", "c"], "iid")


class TestComparison:
    def test_rounds_are_a_curve_over_bytes_and_one_exchange_a_point(self) -> None:
        ax = _axes()
        rounds = curve("feddkc", [10, 20, 40], [None, 0.5, 0.75])
        exchange = curve("class statistics general", [15], [0.9], devices=(0.85, 0.95))
        plot_comparison(ax, [rounds, exchange], alone=0.6)
        across, drawn = ax.lines
        np.testing.assert_allclose(across.get_ydata(), [0.6, 0.6])
        np.testing.assert_allclose(drawn.get_xdata(), [20, 40])
        np.testing.assert_allclose(drawn.get_ydata(), [0.5, 0.75])
        dots, point = ax.collections
        assert dots.get_offsets().tolist() == [[15, 0.85], [15, 0.95]]
        assert point.get_offsets().tolist() == [[15, 0.9]]
        assert point.get_sizes()[0] > dots.get_sizes()[0]
        assert [text.get_text() for text in ax.get_legend().get_texts()] == [
            "alone: 60.0%",
            "feddkc: 75.0% after 40.0 kB",
            "class statistics general: 90.0% after 15.0 kB",
        ]

    def test_curves_join_scored_rounds_and_unscored_ones_are_absent(self) -> None:
        ax = _axes()
        gaps, begun = curve("feddkc", [10, 20, 40], [0.5, None, 0.75]), curve("FedAvg global", [10, 20], [0.5, None])
        plot_comparison(ax, [gaps, begun, curve("FedAvg devices", [10, 20], [None, None])])
        assert (list(ax.lines[0].get_xdata()), list(ax.lines[0].get_ydata())) == ([10, 40], [0.5, 0.75])
        texts = [text.get_text() for text in ax.get_legend().get_texts()]
        assert texts[0] == "feddkc: 75.0% after 40.0 kB"
        assert "FedAvg devices" not in "".join(texts)
        assert not any("%" in text for text in texts[1:]), "the end of that curve was not scored"

    def test_free_rounds_after_exchange_leave_it_a_point(self) -> None:
        ax = _axes()
        plot_comparison(ax, [curve("class statistics general", [15, 15], [0.9, 0.9])])
        assert not ax.lines
        assert ax.collections[-1].get_offsets().tolist() == [[15, 0.9]]

    def test_answers_of_method_share_its_colour_and_differ_in_style(self) -> None:
        ax = _axes()
        names = ("feddkc", "FedAvg devices", "FedAvg global")
        plot_comparison(ax, [curve(name, [1, 2], [0.1, 0.2]) for name in names])
        feddkc, devices, whole = ax.lines
        assert feddkc.get_color() != devices.get_color() == whole.get_color()
        assert devices.get_linestyle() != whole.get_linestyle()

    def test_fedavg_global_model_looks_same_in_all_panels_and_legend(self) -> None:
        compared, rounds = _axes(), _axes()
        names = ("FedAvg devices", "FedAvg global")
        plot_comparison(compared, [curve(name, [1, 2], [0.1, 0.2]) for name in names])
        plot_rounds(rounds, DeviceCurves({"a": [0.1, 0.2]}, {"FedAvg global": [0.3, 0.4]}))
        lines = (compared.lines[1], compared.get_legend().get_lines()[1], rounds.lines[1])
        looks = {(line.get_color(), line.get_linestyle()) for line in lines}
        assert len(looks) == 1

    def test_nothing_drawn_lies_outside_and_legend_lies_below(self, tmp_path: Path) -> None:
        ax = _axes()
        plot_comparison(ax, [curve("a", [7, 90], [0.31, 1.0]), curve("b", [3], [0.4], (0.05,))], alone=0.2)
        low, high = ax.get_ylim()
        assert low <= 0.05
        assert high >= 1
        left, right = ax.get_xlim()
        assert left < 3
        assert right > 90
        ax.figure.savefig(tmp_path / "a.png")
        assert ax.get_legend().get_window_extent().y1 < ax.get_window_extent().y0

    def test_curves_that_do_not_fit_are_refused(self) -> None:
        for bad in (curve("a", [1, 2], [0.5]), curve("a", [], []), curve("a", [0], [0.5])):
            with pytest.raises(DataError, match="cannot draw 'a'"):
                plot_comparison(_axes(), [bad])
        with pytest.raises(DataError, match="without curves"):
            plot_comparison(_axes(), [])


def _curves(devices: int, rounds: int = 4) -> DeviceCurves:
    rates = {f"d{number:02}": [0.5 + number / 100 + item / 50 for item in range(rounds)] for number in range(devices)}
    return DeviceCurves(
        rates,
        {
            "alone, mean": [0.4] * rounds,
            "FedAvg global": [0.3, 0.6, 0.7, None][:rounds],
            "global model": [0.9] * rounds,
        },
    )


class TestDevices:
    def test_few_devices_have_a_line_each_with_name_at_its_end(self) -> None:
        ax = _axes()
        plot_rounds(ax, _curves(3))
        assert len(ax.lines) == 3 + 3
        assert len({line.get_color() for line in ax.lines}) == 6
        for line, rates in zip(ax.lines, _curves(3).devices.values(), strict=False):
            assert (list(line.get_xdata()), list(line.get_ydata())) == ([1, 2, 3, 4], rates)
        named = {text.get_text(): text.get_color() for text in ax.texts}
        assert set(named) == {"d00 56.0%", "d01 57.0%", "d02 58.0%", "alone, mean 40.0%", "global model 90.0%"}
        assert named["d01 57.0%"] == ax.lines[1].get_color()
        assert ax.get_legend() is None

    def test_many_devices_are_a_band_with_worst_and_best_named(self) -> None:
        ax = _axes()
        plot_rounds(ax, _curves(SINGLE_LINES + 31))
        (band,) = ax.collections
        corners = band.get_paths()[0].vertices
        assert corners[:, 1].min() == pytest.approx(0.5 + 0.05 * 0.40)
        assert corners[:, 1].max() == pytest.approx(0.56 + 0.95 * 0.40)
        named = {text.get_text() for text in ax.texts}
        assert {"d00 56.0%", "d40 96.0%", "median of 41, band: 90 % 76.0%", "global model 90.0%"} <= named
        assert len(ax.lines) == 1 + 2 + 3

    @pytest.mark.parametrize("devices", [2, 10, 40])
    def test_no_name_lies_over_another_or_over_a_curve(self, devices: int, tmp_path: Path) -> None:
        figure = figure_module.Figure(figsize=(9, 3.9), dpi=200, layout="constrained")
        ax = figure.subplots()
        plot_rounds(ax, _curves(devices))
        figure.savefig(tmp_path / "a.png")
        without_their_line = pytest.importorskip("matplotlib.text").Text.get_window_extent
        boxes = sorted((without_their_line(text) for text in ax.texts), key=lambda box: box.y0)
        assert all(box.x0 > ax.bbox.x1 for box in boxes)
        assert all(upper.y0 >= lower.y1 - 1 for lower, upper in itertools.pairwise(boxes))

    def test_names_move_as_little_as_it_takes(self) -> None:
        assert apart([0.1, 0.5, 0.9], 0.1) == [0.1, 0.5, 0.9]
        assert apart([0.5, 0.5, 0.9], 0.1) == pytest.approx([0.45, 0.55, 0.9])
        assert apart([0.4, 0.5, 0.5, 0.52], 0.1) == pytest.approx([0.33, 0.43, 0.53, 0.63])

    def test_each_device_has_a_row_with_its_gain(self) -> None:
        ax = _axes()
        curves = DeviceCurves({"a": [0.1, 0.8], "b": [0.2, 0.9]}, {}, {"a": 0.5, "b": 0.6}, {"personal": {"b": 0.95}})
        plot_gains(ax, curves)
        alone, fleet, personal = (dots.get_offsets().tolist() for dots in ax.collections)
        assert (alone, fleet, personal) == ([[0.5, 0], [0.6, 1]], [[0.8, 0], [0.9, 1]], [[0.95, 1]])
        texts = [text.get_text() for text in ax.get_legend().get_texts()]
        assert texts == ["alone", "in the fleet", "personal model"]
        assert ax.get_ylim()[0] > ax.get_ylim()[1], "the first device on top, as in the picture beside it"
        assert ax.get_title(loc="left") == "Accuracy at the end"

    def test_gains_of_interrupted_simulation_name_the_round(self) -> None:
        ax = _axes()
        plot_gains(ax, DeviceCurves({"a": [0.1, 0.8]}, moment="after round 2"))
        assert ax.get_title(loc="left") == "Accuracy after round 2"

    def test_curves_of_different_lengths_are_refused(self) -> None:
        for bad in (
            DeviceCurves({}),
            DeviceCurves({"a": []}),
            DeviceCurves({"a": [0.1]}, {"global model": [0.1, 0.2]}),
        ):
            with pytest.raises(DataError, match="cannot plot rounds"):
                plot_rounds(_axes(), bad)
