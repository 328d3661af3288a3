"""Results of a simulation as plain data, the contents of report.json."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from typing_extensions import TypedDict

from fleetdistill_lab.simulation.report.comparison import ComparisonRow, Curve, RoundBytes
from fleetdistill_lab.simulation.report.metrics import CurveSummary, Fairness
from fleetdistill_lab.simulation.report.scores import Counted, Figures, FleetFigures, LateFigures
from fleetdistill_lab.simulation.report.simulated_time import SimulatedTimes


class VariantRates(TypedDict):
    """Accuracies of a further variant.

    Attributes:
        accuracy: Accuracy on all classes.
        own_accuracy: Accuracy with classes weighted by the device's share of training samples; with a local
            `test_part` on the device's own test rows, None without such rows.
    """

    accuracy: float
    own_accuracy: float | None


class Scored(TypedDict):
    """What was scored on the test set.

    Attributes:
        models: Models that were scored, as in `Simulation.score`.
        every: Rounds from one score to the next, as in `Simulation.score_every`.
        rows: Number of test rows for device models; 0 if they are not scored.
        test_rows: Number of test rows for the global model, which are all.
    """

    models: str
    every: int
    rows: int
    test_rows: int


class TrafficRow(TypedDict):
    """Bytes of all devices in one round, direction and kind of part.

    Attributes:
        round: Number of the round; 0 for what was sent before the first one.
        direction: `up` from the devices, or `down` to them.
        kind: Kind of part, `envelope` for headers.
        payloads: Number of payloads.
        tensor_bytes: Bytes of tensors before compression.
        envelope_bytes: Bytes of headers before compression.
        sent_bytes: Bytes on the wire.
    """

    round: int
    direction: str
    kind: str
    payloads: int
    tensor_bytes: int
    envelope_bytes: int
    sent_bytes: int


class PrivacyReport(TypedDict):
    """Differential privacy of a private run.

    Attributes:
        epsilon, delta: Guarantee for each row of each device.
        exact: Whether the noise is discrete Gaussian.
        sentence: What epsilon means.
        expected_strength: R of the fleet's statistics if every device had the mean number of samples.
    """

    epsilon: float
    delta: float
    exact: bool
    sentence: str
    expected_strength: float


@dataclass(frozen=True)
class DeviceReport:
    """Results of one device.

    Accuracies are in [0, 1] on the global test set. Fields with `own` weight each class by the device's share of
    training samples; with a local `test_part` they are on the device's own test rows, and None without such rows. If
    the app gets several variants, all fields without `further` refer to the general one.

    Attributes:
        name: Id of the device.
        model: Name of the device model.
        parameters: Number of the model's parameters.
        samples: Number of training samples.
        took_part: Whether it trained in one of the rounds.
        own_test_rows: Number of test rows of its own; None if no device has such rows.
        accuracy_alone, own_accuracy_alone: Accuracy after local-only training; None without this control.
        accuracy_fleet, own_accuracy_fleet: Accuracy of the model that the app has at the end; before, of the model
            that the device would receive. None if it was not scored.
        accuracy_trained, own_accuracy_trained: Accuracy after the last local training; fedavg, feddkd and dafkd then
            replace the model by the fleet's. For FedDKD_BN, accuracy of the fleet's layers with the device's
            batch-norm. None if no training was scored.
        top_k_alone, top_k_fleet, top_k_trained: Top-k accuracies of the models in the accuracies of these names; None
            without `Simulation.top_k`.
        bytes_up, bytes_down: Bytes to and from the server, tensors and envelopes, uncompressed.
        sent_up, sent_down: Bytes to and from the server on the wire.
        onnx_file: Path of the app's exported model, relative to `out`; None before the run is over, and
            for devices that `Simulation.export` leaves out.
        onnx_max_difference: Largest absolute difference between onnxruntime's and PyTorch's logits over all exported
            files; None without a file.
        onnx_answers: For each variant, `general` first, the path of its file; empty for a single model.
        further: Accuracies of each further variant, such as classstats' `personal`, by its name.
        samples_by_class: Number of training samples of each class, in label order.
        leave_one_out: For each variant, the estimated accuracy on unseen data with the device's class mix, by
            leave-one-out on the training samples; None for methods without this estimate.
        own_statistics_kept: Whether the personal variant uses the device's own statistics only, because they were
            better; None for methods without this choice.
    """

    name: str
    model: str
    parameters: int
    samples: int
    took_part: bool
    own_test_rows: int | None
    accuracy_alone: float | None
    accuracy_fleet: float | None
    own_accuracy_alone: float | None
    own_accuracy_fleet: float | None
    accuracy_trained: float | None
    own_accuracy_trained: float | None
    top_k_alone: float | None
    top_k_fleet: float | None
    top_k_trained: float | None
    bytes_up: int
    bytes_down: int
    sent_up: int
    sent_down: int
    onnx_file: str | None
    onnx_max_difference: float | None
    onnx_answers: dict[str, str]
    further: dict[str, VariantRates]
    samples_by_class: list[int]
    leave_one_out: dict[str, float] | None
    own_statistics_kept: bool | None


@dataclass(frozen=True)
class FleetReport:
    """Results of a simulation, the contents of report.json.

    Accuracies are in [0, 1] on the global test set; figures without `by_round` are those after the last completed
    round. A figure is None without what it is about: a control, a global model, or a score.

    Attributes:
        schema_version: Version of the fields. It rises when a field is removed or renamed, or when its type or meaning
            changes, and not with a new field.
        method: Name of the method.
        settings: Settings of the method.
        link: Link to the devices, `memory` or `grpc`.
        dataset: Name of the data set.
        partition: Name of the partition of the data over devices.
        partition_parameters: Parameters of the partition.
        test_part: Test rows of own figures, as `Simulation.test_part`. The test set is the union of local ones.
        without_test_rows: Number of devices without test rows of their own, which means of own figures leave out; 0
            with the test part `global`.
        seed: Seed of the simulation.
        rounds: Number of requested rounds.
        completed_rounds: Number of completed rounds.
        finished: False if the simulation was interrupted, as by Ctrl-C; unfinished controls and exported models are
            then missing.
        seconds: Duration since the last start, in seconds, controls included.
        scored: What was scored.
        top_k: k of the top-k accuracies, `Simulation.top_k`; None without them.
        mean_accuracy_alone: Mean over the devices that took part and were scored, or with the score `devices` over all
            that were scored, trained without the fleet. All means are over these devices.
        mean_accuracy_fleet: Mean over the same devices, of the model that each has at the end, which with methods that
            average models is the global one; None if none was scored.
        mean_accuracy_trained: Mean over the same devices, of their models after the last own training.
        mean_f1_weighted_fleet: F1 of the models of `mean_accuracy_fleet` on the test set, as the mean over the classes
            weighted by their samples.
        mean_f1_macro_fleet: The same as the plain mean over the classes that are present or predicted.
        own_fairness_fleet: How evenly the accuracies of `mean_own_accuracy_fleet` are spread over the devices.
        mean_accuracy_by_class: On each class, the mean that `mean_accuracy_fleet` is on all classes; None for
            one without test rows.
        global_accuracy_by_class: Accuracy of the global model on each class; None for one without test rows.
        mean_own_accuracy_alone, mean_own_accuracy_fleet, mean_own_accuracy_trained, mean_own_accuracy_fedavg_device:
            Mean own accuracies over the devices with samples of a class of the test set, or with test rows of their
            own; None if there are none. All but `fleet` are C-Spec in accuracy.
        mean_accuracy_fedavg_global: Accuracy of FedAvg's global model.
        mean_accuracy_fedavg_device: Mean accuracy of FedAvg's device models after local training.
        fedavg_model: Model of every device in the FedAvg control, the largest of the fleet's.
        fedavg_settings: Settings of the FedAvg control.
        scores: CDKT-FL's figures of the `fleet` and of the controls `alone` and `fedavg`.
        figures_by_round: CDKT-FL's figures of the fleet after each round, in accuracy, for device models as in
            `accuracy_trained`.
        counted_by_round: Devices that each round's C-Gen, C-Spec and C-Per, and the curves of device models, are over.
        late: Figures over the last rounds that papers report.
        summaries: For each of `figures_by_round`, its final and best value and its last rounds.
        further: For each further variant, such as classstats' `personal`, the means over the devices that have it.
        bytes_by_round: Bytes of each completed round. Traffic of short rounds, initial weights and the proxy set count
            in the next completed round, and delivery of the final result in the last round, so that the sum is the
            total.
        traffic: Bytes of all devices by round, direction and kind of part.
        acknowledged_uploads: Number of uploads with a receipt.
        used_uploads: Number of those that a round's result contains.
        reported_uploads: Number of those reported as lost, with a reason.
        refused_uploads: Number of refused uploads.
        hostile: Number of hostile devices, which are the first ones.
        attack: What the hostile devices do; empty without any.
        named: For each device that the server reported as suspicious, the kinds of the events.
        guards_fired: Number of times that a guard of the method fired.
        models_kept, models_replaced: Number of times that apps kept or replaced their model; 0 without
            `validation_share`.
        devices: Results of the devices.
        accuracy_by_round: For each device, the accuracy of its model after local training; None for rounds that
            `scored` leaves out, and before the device's first score. A device that a scored round did not draw has its
            last score. So for all fields of devices by round.
        delivered_accuracy_by_round: For each device, the accuracy of the model that it would receive after each
            round; empty for methods whose devices keep the models in `accuracy_by_round`.
        further_accuracy_by_round: For each further variant and device, its accuracy; None before the device had it.
        global_accuracy_by_round: Accuracy of the global model; None for rounds without one.
        alone_accuracy_by_round: For each device, the accuracy of local-only training after each of `control_rounds`.
        class_names: Class names, in label order.
        proxy_per_class: Number of training images per class in the proxy set.
        control_rounds: Number of rounds of the controls.
        leave_one_out: Like the devices' `leave_one_out`, over the samples of all devices.
        comparison: Local-only training, the method and FedAvg, by variant.
        curves: Accuracies of the method and FedAvg by bytes.
        simulated_time: Simulated seconds, rounds and devices in simulated time; None without it.
        privacy: Differential privacy of a private run; None for other runs.
    """

    schema_version: Literal[1] = field(default=1, init=False)
    method: str
    settings: dict[str, Any]
    link: str
    dataset: str
    partition: str
    partition_parameters: dict[str, Any]
    test_part: str
    without_test_rows: int
    seed: int
    rounds: int
    completed_rounds: int
    finished: bool
    seconds: float
    scored: Scored
    top_k: int | None
    mean_accuracy_alone: float | None
    mean_accuracy_fleet: float | None
    mean_accuracy_trained: float | None
    mean_f1_weighted_fleet: float | None
    mean_f1_macro_fleet: float | None
    own_fairness_fleet: Fairness | None
    mean_accuracy_by_class: list[float | None] | None
    global_accuracy_by_class: list[float | None] | None
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
    counted_by_round: list[Counted]
    late: LateFigures
    summaries: dict[str, CurveSummary]
    further: dict[str, VariantRates]
    bytes_by_round: list[RoundBytes]
    traffic: list[TrafficRow]
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
    accuracy_by_round: dict[str, list[float | None]]
    delivered_accuracy_by_round: dict[str, list[float | None]]
    further_accuracy_by_round: dict[str, dict[str, list[float | None]]]
    global_accuracy_by_round: list[float | None]
    alone_accuracy_by_round: dict[str, list[float | None]]
    class_names: list[str]
    proxy_per_class: int
    control_rounds: int
    leave_one_out: dict[str, float] | None
    comparison: list[ComparisonRow]
    curves: list[Curve]
    simulated_time: SimulatedTimes | None
    privacy: PrivacyReport | None
