"""One simulated device: the SDK's own `Device` on files, in this process or in one of its own.

python -m fleetdistill_server.simulation.spec.device SPEC.json... --server 127.0.0.1:PORT
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from fleetdistill import Device, Event, FleetDistillError
from fleetdistill.knowledge import RECEIVED, RESULT
from fleetdistill.link.base import Link
from fleetdistill.methods.outside import import_modules
from fleetdistill.models import USUAL_PREDICTOR
from fleetdistill.seeds import derive_seed
from fleetdistill_server.service.processes import end_with_parent
from fleetdistill_server.simulation.spec.score_log import append_scores


@dataclass(frozen=True)
class DeviceSpec:
    """Everything that makes a simulated device.

    Attributes:
        name: Its id in the fleet.
        model: Name in the zoo, or package.module:factory.
        seed: The simulation's seed; with the name it decides the model's first weights.
        classes: C of the contract.
        data_file, test_file: `.npz` with `inputs` and `labels`.
        state_dir: Its state directory, where `exported.json` says how its ONNX model turned out.
        run: Name of the run.
        validation_file: The data that decide whether its model is replaced; empty for none.
        predictor: Name in `fleetdistill.models.PREDICTORS`, for methods that train one behind fixed features.
        attack: What a hostile device does, a name in `hostile.ATTACKS`; empty for an honest one.
        modules: What its process imports, which registers the method.
    """

    name: str
    model: str
    seed: int
    classes: int
    data_file: str
    test_file: str
    state_dir: str
    run: str
    validation_file: str = ""
    predictor: str = USUAL_PREDICTOR
    attack: str = ""
    modules: tuple[str, ...] = ()

    @property
    def scores_file(self) -> Path:
        """Where the device notes how its model does on the test part, a line a round."""
        return self.scores_file_of("")

    def scores_file_of(self, answer: str) -> Path:
        """The same for a further answer of the device, such as classstats' `personal`; empty for the general one."""
        return Path(f"{self.state_dir}-scores{f'-{answer}' if answer else ''}.jsonl")

    def further_answers(self) -> list[str]:
        """Names of the answers that it has noted scores of beside the general one."""
        before = f"{Path(self.state_dir).name}-scores-"
        return sorted(one.stem.removeprefix(before) for one in Path(self.state_dir).parent.glob(f"{before}*.jsonl"))

    @property
    def products_file(self) -> Path:
        """Where it notes how the fleet's model does there as it was sent, by the last round that had a part in it."""
        return Path(f"{self.state_dir}-products.jsonl")

    @property
    def exported_file(self) -> Path:
        """Where the device tells about its exported model."""
        return Path(self.state_dir) / "exported.json"


def load_arrays(file: str) -> tuple[np.ndarray, np.ndarray]:
    """Inputs and labels of a device's file."""
    with np.load(file) as arrays:
        return arrays["inputs"], arrays["labels"]


def build_device_model(spec: DeviceSpec, input_shape: tuple[int, ...]):  # type: ignore[no-untyped-def]  # a torch module
    """The device's model with its first weights, the same in every process."""
    import torch

    from fleetdistill.models import build_model

    torch.manual_seed(derive_seed(spec.seed, 0, "device model", spec.name))
    return build_model(spec.model, input_shape=input_shape, classes=spec.classes)


def make_device(spec: DeviceSpec, server: str | Link) -> Device:
    """The SDK's device for a spec."""
    data, test_data = load_arrays(spec.data_file), load_arrays(spec.test_file)

    def note(event: Event) -> None:
        if event.kind == "exported":
            new = spec.exported_file.with_suffix(".new")
            new.write_text(json.dumps(event.values))
            new.replace(spec.exported_file)
        elif event.kind == "scored":
            split, _, answer = event.values["split"].partition("/")
            if split == "test" and answer in (RECEIVED, RESULT):
                completed = event.round - (answer == RECEIVED)  # what a round brings the rounds before it have made
                append_scores(spec.products_file, completed, event.values["confusion"])
            elif split == "test":
                append_scores(spec.scores_file_of(answer), event.round, event.values["confusion"])

    computes: dict[str, Any] = {
        "model": lambda: build_device_model(spec, data[0].shape[1:]),
        "model_name": spec.model,
        "data": data,
        "test_data": test_data,
        "validation_data": load_arrays(spec.validation_file) if spec.validation_file else None,
        "predictor": spec.predictor,
    }
    return Device(
        server=server,
        **(_hostile(spec, computes) if spec.attack else computes),
        state_dir=spec.state_dir,
        run=spec.run,
        device_id=spec.name,
        allow=("features", "logits", "labels", "parameters", "gradients", "counts", "metrics"),
        export_onnx="finish",
        on_event=note,
    )


def _hostile(spec: DeviceSpec, computes: Mapping[str, Any]) -> dict[str, Any]:
    from fleetdistill_server.simulation.spec.hostile import HostileWorker, flipped

    inputs, labels = computes["data"]
    given = {**computes, "data": (inputs, flipped(spec.attack, labels, spec.classes)), "torch_device": "cpu"}
    return {"worker": lambda contract: HostileWorker(contract, spec.attack, **given)}


def main() -> int:
    """Entry point of the devices' process: one device, or a fork for each of several."""
    parser = argparse.ArgumentParser(description="Simulated devices.")
    parser.add_argument("specs", type=Path, nargs="+")
    parser.add_argument("--server", required=True)
    parser.add_argument("--parent", type=int, help="process that they end with; by default the one that started this")
    given = parser.parse_args()
    specs = [DeviceSpec(**json.loads(path.read_text())) for path in given.specs]
    try:
        import_modules(dict.fromkeys(name for spec in specs for name in spec.modules), "modules")
    except FleetDistillError as error:
        print(error, file=sys.stderr)
        return 1
    if len(specs) == 1:
        end_with_parent(given.parent)
        return _run(specs[0], given.server)
    return _run_forked(specs, given.server, given.parent)


def _run(spec: DeviceSpec, server: str) -> int:
    """SIGTERM ends it at once, without a goodbye, so that the open round waits for its next start."""
    device = make_device(spec, server)
    try:
        with device:
            device.run()
    except FleetDistillError as error:
        print(f"{device.device_id}: {error}", file=sys.stderr)
        return 1
    return 0


def _run_forked(specs: Sequence[DeviceSpec], server: str, parent: int | None) -> int:
    """A process for each device, all forked from this one, which has loaded torch once for all of them.

    Ends with the last device, or with the first that fails; then the others are ended.
    """
    _load_all()
    children: set[int] = set()
    try:
        signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(1))
        for spec in specs:
            children.add(_fork(spec, server))
        end_with_parent(parent)  # a thread, so after the last fork
        while children:
            child, status = os.wait()
            children.discard(child)
            if status:
                return 1
        return 0
    finally:
        for child in children:
            os.kill(child, signal.SIGKILL)


def _load_all() -> None:
    """Loads what every device needs. The first export loads 800 modules of torch, so one is made and thrown away."""
    import onnxruntime  # noqa: F401
    from torch import nn

    from fleetdistill.device import torch_compute as worker  # noqa: F401
    from fleetdistill.training.onnx_export import onnx_bytes

    onnx_bytes(nn.Linear(1, 1), (1,))


def _fork(spec: DeviceSpec, server: str) -> int:
    parent = os.getpid()
    child = os.fork()
    if child:
        return child
    status = 1
    try:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        end_with_parent(parent)
        status = _run(spec, server)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(status)


def save_spec(spec: DeviceSpec) -> Path:
    """Writes a spec beside the device's state directory, for `main`."""
    path = Path(f"{spec.state_dir}.json")
    path.write_text(json.dumps(asdict(spec)))
    return path


if __name__ == "__main__":
    sys.exit(main())
