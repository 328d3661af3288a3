"""`paper = true` over the table of methods: what it changes, and that guards are on by default and off with it."""

from __future__ import annotations

import re
import tomllib
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.long import long_except

from fleetdistill.methods import METHODS, config_class, config_from_plan, config_to_plan
from fleetdistill.methods.local import make_local_optimizer
from fleetdistill.wire.codec import decode, encode
from fleetdistill_lab.simulation.fleet import simulate
from fleetdistill_lab.simulation.spec.settings import Simulation
from fleetdistill_server.config.run_config import run_config
from fleetdistill_server.engine.contract import build_method

PAPER: dict[str, dict[str, Any]] = {
    "cdkt": {
        "learning_rate": 0.03,
        "knowledge": "repfull",
        "device_metric": "norm2",
        "alpha": 0.02,
        "outcome_space": "logits",
        "norm2_reduction": "frobenius",
        "min_server_steps": 1,
        "server_learning_rate": 0.07,
        "teacher_guard": False,
        "joint_pass": False,
        "robust": "off",
    },
    "dafkd": {
        "generator": "embedding_generator",
        "label_condition": True,
        "generator_loss": "minimax",
        "kd_start_round": 1,
        "maturity_guard": False,
        "freeze_batch_norm": False,
        "local_epochs": 20,
        "kd_lr": 0.01,
        "weight_decay": 1e-3,
        "adversarial_weight_decay": 1e-3,
        "robust": "off",
    },
    "fedd2s": {
        "steps": "alternating",
        "warmup_epochs": 0,
        "shared_initial": False,
        "teacher_guard": False,
        "robust": "off",
    },
    "feddkc": {
        "batch_size": 1024,
        "learning_rate": 0.03,
        "momentum": 0.0,
        "temperature": 1.0,
        "server_beta": 1.5,
        "server_order": "sequential",
        "server_learning_rate": 0.03,
        "initial_zero_knowledge": True,
        "shared_initial": False,
        "teacher_guard": False,
        "robust": "off",
    },
    "feddkd": {
        "nesterov": False,
        "learning_rate_round_decay": 0.99,
        "dkd_lr": 0.1,
        "divergence_guard": False,
        "robust": "off",
    },
}
"""What `paper = true` changes of the defaults; C = 10. docs/reference/methods/ is held against it."""

every_paper = pytest.mark.parametrize("method", PAPER)


def guards(config: Any) -> dict[str, bool]:
    return {name: value for name, value in asdict(config).items() if name.endswith("_guard")}


def complete(method: str, **settings: Any) -> Any:
    return config_class(method).from_settings(settings).for_classes(10)


OWN = ("classstats", "classstats_private", "classstats_secure", "classstats_summed")


def test_all_methods_but_yardstick_and_our_own_have_paper_switch() -> None:
    assert {*PAPER, *OWN, "fedavg"} == METHODS.keys()


@every_paper
def test_paper_says_what_the_paper_says_and_changes_nothing_else(method: str) -> None:
    ours, paper = asdict(complete(method)), asdict(complete(method, paper=True))
    assert {name: value for name, value in paper.items() if value != ours[name]} == {"paper": True, **PAPER[method]}


def from_run_toml(method: str, **settings: Any) -> Any:
    described = {
        "run": {"name": "small", "method": method},
        "contract": {"classes": 10, "input_shape": [1, 8, 8]},
        "method": settings,
    }
    return run_config(described).method_config()


EACH = [(method, name) for method, values in PAPER.items() for name in values]


@pytest.mark.parametrize("make", [complete, from_run_toml])
@pytest.mark.parametrize(("method", "name"), EACH)
def test_given_values_win_over_paper_and_rest_stays_as_paper(method: str, name: str, make: Any) -> None:
    """Every value of ours, given together with `paper`: it stays, and nothing else changes."""
    ours, paper = complete(method), complete(method, paper=True)
    kept = getattr(ours, name)
    given = {name: 0.01 if kept is None else kept}  # None is gamma, which the model says; see feddkd
    assert make(method, paper=True, **given) == replace(paper, **given)


def test_the_papers_emnist_row_of_dafkd_can_be_set() -> None:
    assert from_run_toml("dafkd", paper=True, local_epochs=40).local_epochs == 40
    assert from_run_toml("dafkd", paper=True).local_epochs == 20
    assert from_run_toml("dafkd").local_epochs == 5


def test_feddkd_momentum_is_plain_in_paper_and_nesterov_with_us() -> None:
    weights = [torch.nn.Parameter(torch.zeros(1))]
    for paper in (False, True):
        (group,) = make_local_optimizer(complete("feddkd", paper=paper), weights).param_groups
        assert (group["momentum"], group["nesterov"]) == (0.9, not paper)
    (group,) = make_local_optimizer(complete("feddkd", momentum=0.0), weights).param_groups
    assert not group["nesterov"]


@every_paper
def test_what_paper_came_to_travels_and_is_not_worked_out_again(method: str) -> None:
    name = next(name for name in PAPER[method] if getattr(complete(method), name) is not None)
    mixed = complete(method, paper=True, **{name: getattr(complete(method), name)})
    plan = decode(encode({"config": config_to_plan(mixed)}))["config"]
    assert config_from_plan(method, plan) == mixed  # type: ignore[arg-type]
    assert replace(mixed, batch_size=7).batch_size == 7
    assert replace(replace(mixed, batch_size=7), batch_size=mixed.batch_size) == mixed


@every_paper
def test_constructor_takes_explicit_values_and_records_paper(method: str) -> None:
    cls = config_class(method)
    assert cls(paper=True) == replace(cls(), paper=True)
    assert replace(cls(), paper=True).for_classes(10) == replace(complete(method), paper=True)


ROOT = Path(__file__).parents[2]


@every_paper
def test_the_papers_values_on_the_page_are_those_of_paper(method: str) -> None:
    """The paper's column of *What differs*, down to the row that says all of these at once."""
    own = (ROOT / f"docs/reference/methods/{method}.md").read_text(encoding="utf-8")
    cells = [line.split("|")[-2] for line in own.split("## What differs")[1].splitlines() if line[:1] == "|"]
    named = re.findall(r"`(\w+ = [^`]+)`", "".join(cells[: cells.index(" `paper = true` ")]))
    assert tomllib.loads("\n".join(named)) == PAPER[method]


@every_paper
def test_paper_false_changes_nothing(method: str) -> None:
    assert complete(method, paper=False) == complete(method)


@every_paper
def test_the_guard_acts_by_default_and_not_with_paper(method: str) -> None:
    assert list(guards(complete(method)).values()) == [True]
    assert list(guards(complete(method, paper=True)).values()) == [False]


def test_feddkcs_two_weights_are_one_in_the_paper() -> None:
    assert complete("feddkc", paper=True, beta=0.7).server_beta == 0.7


def test_feddkc_devices_have_own_extractors_in_paper() -> None:
    def initial(**settings: Any) -> Any:
        described = {
            "run": {"name": "small", "method": "feddkc"},
            "contract": {"classes": 10, "input_shape": [1, 8, 8]},
            "method": settings,
        }
        return build_method(run_config(described)).initial()

    assert initial().scope == "extractor"
    assert initial(paper=True) is None
    assert initial(shared_initial=False) is None


@pytest.mark.parametrize("method", long_except(PAPER, "feddkc"))
def test_a_run_as_in_the_paper_works_and_no_guard_fires(method: str, tmp_path: Path) -> None:
    wanted = Simulation(
        method=method,
        settings={"paper": True},
        models=("digits_mlp_small",) if method != "fedd2s" else ("fedd2s_digits",),
        devices=2,
        rounds=2,
        train_limit=80,
        test_limit=50,
        proxy_per_class=2,
        with_alone=False,
        with_fedavg=False,
        out=tmp_path,
    )
    report = simulate(wanted)
    assert report.guards_fired == 0
    assert {name: report.settings[name] for name in PAPER[method]} == PAPER[method]
