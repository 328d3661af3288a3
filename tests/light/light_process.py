"""A device without PyTorch in a process of its own, in which importing torch, onnx or safetensors fails.

    python light_process.py played FOLDER               plays a whole exchange from files, without a server
    python light_process.py released FOLDER             makes a private release from files, without a server
    python light_process.py served FOLDER 127.0.0.1:1   takes part in a run over gRPC

FOLDER has data.npz, and for an exchange from files contract.bin, extractor.onnx and space.npz. What comes of it goes
there too. Imports nothing that a Raspberry Pi would not have.
"""

from __future__ import annotations

import json
import signal
import sys
from pathlib import Path
from typing import Any

from support.open_device import open_device
from support.without_torch import TORCH, block

block(*TORCH, "sklearn", "scipy")

import numpy as np  # noqa: E402

from fleetdistill import COLUMNS, Event, Splits  # noqa: E402
from fleetdistill.compute.light_compute import LightCompute, light_worker  # noqa: E402
from fleetdistill.knowledge import ClassSpace, NetworkFile, SharedStatistics  # noqa: E402
from fleetdistill.wire.v1 import contract_pb2, service_pb2  # noqa: E402

Pair = tuple[np.ndarray, np.ndarray]


def arrays_of(file: Path) -> Pair:
    with np.load(file) as arrays:
        return arrays["inputs"], arrays["labels"]


def played(folder: Path) -> None:
    """Profile, extractor, both steps, delivery, a restart from bytes, and answers."""
    contract = contract_pb2.Contract.FromString((folder / "contract.bin").read_bytes())
    data = arrays_of(folder / "data.npz")
    worker = light_worker(Splits(lambda: data, test_data=data, validation_data=data))(contract)
    assert isinstance(worker, LightCompute)
    worker.profile(["metrics"])
    take_extractor(worker, folder)
    summary = worker.answer(service_pb2.Ask(round=1, step="summarise"), {}, ["class_statistics", "counts"])
    assert isinstance(summary.answer.parts["statistics"], SharedStatistics)
    with np.load(folder / "space.npz") as arrays:
        space = ClassSpace(**{**arrays, "labels": arrays["labels"].tolist()})
    from fleetdistill.methods.classstats.exchange import SpacePlan

    parts = {"space": space, "plan": SpacePlan(merge=5, counted=True, draw_seed=1).to_wire()}
    work = worker.answer(service_pb2.Ask(round=1, step="learn"), parts, ["metrics"])
    assert work.replacement is not None
    assert work.delivered is not None
    worker.deliver(work.replacement)
    again = light_worker(data)(contract)
    take_extractor(again, folder)
    again.restore(work.state, work.delivered)
    assert np.array_equal(again.delivered_model()(data[0]), worker.delivered_model()(data[0]))
    note_answers(folder, worker.delivered_models(), data)


def released(folder: Path) -> None:
    """The noisy sums that a device of a private run would send."""
    from fleetdistill.device.events import DeviceLock, Events
    from fleetdistill.device.private import PrivateAnswers
    from fleetdistill.device.secure import ANY_TERMS, SecureSums
    from fleetdistill.methods.base import Ask
    from fleetdistill.state.files import Files

    contract = contract_pb2.Contract.FromString((folder / "contract.bin").read_bytes())
    worker: Any = light_worker(arrays_of(folder / "data.npz"))(contract)
    take_extractor(worker, folder)
    answer = worker.answer(service_pb2.Ask(round=1, step="summarise"), {}, ["class_statistics", "counts"]).answer
    events = Events(DeviceLock(lambda event: None), "light")
    private = PrivateAnswers(Files(folder), None, events, SecureSums(Files(folder), "light", ANY_TERMS, None, events))
    sent = private.private_answer(answer, contract, Ask(round=1, step="summarise", seed=0)).parts["statistics"]
    np.savez(folder / "sums.npz", **vars(sent))
    note_modules(folder)


def take_extractor(worker: Any, folder: Path) -> None:
    (sha256,) = worker.wanted_payloads()
    assert not worker.has_payload(sha256)
    file = NetworkFile(onnx=np.frombuffer((folder / "extractor.onnx").read_bytes(), np.uint8))
    worker.take_payload(sha256, {"extractor": file})
    assert worker.has_payload(sha256)


def served(folder: Path, server: str) -> None:
    """Takes part until the run is over; every event is kept at once, for a process that is killed."""
    data = arrays_of(folder / "data.npz")

    def note(event: Event) -> None:
        with (folder / "events.jsonl").open("a") as file:
            file.write(json.dumps([event.kind, event.round, event.text]) + "\n")

    with open_device(
        allow=COLUMNS,
        server=server,
        worker=light_worker(Splits(data, test_data=data)),
        state_dir=folder / "state",
        device_id="light",
        export="never",
        on_event=note,
    ) as device:
        signal.signal(signal.SIGTERM, lambda number, frame: device.stop())
        device.run()
        note_answers(folder, device.models, data)


def note_answers(folder: Path, models: Any, data: Pair) -> None:
    np.savez(folder / "logits.npz", **{name: model(data[0]) for name, model in models.items()})
    note_modules(folder)


def note_modules(folder: Path) -> None:
    loaded = sorted({name.partition(".")[0] for name in sys.modules})
    (folder / "modules.json").write_text(json.dumps(loaded))


if __name__ == "__main__":
    {"played": played, "released": released, "served": served}[sys.argv[1]](Path(sys.argv[2]), *sys.argv[3:])  # type: ignore[operator]
