"""What a simulation found, as plain data: the fields of report.json."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from fleetdistill_server.simulation.report.comparison import (
    ComparisonRow,
    Curve,
)
from fleetdistill_server.simulation.report.scores import (
    Figures,
    FleetFigures,
)

if TYPE_CHECKING:
    pass


@dataclass(frozen=True)
class DeviceReport:
    """One device's line. Accuracies are in [0, 1] on the global test part; `own` weighs classes as the device has them.

    Attributes:
        accuracy_fleet, own_accuracy_fleet: Of the model in `onnx_file`, measured on that file; of the general answer
            where the device has several. Before the run is over, of what the device would be delivered.
        accuracy_trained, own_accuracy_trained: Of its model after its last local training, which fedavg, feddkd and
            dafkd then replace by the fleet's. For FedDKD_BN, whose models are complete on the devices only, of the
            fleet's layers with the device's own batch-norm.
        bytes_up, bytes_down: Everything that went over the link for it, tensors and envelopes, before packing.
        sent_up, sent_down: The same as it travelled.
        onnx_file: The model that its app uses, under the simulation's `out`; None before the run is over.
        onnx_max_difference: Largest difference between a logit of onnxruntime's and of PyTorch's, of all its files.
        onnx_answers: The file of each answer, where the app has several: `general`, then the further ones.
        further: For each further answer of the device, such as classstats' `personal`, `accuracy` and `own_accuracy`.
            The device's other figures are those of its general answer.
        samples_by_class: Training samples of each class, in label order.
        leave_one_out: What the device expects of its answers, `general` and `personal`, on unseen data with its mix of
            classes, without held-out data: the share of own rows that they get right, left out. None where a method
            has no such figure.
        own_statistics_kept: Whether its personal answer is made of its own statistics alone, which were better; None
            where a method has no such choice.
    """

    name: str
    model: str
    parameters: int
    samples: int
    accuracy_alone: float | None
    accuracy_fleet: float
    own_accuracy_alone: float | None
    own_accuracy_fleet: float
    accuracy_trained: float
    own_accuracy_trained: float
    bytes_up: int
    bytes_down: int
    sent_up: int
    sent_down: int
    onnx_file: str | None
    onnx_max_difference: float | None
    onnx_answers: dict[str, str]
    further: dict[str, dict[str, float]]
    samples_by_class: list[int]
    leave_one_out: dict[str, float] | None
    own_statistics_kept: bool | None


@dataclass(frozen=True)
class FleetReport:
    """A simulation's outcome; what report.json holds.

    Attributes:
        rounds, completed_rounds: Wanted, and done; the figures are those after the last completed one.
        finished: False where the simulation was interrupted; then controls that are not complete are missing, and the
            devices have exported no models.
        seconds: How long it took, controls included, since its last start.
        mean_accuracy_fedavg_global: FedAvg's global model on the global test part, the control of the comparison.
        mean_accuracy_fedavg_device: FedAvg's device models after local training there, mean over devices.
        mean_accuracy_fleet, mean_accuracy_trained: Of the devices' figures of these names.
        mean_own_accuracy_alone, mean_own_accuracy_fleet, mean_own_accuracy_trained, mean_own_accuracy_fedavg_device:
            Means on own classes, over the devices that have samples of a class of the test part; None without any.
            All but that of `fleet` are C-Spec in accuracy.
        fedavg_model: The model that every device has in this control: the largest of the fleet's.
        fedavg_settings: FedAvg's settings in it.
        scores: `fleet`, `alone` and `fedavg`, each with CDKT-FL's figures after the last round; see
            `scores.fleet_figures`.
        figures_by_round: CDKT-FL's figures of the fleet after each round, in accuracy; of devices' models as in
            `accuracy_trained`.
        delivered_accuracy_by_round: Device -> accuracy of the model that it would be delivered after each round; empty
            for methods whose devices keep what they train, which is in `accuracy_by_round`.
        late: What papers report of a fleet's last rounds, in accuracy; see `scores.late_figures`.
        bytes_by_round: For each completed round what a device sent (`up`) and was sent (`down`), tensors and envelopes,
            mean over all devices. Rounds that fell short, initial weights and the proxy set count with the completed
            round after them, the end result with the last round, so that the sum is everything.
        traffic: Bytes by round, device, direction and kind of part, as they are and as they travelled (`sent_bytes`);
            the headers' kind is "envelope".
        further: For each further answer of the devices `accuracy` and `own_accuracy`, means over those that have it.
        hostile, attack: How many devices, the first ones, were hostile, and what they did.
        named: Devices that the server named, each with the kinds of the events; see `suspects.named`.
        guards_fired: How often a guard of the method acted.
        models_kept, models_replaced: Verdicts of devices on their apps' models; 0 without `validation_share`.
        further_accuracy_by_round: Answer -> device -> those of a further answer; None in the rounds before it had it.
        global_accuracy_by_round: The global model's on the global test part; None where there is none to be scored.
        alone_accuracy_by_round: Those of devices that train alone, one a round of the controls: more than the run has
            where it has one exchange (`control_rounds`).
        class_names: In label order.
        proxy_per_class: Training images of each class that were held out as the proxy set.
        control_rounds: Rounds of the controls.
        leave_one_out: As `DeviceReport.leave_one_out`, over the rows of all devices.
        comparison: Alone, the method and FedAvg, answer by answer; see `comparison.ComparisonRow`.
        curves: Their accuracy against bytes; see `comparison.Curve`.
    """

    method: str
    settings: dict[str, Any]
    link: str
    dataset: str
    partition: str
    partition_parameters: dict[str, Any]
    seed: int
    rounds: int
    completed_rounds: int
    finished: bool
    seconds: float
    mean_accuracy_alone: float | None
    mean_accuracy_fleet: float
    mean_accuracy_trained: float
    mean_own_accuracy_alone: float | None
    mean_own_accuracy_fleet: float | None
    mean_own_accuracy_trained: float | None
    mean_accuracy_fedavg_global: float | None
    mean_accuracy_fedavg_device: float | None
    mean_own_accuracy_fedavg_device: float | None
    fedavg_model: str | None
    fedavg_settings: dict[str, Any] | None
    scores: dict[str, FleetFigures]
    figures_by_round: list[Figures]
    late: Figures
    further: dict[str, dict[str, float]]
    bytes_by_round: list[dict[str, float]]
    traffic: list[dict[str, Any]]
    acknowledged_uploads: int
    used_uploads: int
    reported_uploads: int
    refused_uploads: int
    hostile: int
    attack: str
    named: dict[str, list[str]]
    guards_fired: int
    models_kept: int
    models_replaced: int
    devices: list[DeviceReport]
    accuracy_by_round: dict[str, list[float]]
    delivered_accuracy_by_round: dict[str, list[float]]
    further_accuracy_by_round: dict[str, dict[str, list[float | None]]]
    global_accuracy_by_round: list[float | None]
    alone_accuracy_by_round: dict[str, list[float]]
    class_names: list[str]
    proxy_per_class: int
    control_rounds: int
    leave_one_out: dict[str, float] | None
    comparison: list[ComparisonRow]
    curves: list[Curve]
