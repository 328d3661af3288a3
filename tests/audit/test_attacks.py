"""Attacks find rows that are in a message, and not those that are in none."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from audit.conftest import MEMBERS, attacker_of, linked, members_of, message
from hypothesis import given
from hypothesis import strategies as st
from torch.distributions import MultivariateNormal

from fleetdistill.knowledge import (
    CUT,
    ClassSums,
    Discriminator,
    DistillationGradient,
    Metrics,
    ModelParameters,
    NamedTensors,
    ProxyKnowledge,
    SampleKnowledge,
    SharedStatistics,
)
from fleetdistill.methods.classstats.shared_statistics import moments_of, to_wire
from fleetdistill.methods.classstats_private.sums import class_sums, unit_rows
from fleetdistill.methods.classstats_private.sums import to_wire as sums_to_wire
from fleetdistill.methods.classstats_secure.config import ClassStatsSummedConfig
from fleetdistill.methods.classstats_secure.encoding import decode, limited_numbers, rows_in_steps
from fleetdistill.methods.feddkd.device import distillation_gradient
from fleetdistill.models.discriminators import SharedHead
from fleetdistill.training.model import logits_and_embedding
from fleetdistill.training.parameters import model_parameters
from fleetdistill_lab.audit.audit import attack, max_mu, parts_sent
from fleetdistill_lab.audit.knowledge import PublicMoments, class_shares, features_of
from fleetdistill_lab.audit.public_set import PublicSet, split_public
from fleetdistill_lab.audit.record import Attacker, DeviceSum, Message, Rows, sums_of
from fleetdistill_lab.simulation.data.datasets import load_dataset


def features_sent(attacker: Attacker, rows: Rows) -> SampleKnowledge:
    extractor = attacker.method.known_extractor(CUT, {})
    assert extractor is not None
    return SampleKnowledge(sample_ids=np.arange(len(rows)), features={CUT: features_of(extractor, rows.inputs)})


def test_rows_are_found_in_features_and_others_are_not(public: PublicSet) -> None:
    attacker = attacker_of(public, "feddkc")
    sent = message({"knowledge": features_sent(attacker, members_of(public, MEMBERS))})
    result = linked(public, attacker, [sent])
    assert result["knowledge", f"{CUT}, round 1"] == 1
    others = Rows(public.fleet.train_images[100:130], public.fleet.train_labels[100:130])
    assert linked(public, attacker, [sent], others)["knowledge", f"{CUT}, round 1"] < 0.2  # chance is 1 / 107


def test_the_first_and_the_last_message_are_attacked(public: PublicSet) -> None:
    attacker = attacker_of(public, "feddkc")
    part = features_sent(attacker, members_of(public, 5))
    messages = [message({"knowledge": part}, number=number) for number in (1, 2, 3)]
    rounds = {name for _, name in linked(public, attacker, messages)}
    assert rounds == {f"{CUT}, round {number}{end}" for number in (1, 3) for end in ("", ", fitted")}


def test_directions_link_rows_that_they_nearly_span(public: PublicSet) -> None:
    attacker, own = attacker_of(public, "classstats"), members_of(public, MEMBERS)
    extractor = attacker.method.known_extractor("statistics", {})
    assert extractor is not None
    features = features_of(extractor, own.inputs)
    moments = moments_of(features, own.labels.numpy(), 2)
    many = linked(public, attacker, [message({"statistics": to_wire(moments, 128, 2)})])
    few = linked(public, attacker, [message({"statistics": to_wire(moments, 1, 2)})])
    assert many["statistics", "directions"] > 0.5 > few["statistics", "directions"]
    assert ("statistics", "directions") not in linked(
        public, attacker, [message({"statistics": to_wire(moments, 0, 2)})]
    )


def test_means_of_two_rows_link_them(public: PublicSet) -> None:
    attacker, own = attacker_of(public, "classstats"), members_of(public, 200)
    taken = torch.cat([torch.nonzero(own.labels == label)[:2, 0] for label in range(10)])
    rows = Rows(own.inputs[taken], own.labels[taken])
    extractor = attacker.method.known_extractor("statistics", {})
    assert extractor is not None
    part = to_wire(moments_of(features_of(extractor, rows.inputs), rows.labels.numpy(), 2), 0)
    assert linked(public, attacker, [message({"statistics": part})], rows)["statistics", "means"] > 0.2  # chance .01


def test_a_mean_is_weighed_with_and_without_a_row() -> None:
    """Two classes of rows (±1, 0) and (0, ±1) around (0, 0) and (5, 0): sums of squares 2 in each feature.

    The covariance within both is 4/6 in each feature and counts as two rows: (2 + 2 · 4/6) / (3 + 2) = 2/3 for a class.
    With x = (1, 2), the mean (.3, 0) and five rows behind it: .3 / (2/3) - 5 / (2 · 5 · 2/3) = .45 - .75. Noise of 1/3
    makes every variance 1: .3 - 5 / 10.
    """
    cross = np.array([[1.0, 0], [-1, 0], [0, 1], [0, -1]])
    moments = PublicMoments(np.concatenate([cross, cross + np.array([5, 0])]), np.repeat([0, 1], 4))
    assert moments.covariance(0) == pytest.approx(np.eye(2) * 2 / 3, rel=1e-5)
    x, mean = np.array([[1.0, 2]]), np.array([0.3, 0])
    assert moments.leaning(x, mean, 0, 5) == pytest.approx(-0.3, rel=1e-4)
    assert moments.leaning(x, mean, 0, 5, 1 / 3) == pytest.approx(-0.2, rel=1e-4)


def test_a_covariance_is_aligned_with_rows_of_its_products() -> None:
    """Two classes of rows (±2, 0) and (0, ±1): covariance diag(16/6, 4/6) within both, which whitens (√(8/3), √(2/3)).

    The sent covariance has 4/3 beside its diagonal, which is 4/3 / √(8/3 · 2/3) = 1 after whitening. Its diagonal has
    no influence. z = (1, 1): (1 + 1) / 2; z = (1, -1): -1; z = (1, 0): 0.
    """
    cross = np.array([[2.0, 0], [-2, 0], [0, 1], [0, -1]])
    moments = PublicMoments(np.concatenate([cross, cross + np.array([5, 0])]), np.repeat([0, 1], 4))
    mean, across, along = np.array([7.0, 1]), math.sqrt(8 / 3), math.sqrt(2 / 3)
    rows = mean + np.array([[across, along], [across, -along], [across, 0], [2 * across, 2 * along]])
    for diagonal in (5.0, 100.0):
        sent = np.array([[diagonal, 4 / 3], [4 / 3, 7]])
        assert moments.alignment(rows, mean, sent) == pytest.approx([1, -1, 0, 4 * 2 / 8], rel=1e-5, abs=1e-9)


@given(seed=st.integers(0, 2**32 - 1), count=st.integers(1, 50), noise=st.sampled_from([0.0, 0.5]))
def test_the_score_of_a_mean_is_its_log_likelihood_ratio(seed: int, count: int, noise: float) -> None:
    generator = np.random.default_rng(seed)
    moments = PublicMoments(generator.normal(size=(40, 3)) @ generator.normal(size=(3, 3)), np.arange(40) % 2)
    row, mean = generator.normal(size=(2, 3))
    usual = torch.tensor(moments.means[1])
    covariance = torch.tensor((moments.covariance(1) + noise * np.eye(3)) / count)
    without, among = (
        MultivariateNormal(centre, covariance).log_prob(torch.tensor(mean)).item()
        for centre in (usual, usual + (torch.tensor(row) - usual) / count)
    )
    assert moments.leaning(row[None], mean, 1, count, noise)[0] == pytest.approx(among - without, rel=1e-6, abs=1e-9)


def test_sums_without_noise_link_rows_of_small_classes(public: PublicSet) -> None:
    """Two rows of each class. With noise the bound of `test_audit` applies."""
    attacker, own = attacker_of(public, "classstats_private", epsilon=3), members_of(public, 200)
    taken = torch.cat([torch.nonzero(own.labels == label)[:2, 0] for label in range(10)])
    rows = Rows(own.inputs[taken], own.labels[taken])
    extractor = attacker.method.known_extractor("statistics", {})
    assert extractor is not None
    sums = class_sums(unit_rows(features_of(extractor, rows.inputs)), rows.labels.numpy(), 10)
    second_moment = np.zeros(64 * 65 // 2)
    part = ClassSums(counts=sums.counts, sums=sums.sums, second_moment=second_moment, mu=1.0, discrete=False)
    sent = [message({"statistics": part})]
    assert linked(public, attacker, sent, rows)["statistics", "sums"] > 0.2  # chance .01
    assert max_mu(sent) == 1.0
    assert max_mu([*sent, message({"metrics": Metrics(metrics=[])})]) is None, "not only private sums left"
    assert class_shares(sent, 10) == pytest.approx([0.1] * 10)


# --- secure sums


def summed(extractor: torch.nn.Module, devices: Sequence[Rows]) -> Message:
    """What a server of classstats_summed has of devices."""
    config = ClassStatsSummedConfig(min_samples=2)
    parameters = config.parameters_for(3, classes=10, dimensions=features_of(extractor, devices[0].inputs).shape[1])
    total = np.zeros(parameters.numbers, dtype=np.int64)
    for rows in devices:
        steps = rows_in_steps(features_of(extractor, rows.inputs), parameters)[0]
        total += limited_numbers(
            steps, rows.labels.numpy(), 10, parameters.grid_bits, min_samples=2, rank=128, rows_per_direction=15
        )
    ids = tuple(f"device-{number}" for number in range(len(devices)))
    return DeviceSum(ids, sums_to_wire(decode(total, parameters), 0.0, discrete=True)).as_messages()[0]


def test_a_sum_of_one_device_is_attacked_as_its_part(public: PublicSet) -> None:
    """Up to the rounding of the rows to 2^-8 and of the part's means to float16."""
    attacker, own = attacker_of(public, "classstats"), members_of(public, 200)
    extractor = attacker.method.known_extractor("statistics", {})
    assert extractor is not None
    part = to_wire(moments_of(features_of(extractor, own.inputs), own.labels.numpy(), 2), 128, 15)
    alone = attack([message({"statistics": part})], attacker, own)
    result = attack([summed(extractor, [own])], attacker, own)
    assert {name for name, _ in result} == {"sum of 1 devices"}
    assert [attack for _, attack in result] == ["means", "covariance", "means and covariance"]
    for (_, name), scores in result.items():
        assert scores == pytest.approx(alone["statistics", name], abs=0.05 * np.abs(scores).max()), name


@pytest.mark.long
def test_more_devices_in_a_sum_link_less_on_average() -> None:
    """Devices of 40 rows, three seeds: the share of decoys below a row falls with the devices in the sum."""
    result: dict[int, list[float]] = {1: [], 4: [], 20: []}
    for seed in range(3):
        public = split_public(load_dataset("digits"), 800, seed)
        attacker = attacker_of(public, "classstats")
        extractor = attacker.method.known_extractor("statistics", {})
        assert extractor is not None
        everything = public.fleet.train_images, public.fleet.train_labels
        own = Rows(everything[0][:40], everything[1][:40])
        candidates = Rows(torch.cat([own.inputs, public.decoys.inputs]), torch.cat([own.labels, public.decoys.labels]))
        for size, found in result.items():
            devices = [
                Rows(everything[0][first : first + 40], everything[1][first : first + 40])
                for first in range(0, 40 * size, 40)
            ]
            scores = attack([summed(extractor, devices)], attacker, candidates)[
                f"sum of {size} devices", "means and covariance"
            ]
            of_decoys, labels = scores[40:], public.decoys.labels
            found += [float((of_decoys[labels == own.labels[row]] < scores[row]).mean()) for row in range(40)]
    assert np.mean(result[1]) > np.mean(result[4]) + 0.03 > np.mean(result[20]) + 0.06


def test_sums_are_read_from_the_servers_state() -> None:
    """Two sums in a state, one of which has no noise; a device of a forgotten sum is in none."""

    def part(count: float, mu: float) -> list[Any]:
        numbers = {"counts": [count, 0.0], "sums": [[1.0], [0.0]], "second_moment": [2.0]}
        return [{name: torch.tensor(one) for name, one in numbers.items()} | {"mu": mu, "discrete": True}, ""]

    state = {
        "parts": {"x": part(3, mu=0.5), "y": part(4, mu=0.0)},
        "members": {"b": "y", "c": "x", "a": "x", "d": "gone"},
    }
    first, second = sums_of(state)
    assert (first.devices, first.part.counts.tolist(), first.part.mu) == (("a", "c"), [3, 0], 0.5)
    assert (second.devices, second.part.counts.tolist(), second.part.mu) == (("b",), [4, 0], 0)
    assert max_mu(first.as_messages()) == 0.5
    assert max_mu([*first.as_messages(), *second.as_messages()]) is None, "a sum without noise is not private"


def test_an_overfitted_model_gives_its_rows_away(public: PublicSet) -> None:
    """Twenty rows with random labels, learned by heart: their loss falls more than that of most others."""
    attacker, own = attacker_of(public, "fedavg", "digits_mlp_large"), members_of(public, 20)
    noisy = Rows(own.inputs, torch.randint(10, (20,), generator=torch.Generator().manual_seed(0)))
    model = attacker.method.context.device_model()
    before = model_parameters(model)
    optimizer = torch.optim.Adam(model.parameters(), 0.01)
    for _ in range(60):
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(noisy.inputs), noisy.labels).backward()
        optimizer.step()
    sent = message({"parameters": model_parameters(model)}, {"parameters": before})
    assert linked(public, attacker, [sent], noisy)["parameters", "loss over all rounds"] > 0.3  # chance .01


def test_the_gradient_of_one_row_gives_it_away(public: PublicSet) -> None:
    attacker = attacker_of(public, "feddkd", "digits_mlp_large")
    student, teacher = attacker.method.context.device_model().eval(), attacker.method.context.device_model().eval()
    torch.manual_seed(1)
    torch.nn.init.normal_([*teacher.parameters()][-2])  # the last layer's weight
    own, result = members_of(public, 10), []
    trained = message({"parameters": model_parameters(teacher)}, {"parameters": model_parameters(student)})
    for row in range(10):
        one = Rows(own.inputs[row : row + 1], own.labels[row : row + 1])
        probs = teacher(one.inputs).detach().softmax(1)
        gradients, loss = distillation_gradient(student, model_parameters(student), one.inputs, probs, 1.0)
        arrays = {name: gradient.numpy() for name, gradient in gradients.items()}
        gradient = DistillationGradient(gradients=arrays, batch_size=1, loss=loss)
        step = message({"gradient": gradient}, {"parameters": model_parameters(student)})
        result.append(linked(public, attacker, [trained, step], one)["gradient", "last layer, all steps"])
    assert np.mean(result) == 1


def test_a_discriminator_is_asked_for_its_logit(public: PublicSet) -> None:
    attacker = attacker_of(public, "dafkd", "digits_mlp_small")
    model = attacker.method.context.device_model()
    head = SharedHead(32)
    part = Discriminator(parameters=model_parameters(head, scope="head"), shares_extractor=True)
    sent = message({"parameters": model_parameters(model), "discriminator": part})
    rows = members_of(public, 4)
    scores = attack([sent], attacker, rows)["discriminator", "its logit"]
    _, embedding = logits_and_embedding(model.eval(), rows.inputs)
    assert scores == pytest.approx(head(embedding).detach().numpy(), abs=1e-5)


def test_a_part_without_rows_is_not_attacked(public: PublicSet) -> None:
    proxy = ProxyKnowledge(valid=True, logits=np.zeros((4, 10)))
    sent = [message({"knowledge": proxy, "metrics": Metrics(metrics=[])})]
    assert attack(sent, attacker_of(public, "fedavg", "digits_linear"), public.decoys) == {}
    assert parts_sent(sent) == ["knowledge", "metrics"]


# --- class shares


def test_labels_give_shares_exactly() -> None:
    part = SampleKnowledge(sample_ids=np.arange(4), labels=np.array([0, 0, 0, 2]))
    assert class_shares([message({"knowledge": part})], 3) == pytest.approx([0.75, 0, 0.25])


def test_counts_give_shares() -> None:
    part = SharedStatistics(labels=[2, 0], counts=np.array([1, 3], np.int32))
    assert class_shares([message({"statistics": part})], 3) == pytest.approx([0.75, 0, 0.25])


def test_counts_among_a_methods_tensors_give_shares() -> None:
    counts, wrong = np.array([3, 0, 1]), np.ones(2)
    part = NamedTensors(tensors={"counts": counts}, reveals=["counts"])
    assert class_shares([message({"counts": part})], 3) == pytest.approx([0.75, 0, 0.25])
    for tensors, reveals in (({"counts": counts}, []), ({"counts": wrong}, ["counts"]), ({}, ["counts"])):
        assert class_shares([message({"counts": NamedTensors(tensors=tensors, reveals=reveals)})], 3) is None


def test_predictions_give_shares() -> None:
    part = ProxyKnowledge(valid=True, logits=np.array([[9.0, 0, 0], [0, 0, 9]], np.float16))
    assert class_shares([message({"knowledge": part})], 3) == pytest.approx([0.5, 0, 0.5], abs=1e-3)


def test_the_last_predictions_for_own_samples_give_shares() -> None:
    """Two samples of class 2 and one of class 1, as the second message has it."""
    before = SampleKnowledge(sample_ids=np.arange(3), logits=np.eye(3, dtype=np.float16))
    after = SampleKnowledge(sample_ids=np.arange(3), logits=np.eye(3, dtype=np.float16)[[2, 1, 2]])
    sent = [message({"knowledge": before}), message({"knowledge": after}, number=2)]
    assert class_shares(sent, 3) == pytest.approx([0, 1 / 3, 2 / 3])


def test_the_first_step_of_the_bias_gives_shares() -> None:
    """Steps (.3, .1, -.2, -.2, -.2): less the mean of the smallest three, -.2, they are .5, .3 and three times 0."""

    def weights(bias) -> ModelParameters:
        return ModelParameters(parameters={"head.weight": np.zeros((5, 2)), "head.bias": np.array(bias, np.float32)})

    sent = message({"parameters": weights([1.3, 0.1, -0.2, -0.2, -0.2])}, {"parameters": weights([1, 0, 0, 0, 0])})
    later = message({"parameters": weights([0, 0, 0, 0, 9])}, {"parameters": weights([0, 0, 0, 0, 0])}, number=2)
    assert class_shares([sent, later], 5) == pytest.approx([5 / 8, 3 / 8, 0, 0, 0], abs=1e-6)


def test_nothing_to_estimate_shares_from() -> None:
    assert class_shares([message({"metrics": Metrics(metrics=[])})], 3) is None
