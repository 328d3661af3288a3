"""What an engine's metrics say of its work, read from its files; in a process of its own, as an engine is."""

from __future__ import annotations

from pathlib import Path

from support.processes import python

CODE = """
import itertools
from pathlib import Path
from fleetdistill.progress import report_progress, report_to
from fleetdistill_console.metrics.engine import EngineMeter
from fleetdistill_console.metrics.files import FilesCollector, clear, keep_only_engines
from fleetdistill_server.phases import phase

store, texts, seconds = Path("{store}"), [], itertools.count(0, 10)

def look(what):
    found = [sample for metric in FilesCollector(store).collect() for sample in metric.samples if sample.value]
    print(what, sorted((one.labels.get("phase", "progress"), one.value) for one in found))

clear(store)
meter = EngineMeter(store, "digits")
look("new:")
meter.waits()
look("waits:")
with meter.of_round(), report_to(lambda kind, fraction: texts.append((kind, fraction)), lambda: next(seconds)):
    look("round:")
    meter.waits()
    look("waits for answers:")
    with phase("distillation"):
        report_progress("training", 0.25)
        look("trains:")
        with phase("averaging"):
            look("averages:")
        look("trains again:")
    look("trained:")
    report_progress("inference", 0.5)
look("after:")
keep_only_engines(store, ["digits"])
look("kept:")
keep_only_engines(store, ["sounds"])
look("ended:")
print(texts)
"""


def test_phases_and_progress_of_a_round(tmp_path: Path) -> None:
    said = python(CODE.replace("{store}", str(tmp_path))).splitlines()
    assert said == [
        "new: [('preparing', 1.0)]",
        "waits: [('waiting', 1.0)]",
        "round: [('round', 1.0)]",
        "waits for answers: [('round', 1.0)]",
        "trains: [('distillation', 1.0), ('progress', 0.25)]",
        "averages: [('averaging', 1.0)]",
        "trains again: [('distillation', 1.0)]",
        "trained: [('round', 1.0)]",
        "after: [('waiting', 1.0)]",
        "kept: [('waiting', 1.0)]",
        "ended: []",
        "[('training', 0.25), ('inference', 0.5)]",
    ], "other receivers of the progress get it, too"
