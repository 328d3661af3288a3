"""FedDKD's settings, and what they make of the contract."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from methods.feddkd.feddkd_fleet import HIDDEN, gradient_of, make_server
from support.wire_samples import make_contract, make_profile

from fleetdistill.errors import (
    ConfigurationError,
    RefusedError,
)
from fleetdistill.knowledge import DistillationGradient
from fleetdistill.methods.feddkd.config import FedDKDConfig
from fleetdistill.wire.codec import encode
from fleetdistill.wire.v1 import contract_pb2, tensor_pb2
from fleetdistill_server.intake.admission import check_profile
from fleetdistill_server.intake.ingest import Ingest
from fleetdistill_server.methods.feddkd import FedDKDServer
from fleetdistill_server.methods.traffic import declared_parts


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"dkd_steps": -1}, "dkd_steps must be >= 0, got -1"),
        ({"dkd_lr": 0.0}, "dkd_lr must be > 0"),
        ({"dkd_lr": math.inf}, "dkd_lr must be > 0"),
        ({"dkd_lr_round_decay": 0.0}, "dkd_lr_round_decay must be in (0, 1]"),
        ({"dkd_lr_step_decay": 1.1}, "dkd_lr_step_decay must be in (0, 1]"),
        ({"learning_rate_round_decay": 2.0}, "learning_rate_round_decay must be in (0, 1]"),
        ({"dkd_batch_size": 0}, "dkd_batch_size must be >= 1"),
        ({"dkd_start_round": 0}, "dkd_start_round must be >= 1"),
        ({"dkd_weighting": "x"}, "unknown dkd_weighting 'x'"),
        ({"dkd_max_norm": 0.0}, "dkd_max_norm must be > 0"),
        ({"temperature": 0.0}, "temperature must be > 0"),
        ({"temperature": math.nan}, "temperature must be > 0"),
        ({"participation_ratio": 0.0}, "participation_ratio must be in (0, 1]"),
        ({"dkd_student_mode": "x"}, "unknown dkd_student_mode 'x'"),
        ({"variant": "x"}, "unknown variant 'x'"),
        ({"fedmax_beta": -0.1}, "fedmax_beta must be >= 0"),
        ({"fedmax_form": "x"}, "unknown fedmax_form 'x'"),
        ({"divergence_factor": 1.0}, "divergence_factor must be > 1"),
        ({"local_epochs": 0}, "local_epochs must be >= 1"),
    ],
)
def test_a_setting_out_of_range_says_so(settings: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigurationError) as error:
        FedDKDConfig(**settings)
    assert sentence in str(error.value)


def test_paper_switches_ours_off_at_once() -> None:
    paper = FedDKDConfig.from_settings({"paper": True}).for_classes(10)
    assert (paper.divergence_guard, paper.dkd_max_norm, paper.temperature) == (False, None, 1.0)
    assert (paper.dkd_weighting, paper.fedmax_form, paper.nesterov) == ("uniform", "a_to_u", False)
    assert FedDKDConfig().for_classes(10).divergence_guard
    assert make_server("methods.feddkd.feddkd_fleet:norm_model", paper=True).config.dkd_lr == 0.1


def contract_of(server: FedDKDServer) -> contract_pb2.Contract:
    uploads = [
        contract_pb2.PartShapes(
            part=part,
            tensors=[
                contract_pb2.NamedShape(name=name, shape=shape, element_type=tensor_pb2.ELEMENT_TYPE_FLOAT32)
                for name, shape in one.declared.items()
            ],
        )
        for part, one in declared_parts(server.run_exchanges()).items()
    ]
    contract: contract_pb2.Contract = make_contract(
        method="feddkd", requirements=server.requirements(), features=[], model_fingerprint="m", uploads=uploads
    )
    return contract


@pytest.mark.parametrize("lacking", ["parameters", "gradients"])
def test_an_app_that_keeps_something_back_is_refused_at_check_in(lacking: str) -> None:
    contract = contract_of(make_server())
    allowed = [column for column in ("parameters", "gradients") if column != lacking]
    with pytest.raises(RefusedError, match=lacking):
        check_profile(contract, make_profile(model_fingerprint="m", allowed_columns=allowed))
    check_profile(contract, make_profile(model_fingerprint="m", allowed_columns=["parameters", "gradients"]))


def test_other_model_is_refused_and_no_steps_need_no_gradients() -> None:
    profile = make_profile(model_fingerprint="other", allowed_columns=["parameters", "gradients"])
    with pytest.raises(RefusedError, match="model"):
        check_profile(contract_of(make_server()), profile)
    assert list(make_server(dkd_steps=0).requirements().columns) == ["parameters"]


def test_a_gradient_that_does_not_fit_is_refused_whole() -> None:
    server = make_server("methods.feddkd.feddkd_fleet:norm_model", variant="bn")
    contract, good = contract_of(server), dict(server.shared_parameters().parameters)
    expects = dict(server.answer_kinds()["distil"])

    def take(sent: DistillationGradient) -> None:
        Ingest("d1", encode({"gradient": sent}).header(), contract, expects)

    take(gradient_of(server))
    take(gradient_of(server, loss=math.inf))  # a diverged model says so
    name = "stages.head.weight"
    for gradients, sentence in (
        ({key: value for key, value in good.items() if key != name}, f"lacks gradients/{name}"),
        ({**good, "stages.body.1.weight": np.zeros(HIDDEN, np.float32)}, "not part of the contract"),
        ({**good, name: good[name].T.copy()}, r"has shape \[8, 3\], expected \[3, 8\]"),
        ({**good, name: good[name].astype(np.int64)}, "is int64, expected float32"),
    ):
        with pytest.raises(RefusedError, match=sentence):
            take(gradient_of(server, gradients=gradients))
    for changes in ({"batch_size": 0}, {"loss": math.nan}, {"loss": -0.1}):
        with pytest.raises(RefusedError, match="must be >= 1 and >= 0"):
            take(gradient_of(server, **changes))
