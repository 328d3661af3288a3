"""Checks a simulation's settings, data, partition and models before its folder is changed."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path

from fleetdistill.errors import ConfigurationError, FleetDistillError, ModelError
from fleetdistill.knowledge import ModelParameters
from fleetdistill.methods.classstats_private.merge import too_few_rows
from fleetdistill.methods.classstats_secure.config import CERTIFICATES
from fleetdistill.methods.outside import import_modules
from fleetdistill.models import PREDICTORS
from fleetdistill.names import unknown_name
from fleetdistill.printable import printable
from fleetdistill.training.model import check_local_model
from fleetdistill_lab.simulation.backends.choice import check_backend
from fleetdistill_lab.simulation.controls.fedavg import check_fedavg
from fleetdistill_lab.simulation.controls.local_only import start_model
from fleetdistill_lab.simulation.data.datasets import DATASETS, Dataset
from fleetdistill_lab.simulation.data.hugging_face import is_hugging_face
from fleetdistill_lab.simulation.data.partition import PARTITIONS, check_partition_settings, partition_parameters
from fleetdistill_lab.simulation.data.split import Partition, check_alpha, check_classes_per_device
from fleetdistill_lab.simulation.data.test_parts import GLOBAL, LOCAL_CLIENT, LOCAL_SPLIT, TEST_PARTS
from fleetdistill_lab.simulation.report.metrics import check_top_k
from fleetdistill_lab.simulation.report.plots import check_figure
from fleetdistill_lab.simulation.spec.device import DeviceSpec
from fleetdistill_lab.simulation.spec.hostile import ATTACKS
from fleetdistill_lab.simulation.spec.plan import (
    NO_DEADLINE_SECONDS,
    RUN,
    deal_with_tests,
    device_models,
    hold_out_proxy,
    make_run_config,
    with_devices,
)
from fleetdistill_lab.simulation.spec.settings import EXPORTED, SCORED, Simulation
from fleetdistill_server.engine.contract import build_method
from fleetdistill_server.engine.preflight import build_run
from fleetdistill_server.methods import SERVER_METHODS, server_class
from fleetdistill_server.methods.base import ServerMethod


def check_settings(wanted: Simulation) -> None:
    """Checks all settings of a simulation, the method's included.

    An unknown number of devices, that of the data set's clients, is not checked; see `check_plan`.

    Raises:
        ConfigurationError: A setting is unknown or out of range.
    """
    if not wanted.devices:
        wanted = replace(wanted, devices=sys.maxsize)
    import_modules(wanted.modules, "import")
    wanted.configuration()
    if wanted.link not in ("memory", "grpc"):
        raise ConfigurationError(f"link is {wanted.link!r}, must be memory or grpc")
    for name in ("devices", "rounds", "control_rounds", "threads", "train_limit", "test_limit"):
        value = getattr(wanted, name)
        if value is not None and value < 1:
            why = ", because a simulation ends with its last round" if name == "rounds" else ""
            raise ConfigurationError(f"{name} is {value}, must be at least 1{why}")
    if not 0 <= wanted.devices_per_round <= wanted.devices:
        raise ConfigurationError(
            f"devices_per_round is {wanted.devices_per_round}, must be 0 for all devices, or at most devices "
            f"({wanted.devices})"
        )
    if not 0 < wanted.quorum <= 1:
        raise ConfigurationError(f"quorum is {wanted.quorum}, must be above 0 and at most 1")
    _check_time(wanted)
    if not 0 <= wanted.validation_share < 1:
        raise ConfigurationError(f"validation_share is {wanted.validation_share}, must be at least 0 and below 1")
    if wanted.hostile and (wanted.attack not in ATTACKS or not 0 < wanted.hostile < wanted.devices):
        raise ConfigurationError(
            f"hostile is {wanted.hostile} of {wanted.devices} devices and attack is {wanted.attack!r}; hostile must be "
            f"below devices, and attack one of {', '.join(ATTACKS)}"
        )
    if wanted.hostile and wanted.configuration().hides_rows and wanted.attack != "flips":
        raise ConfigurationError(
            f"attack {wanted.attack!r} has no effect with {wanted.method}, whose devices add noise or masks after it; "
            "use flips"
        )
    check_backend(wanted)
    _check_scores(wanted)
    check_figure(wanted.figure, wanted.panels)
    if wanted.seed < 0:
        raise ConfigurationError(f"seed is {wanted.seed}, must be at least 0")
    if wanted.client_column and not is_hugging_face(wanted.dataset):
        raise ConfigurationError(
            f"client_column is {wanted.client_column!r}, but the data set is not one of the Hugging Face Hub; remove it"
        )
    check_partition_settings(wanted.partition_path, wanted.partition_settings)
    needed = partition_parameters(wanted.partition_path)
    if "alpha" in needed:
        check_alpha(wanted.alpha)
    if "classes_per_device" in needed and wanted.classes_per_device < 1:
        raise ConfigurationError(f"classes_per_device is {wanted.classes_per_device}, must be at least 1")
    if "classes_per_device" in needed and isinstance(wanted.dataset, str):
        classes = DATASETS.get(wanted.dataset.lower().replace("_", "-"))  # of a built-in one, without reading it
        if classes is not None:
            check_classes_per_device(wanted.classes_per_device, len(classes))
    for name in wanted.predictors:
        if name not in PREDICTORS:
            raise ConfigurationError(unknown_name("predictor", name, PREDICTORS))


def check_used(partition: str, given: Collection[str]) -> None:
    """Raises ConfigurationError if a setting of other partitions is among those that are given."""
    for name in sorted({"alpha", "classes_per_device"}.intersection(given)):
        if name not in partition_parameters(partition):
            able = " or ".join(kind for kind in PARTITIONS if name in partition_parameters(kind))
            raise ConfigurationError(
                f"{name} has no effect with the partition {partition}; leave it out, or use {able}"
            )


def _check_scores(wanted: Simulation) -> None:
    """Raises ConfigurationError for settings of scores and exports that are out of range."""
    if wanted.score not in SCORED:
        raise ConfigurationError(f"score is {wanted.score!r}, must be {', '.join(SCORED[:-1])} or {SCORED[-1]}")
    for name in ("score_every", "score_rows", "top_k"):
        value = getattr(wanted, name)
        if value is not None and value < 1:
            raise ConfigurationError(f"{name} is {value}, must be at least 1")
    _check_test_part(wanted)
    if wanted.score_rows is not None and not wanted.scores_devices:
        raise ConfigurationError(f"score_rows counts rows for device models, which score {wanted.score} omits")
    if wanted.top_k is not None and wanted.score == "none":
        raise ConfigurationError("top_k needs models that are scored, but score is none; use another score")
    if (isinstance(wanted.export, str) and wanted.export not in EXPORTED) or (
        isinstance(wanted.export, int) and wanted.export < 1
    ):
        raise ConfigurationError(
            f"export is {wanted.export!r}, must be {', '.join(EXPORTED)}, or a number of devices of at least 1"
        )
    if wanted.export == "best" and not wanted.scores_devices:
        raise ConfigurationError(f"export best needs the accuracy of device models, which score {wanted.score} omits")


def _check_test_part(wanted: Simulation) -> None:
    """Raises ConfigurationError for a test part that is unknown, or with which another setting has no effect."""
    part = wanted.test_part
    if part not in TEST_PARTS:
        raise ConfigurationError(unknown_name("test part", part, TEST_PARTS))
    if part != GLOBAL and wanted.score_rows is not None:
        raise ConfigurationError(f"score_rows has no effect with test_part {part}, which scores all rows; leave it out")
    if part == LOCAL_SPLIT and wanted.test_limit is not None:
        raise ConfigurationError(f"test_limit has no effect with test_part {part}, whose rows are training rows")
    if part == LOCAL_CLIENT and wanted.partition_path != "by_client":
        raise ConfigurationError(
            f"test_part {part} gives a device its client's test rows, but the partition is {wanted.partition_path}; "
            "use by_client"
        )


def _check_time(wanted: Simulation) -> None:
    """Raises ConfigurationError for settings of simulated time that are out of range or cannot apply."""
    if wanted.min_devices is not None and not 1 <= wanted.min_devices <= wanted.devices:
        raise ConfigurationError(f"min_devices is {wanted.min_devices}, must be from 1 to devices ({wanted.devices})")
    if not 1 <= wanted.over_selection <= 10:
        raise ConfigurationError(f"over_selection is {wanted.over_selection}, must be from 1 to 10")
    deadline = wanted.deadline_seconds
    if deadline is not None and not 0 < deadline < NO_DEADLINE_SECONDS:
        raise ConfigurationError(f"deadline_seconds is {deadline}, must be above 0 and below {NO_DEADLINE_SECONDS:g}")
    if wanted.behaviour is None and (deadline is not None or wanted.over_selection != 1):
        raise ConfigurationError(
            "deadline_seconds and over_selection need simulated time, in which devices take time to answer; set "
            "behaviour, such as --set fleet.compute=lognormal:0.5"
        )
    if wanted.behaviour is not None and wanted.link != "memory":
        raise ConfigurationError(
            f"simulated time does not work over {wanted.link}, whose processes run in real time; use --link memory, or "
            "leave out availability, compute, churn, late joins and traces"
        )
    if wanted.behaviour is not None and wanted.settings.get("keys") == CERTIFICATES:
        raise ConfigurationError(
            "keys is 'certificates', whose certificates are valid in real time and not in simulated time; leave out "
            "availability, compute, churn, late joins and traces, or set keys to 'roster', which has the same messages"
        )


def check_plan(wanted: Simulation, data: Dataset) -> None:
    """Partitions the data and builds all models in a temporary folder, as the simulation will.

    Raises:
        ConfigurationError: A model cannot be built or does not fit the data, they have too few classes for `top_k`, or
            too few clients for a setting.
        DataError: The data cannot be partitioned as requested.
    """
    if not wanted.devices:
        wanted = with_devices(wanted, data)
        check_settings(wanted)
    with tempfile.TemporaryDirectory() as scratch:
        work = Path(scratch)
        _check_shape(wanted, data)
        if wanted.top_k is not None:
            check_top_k(wanted.top_k, len(data.classes))
        left = hold_out_proxy(wanted, data, work)
        dealt = deal_with_tests(wanted, left)
        left = dealt.data
        config = make_run_config(wanted, left, work)
        _check_rows(wanted, dealt.split)
        _check_devices(wanted)
        check_fedavg(wanted, config)
        build_run(config)
        method = build_method(config)
        if wanted.score == "global" and not method.has_global_model:
            raise ConfigurationError(_no_global_model(wanted.method))
        initial = method.initial()
        for model in dict.fromkeys(device_models(wanted, left)):
            _check_device_model(wanted, left, model, initial)


def _no_global_model(method: str) -> str:
    others = [name for name in SERVER_METHODS if name != method]
    able = [name for name in others if server_class(name).global_model is not ServerMethod.global_model]
    return (
        f"score global needs a global model, which {method} with these settings does not have; use score sampled or "
        f"devices, or another method: {', '.join(able[:-1])} or {able[-1]}"
    )


def _check_rows(wanted: Simulation, split: Partition) -> None:
    """Raises ConfigurationError if the devices of a private run have too few rows for the noise."""
    guarantee = wanted.configuration().guarantee
    rows = sum(split.sizes) / wanted.devices
    if guarantee is None:
        return
    mu = wanted.configuration().device_mu(wanted.devices)
    if reason := too_few_rows(rows * (1 - wanted.validation_share), wanted.devices, mu, guarantee.epsilon):
        raise ConfigurationError(reason)


def _check_devices(wanted: Simulation) -> None:
    """Raises ConfigurationError if the rounds have too few devices for the method."""
    config, in_round = wanted.configuration(), wanted.devices_per_round or wanted.devices
    needed = server_class(wanted.method).needs(config).min_devices
    if in_round < needed:
        raise ConfigurationError(
            f"a round has {in_round} devices, but {wanted.method} needs {needed}; use more devices, or more "
            "devices_per_round"
        )


def _check_shape(wanted: Simulation, data: Dataset) -> None:
    """Raises ConfigurationError if only built-in models are configured and they cannot read the data."""
    shape = list(data.train_images.shape[1:])
    if len(shape) != 3 and not wanted.models and not wanted.extractor:
        raise ConfigurationError(
            f"samples of {data.name} have shape {shape}, but the built-in models read images [channels, height, "
            "width]; give your own device models (--model) or extractor (--extractor), and server_model if the method "
            "needs it"
        )


def _check_device_model(wanted: Simulation, data: Dataset, model: str, initial: ModelParameters | None) -> None:
    """Raises ConfigurationError unless the model takes the run's initial weights and rows of the data."""
    spec = DeviceSpec(
        name=f"a device with {model}",
        model=model,
        seed=wanted.seed,
        classes=len(data.classes),
        data_file="",
        test_file="",
        state_dir="",
        run=RUN,
    )
    rows_bx = data.train_images[:2]
    shape = list(rows_bx.shape[1:])
    try:
        check_local_model(start_model(spec, initial, tuple(shape)), rows_bx, len(data.classes))
    except (ConfigurationError, ModelError) as error:
        raise ConfigurationError(f"device model {model!r} with inputs of shape {shape}: {error}") from error
    except FleetDistillError:
        raise
    except Exception as error:  # a model's own code may fail in any way
        text = printable(f"{type(error).__name__}: {error}").strip()
        raise ConfigurationError(f"device model {model!r} does not take inputs of shape {shape} ({text})") from error
