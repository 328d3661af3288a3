"""Runs as event files for TensorBoard, one directory for each run."""

from __future__ import annotations

import json
import re
import shutil
import time
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from pathlib import Path

from fleetdistill_console.tracking.tracker import Description, RoundPoint

_NOTES = "fleetdistill.json"
_ID_DIGITS = 6


class TensorBoardTracker:
    """A directory of event files.

    Args:
        directory: The directory that `tensorboard --logdir` shows.
        experiment: Folder below it; empty for none.
    """

    def __init__(self, directory: Path, experiment: str = "") -> None:
        self._directory = directory / _file_name(experiment) if experiment else directory

    def open(self, run: Description) -> TensorBoardRun:
        """Returns a run with a new event file beside earlier ones."""
        stamp = time.strftime("%Y%m%d-%H%M%S", time.gmtime(run.began))
        opened = TensorBoardRun(self._directory / f"{_file_name(run.title)}-{stamp}-{run.id[:_ID_DIGITS]}")
        opened.set_settings(run)
        return opened


def _file_name(text: str) -> str:
    return re.sub(r"[^\w.=-]+", "-", text).strip(".-") or "run"


class TensorBoardRun:
    """A directory with the event files of one run; see `TrackedRun`.

    The figures of a round are one record, with a checksum, so a killed process leaves all of them or none.
    """

    def __init__(self, directory: Path) -> None:
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        directory.mkdir(parents=True, exist_ok=True)
        self._directory = directory
        result = EventAccumulator(str(directory), size_guidance={"scalars": 0}, purge_orphaned_data=False)
        result.Reload()
        tags = result.Tags()
        self._known = {name: {Scalar.step for Scalar in result.Scalars(name)} for name in tags["scalars"]}
        self._has_settings = "settings/text_summary" in tags["tensors"]
        self._events = EventFileWriter(str(directory))

    def known(self) -> Mapping[str, AbstractSet[int]]:
        """Returns the steps that the event files have of each figure."""
        return self._known

    def set_settings(self, run: Description) -> None:
        """Writes the settings once: as text, and as hyperparameters, by which TensorBoard compares runs."""
        if self._has_settings or not run.settings:
            return
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.plugins.hparams.summary_v2 import hparams_pb

        settings = {name: _number_or_text(value) for name, value in run.settings.items()}
        hyperparameters = hparams_pb(settings, trial_id=run.id, start_time_secs=run.began)
        for summary in (hyperparameters, _text("settings/text_summary", _table(run.settings))):
            self._events.add_event(Event(wall_time=run.began, summary=summary))
        self._events.flush()
        self._has_settings = True

    def write(self, points: Sequence[RoundPoint]) -> None:
        """Appends figures, one record for each round."""
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary

        for point in points:
            values = [Summary.Value(tag=name, simple_value=value) for name, value in point.values.items()]
            self._events.add_event(Event(wall_time=point.at, step=point.step, summary=Summary(value=values)))
        self._events.flush()
        for point in points:
            for name in point.values:
                self._known.setdefault(name, set()).add(point.step)

    def note(self, name: str) -> str | None:
        """Returns a note from the file of notes."""
        return self._notes().get(name)

    def set_note(self, name: str, value: str) -> None:
        """Writes a note to a file beside the event files."""
        notes = self._notes()
        if notes.get(name) == value:
            return
        new = self._directory / f"{_NOTES}.new"
        new.write_text(json.dumps({**notes, name: value}, indent=1))
        new.replace(self._directory / _NOTES)

    def _notes(self) -> dict[str, str]:
        file = self._directory / _NOTES
        return dict(json.loads(file.read_text())) if file.exists() else {}

    def keep(self, files: Mapping[str, Path]) -> None:
        """Copies files beside the event files."""
        for name, file in files.items():
            place = self._directory / name
            place.parent.mkdir(parents=True, exist_ok=True)
            new = place.with_name(f"{place.name}.new")
            shutil.copyfile(file, new)
            new.replace(place)

    def end(self, status: str, reason: str) -> None:
        """Notes the run's status."""
        self.set_note("status", f"{status}: {reason}" if reason else status)

    def close(self) -> None:
        """Closes the event file."""
        self._events.close()


def _number_or_text(value: str) -> float | str:
    try:
        return float(value)
    except ValueError:
        return value


def _table(settings: Mapping[str, str]) -> str:
    """Returns the settings as a table in Markdown, which TensorBoard shows."""
    rows = [f"| {name} | `{value}` |" for name, value in settings.items()]
    return "\n".join(["| setting | value |", "|---|---|", *rows])


def _text(tag: str, text: str):  # type: ignore[no-untyped-def]  # a Summary, whose type would import tensorboard
    from tensorboard.compat.proto.summary_pb2 import Summary, SummaryMetadata
    from tensorboard.compat.proto.tensor_pb2 import TensorProto
    from tensorboard.compat.proto.tensor_shape_pb2 import TensorShapeProto

    shape = TensorShapeProto(dim=[TensorShapeProto.Dim(size=1)])
    tensor = TensorProto(dtype="DT_STRING", string_val=[text.encode()], tensor_shape=shape)
    metadata = SummaryMetadata(plugin_data=SummaryMetadata.PluginData(plugin_name="text"))
    return Summary(value=[Summary.Value(tag=tag, metadata=metadata, tensor=tensor)])
