"""A device in an app that uses torch too: neither notices the other."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.hostile_server import CLASSES, DATA, LyingLink, ask, terms
from support.open_device import open_device
from support.processes import PATIENCE_SECONDS
from torch import nn

from fleetdistill import COLUMNS, Event
from fleetdistill.compute.torch_compute import in_own_thread
from fleetdistill.training.model import split_sequential
from fleetdistill.training.randomness import own_randomness

RUN_THREADS = 3
"""Threads that the run requires; the app uses another number."""


def settings_of_torch() -> dict[str, Any]:
    """torch's settings in the calling thread, which are global or belong to the thread."""
    return {
        "threads": torch.get_num_threads(),
        "interop threads": torch.get_num_interop_threads(),
        "random numbers": torch.get_rng_state().tolist(),
        "seed": torch.initial_seed(),
        "dtype": torch.get_default_dtype(),
        "device": torch.get_default_device(),
        "gradients": torch.is_grad_enabled(),
        "inference": torch.is_inference_mode_enabled(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "cudnn": (torch.backends.cudnn.benchmark, torch.backends.cudnn.deterministic, torch.backends.cudnn.enabled),
        "precision": torch.get_float32_matmul_precision(),
        "numpy": np.random.get_state()[1].tolist(),  # type: ignore[index]
    }


def in_new_thread(function: Any) -> Any:
    result: list[Any] = []
    thread = threading.Thread(target=lambda: result.append(function()))
    thread.start()
    thread.join(PATIENCE_SECONDS)
    return result[0]


class Observed(nn.Module):
    """Layer with dropout that notes the settings in the thread that trains, and in one of the app meanwhile."""

    def __init__(self, seen: list[dict[str, Any]]) -> None:
        super().__init__()
        self.seen = seen
        self.dropout = nn.Dropout(0.5)

    def __deepcopy__(self, memo: Any) -> Observed:
        return Observed(self.seen)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        outputs: torch.Tensor = self.dropout(inputs)
        self.seen.append({"app": in_new_thread(settings_of_torch), "threads": torch.get_num_threads()})
        return outputs


def network(seen: list[dict[str, Any]]) -> nn.Module:
    with own_randomness(0):
        return split_sequential(nn.Sequential(nn.Linear(4, 5), Observed(seen), nn.ReLU(), nn.Linear(5, CLASSES)), 3)


@pytest.fixture
def of_the_app() -> Iterator[dict[str, Any]]:
    """An app with settings of its own; restored afterwards."""
    before, random = torch.get_num_threads(), torch.get_rng_state()
    torch.set_num_threads(2)
    torch.manual_seed(77)
    yield settings_of_torch()
    torch.set_num_threads(before)
    torch.set_rng_state(random)


def trained(state_dir: Path, seen: list[dict[str, Any]], **changes: Any) -> list[bytes]:
    """Digests of the answers of a device that trains for a run, with scores and an export."""
    link = LyingLink(ask(), ask(round=2), terms=terms(threads=RUN_THREADS, settings={"local_epochs": 2}))
    settings: dict[str, Any] = {"model": network(seen), "data": DATA, "validation_data": DATA, "allow": COLUMNS}
    with open_device(server=link, state_dir=state_dir, **{**settings, **changes}) as device:
        device.run()
        device.predict(DATA[0])
    assert len(link.uploads) == 2
    return [header.payload.sha256 for header in link.uploads]


def test_torch_settings_stay_the_apps_around_and_during_a_run(tmp_path: Path, of_the_app: dict[str, Any]) -> None:
    seen: list[dict[str, Any]] = []
    trained(tmp_path, seen)
    assert settings_of_torch() == of_the_app
    assert in_new_thread(settings_of_torch) == of_the_app
    in_training = [item for item in seen if item["threads"] == RUN_THREADS]
    assert len(in_training) >= 2 * 2, "a forward pass in each epoch of both rounds, at least"
    assert all(item["app"] == of_the_app for item in seen)


def test_what_the_app_does_with_torch_does_not_change_an_answer(tmp_path: Path, of_the_app: dict[str, Any]) -> None:
    def disturb(event: Event) -> None:
        torch.manual_seed(event.round)
        torch.set_num_threads(1 + len(event.kind) % 2)

    class Disturbing(Observed):
        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            in_new_thread(lambda: torch.rand(5))
            return super().forward(inputs)

    quiet = trained(tmp_path / "a", [], export="never")
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(globals(), "Observed", Disturbing)
        disturbed_model = network([])
    with torch.inference_mode():
        assert trained(tmp_path / "b", [], export="never", model=disturbed_model, on_event=disturb) == quiet


def draw_everything() -> list[torch.Tensor]:
    """Random numbers from all that torch offers for them."""
    x = torch.ones(6, 4)
    linear = nn.Linear(4, 8)
    attention = nn.MultiheadAttention(4, 2, dropout=0.5)
    ones = torch.ones(1, 1, 4, 4)
    return [
        *linear.parameters(),
        nn.Dropout(0.5)(x),
        nn.Dropout2d(0.3)(torch.ones(2, 3, 4, 4)),
        nn.AlphaDropout(0.3)(x),
        nn.RReLU()(-x),
        attention(x, x, x)[0],
        nn.functional.scaled_dot_product_attention(ones, ones, ones, dropout_p=0.5),
        nn.functional.gumbel_softmax(x),
        torch.rand(3, dtype=torch.float64),
        torch.randn(3),
        torch.randint(9, (4,)),
        torch.randint(2, 9, (4,)),
        torch.randperm(5),
        torch.rand_like(x),
        torch.randn_like(x),
        torch.randint_like(x, 7),
        torch.randint_like(x, 2, 7),
        torch.normal(x, x),
        torch.normal(0.0, 1.0, (3,)),
        torch.bernoulli(x / 2),
        torch.multinomial(x, 2),
        torch.poisson(x),
        torch.binomial(5 * x, x / 2),
        torch.empty(3).exponential_(),
        torch.empty(3).cauchy_(),
        torch.empty(3).log_normal_(),
        torch.empty(3).geometric_(0.3),
        torch.empty(3).random_(),
        torch.empty(3).uniform_(),
        torch.distributions.Dirichlet(x).sample(),
    ]


def test_own_random_numbers_equal_global_ones_with_same_seed(of_the_app: dict[str, Any]) -> None:
    with torch.random.fork_rng():
        torch.manual_seed(5)
        wanted = draw_everything()
    with own_randomness(5):
        result = draw_everything()
    assert all(torch.equal(one, other) for one, other in zip(result, wanted, strict=True))
    assert settings_of_torch() == of_the_app


def test_an_explicit_generator_is_used(of_the_app: dict[str, Any]) -> None:
    wanted = torch.rand(4, generator=torch.Generator().manual_seed(3))
    with own_randomness(5):
        assert torch.equal(torch.rand(4, generator=torch.Generator().manual_seed(3)), wanted)


def test_sdk_thread_has_default_torch_modes_and_raises_errors() -> None:
    with torch.inference_mode():
        assert in_own_thread(torch.is_grad_enabled, 1)
        assert not in_own_thread(torch.is_inference_mode_enabled, 1)
    with pytest.raises(ZeroDivisionError):
        in_own_thread(lambda: 1 // 0, 1)
