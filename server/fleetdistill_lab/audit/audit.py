"""Audits a run: its method and models run on a public set, and every part that devices send is attacked.

No private row is needed or read: the devices' data are rows of the public set, and the attacker asks which. Attacks
know the labels of the candidates, the architecture and initial weights of the models, and public rows of the same kind.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import NormalDist

import numpy as np
import torch

from fleetdistill.errors import RunError
from fleetdistill.knowledge import (
    KINDS,
    ClassSums,
    Discriminator,
    DistillationGradient,
    HeadGradient,
    Kind,
    ModelParameters,
    NamedTensors,
    SampleKnowledge,
    SharedStatistics,
)
from fleetdistill.methods import device_class
from fleetdistill.state.state_file import unpack_state
from fleetdistill_lab.audit.gradient_sums import by_gradient_sums
from fleetdistill_lab.audit.knowledge import by_features, by_statistics, by_sums, class_shares
from fleetdistill_lab.audit.linkage import Linkage, Scored, known_shares, linkage
from fleetdistill_lab.audit.networks import by_discriminator, by_gradients, by_parameters
from fleetdistill_lab.audit.public_set import PublicSet, split_public
from fleetdistill_lab.audit.record import (
    Attacker,
    DeviceSum,
    Message,
    Part,
    Record,
    Rows,
    Scores,
    gradients_of,
    sums_of,
)
from fleetdistill_lab.audit.tables import by_tables
from fleetdistill_lab.simulation.checks import check_plan, check_settings
from fleetdistill_lab.simulation.data.datasets import Dataset
from fleetdistill_lab.simulation.links.links import run_over_memory
from fleetdistill_lab.simulation.spec.plan import deal, hold_out_proxy, make_run_config, make_specs
from fleetdistill_lab.simulation.spec.settings import Simulation
from fleetdistill_server.config.run_config import RunConfig
from fleetdistill_server.engine.contract import build_method
from fleetdistill_server.methods.base import ServerMethod

ATTACKED_ROWS = 60
"""Rows of each device that are attacked; all rows of a device with fewer."""
USUAL_ROUNDS = 5
Attack = Callable[[Sequence[Message], Attacker, Rows], Mapping[Part, Scores]]

_ATTACKS: Mapping[type[Kind], Attack] = {
    ModelParameters: by_parameters,
    DistillationGradient: by_gradients,
    SampleKnowledge: by_features,
    SharedStatistics: by_statistics,
    ClassSums: by_sums,
    HeadGradient: by_gradient_sums,
    Discriminator: by_discriminator,
    NamedTensors: by_tables,
}
"""Attacks by the kind of part that they attack. The other kinds contain nothing about single rows to ask for."""


@dataclass(frozen=True, kw_only=True)
class Audit:
    """Settings of an audit.

    Attributes:
        config: The run, whose method, settings and models are audited.
        data: The public set.
        rounds: Number of rounds; None for the method's own, at most 5.
        devices: Number of devices.
        models: Device models, assigned in turn; by default `[model] device`, or built-in models that fit.
        rows: Rows that the devices train on together, at most half of the public set.
        alpha: Concentration of the Dirichlet partition by class, above 0.
        seed: Seed of the split, the partition and the run.
    """

    config: RunConfig
    data: Dataset
    rounds: int | None = None
    devices: int = 5
    models: tuple[str, ...] = ()
    rows: int = 1500
    alpha: float = 0.5
    seed: int = 0


@dataclass(frozen=True, kw_only=True)
class AuditReport:
    """Result of an audit.

    Attributes:
        method: Name of the method.
        public_set: Name of the public set.
        devices: Number of devices.
        rounds: Number of rounds.
        trained_rows: Rows that the devices trained on together.
        attacked_rows: Rows that were attacked, of all devices.
        decoys: Fewest decoys of an attacked row.
        parts: Results by part and attack; empty for a part that cannot be tested for single rows.
        unattacked: Columns that a part of tensors of the method is declared to contain, by the part's name; no attack
            reads these tensors.
        classes: How well class shares are known, at most 1; None if no part that the audit reads depends on them.
        mu: Gaussian-DP parameter of the devices' answers, or of their secure sums; None if they are not private.
        smallest_batch: Fewest rows of a gradient that a device sent; None if no device sent one.
        sums: Number of devices in each secure sum; empty if the method sums nothing securely.
    """

    method: str
    public_set: str
    devices: int
    rounds: int
    trained_rows: int
    attacked_rows: int
    decoys: int
    parts: Mapping[str, Mapping[str, Linkage]]
    classes: float | None
    smallest_batch: int | None
    mu: float | None
    sums: tuple[int, ...] = ()
    unattacked: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    @property
    def worst(self) -> Linkage | None:
        """Result of the attack with the largest `linked`; None if no part can be tested for single rows."""
        return max(
            (attack for attacks in self.parts.values() for attack in attacks.values()),
            key=lambda one: (one.linked, one.auc),
            default=None,
        )

    @property
    def bound(self) -> float | None:
        """Largest `linked` that any attack can reach; None if the answers are not private."""
        return None if self.mu is None else bound(self.chance["linked"], self.mu)

    def check_bound(self) -> None:
        """Raises RunError if an attack links more rows than the answers' privacy allows."""
        worst, most = self.worst, self.bound
        if worst is not None and most is not None and worst.interval[0] > most:
            raise RunError(
                f"linked is at least {worst.interval[0]:.4f}, but the devices' noise allows at most {most:.4f}; the "
                "noise is faulty, report it"
            )

    @property
    def chance(self) -> dict[str, float]:
        """Figures of an attack that knows nothing."""
        return {"linked": 1 / (self.decoys + 1), "auc": 0.5, "tpr1": 0.01}


def bound(chance: float, mu: float) -> float:
    """Returns the largest `linked` that any attack can reach on answers that are mu-Gaussian differentially private.

    Args:
        chance: `linked` by chance, in (0, 1): the share of false links.
        mu: Gaussian-DP parameter of one device's answers, at least 0.

    References:
        Dong, Roth and Su, Gaussian Differential Privacy, 2022: the trade-off function of a Gaussian mechanism.
    """
    normal = NormalDist()
    return normal.cdf(normal.inv_cdf(chance) + mu)


@dataclass(frozen=True)
class Recorded:
    """A finished run of an audit.

    Attributes:
        record: All messages.
        rows: Each device's rows, by its id.
        method: A new server half of the run.
        config: Configuration of the run.
        sums: The secure sums that the server has at the end of the run.
    """

    record: Record
    rows: Mapping[str, Rows]
    method: ServerMethod
    config: RunConfig
    sums: Sequence[DeviceSum] = ()

    def known_of(self, device: str) -> list[Message]:
        """Returns what the server has of a device: its messages, and the secure sum that contains it."""
        return [*self.record.of(device), *(one.as_messages()[0] for one in self.sums if device in one.devices)]


def audit(wanted: Audit) -> AuditReport:
    """Runs an audit; writes nothing.

    Raises:
        ConfigurationError: A setting is out of range, or the run's models do not fit.
        DataError: The public set is too small.
        RunError: The run failed.
    """
    public = split_public(wanted.data, wanted.rows, wanted.seed)
    recorded = record_run(wanted, public)
    return report(wanted, public, recorded)


def record_run(wanted: Audit, public: PublicSet) -> Recorded:
    """Runs the method on the public set in memory and returns all messages; temporary files are deleted."""
    simulation = simulation_of(wanted, public.fleet)
    check_settings(simulation)
    check_plan(simulation, public.fleet)
    with tempfile.TemporaryDirectory(prefix="fleetdistill-audit-") as scratch:
        work, record = Path(scratch), Record()
        data = hold_out_proxy(simulation, public.fleet, work)
        split = deal(simulation, data)
        config = make_run_config(simulation, data, work)
        specs = make_specs(simulation, data, split, work)
        with closing(run_over_memory(config, specs, work, lambda store: None, record.link)) as store:
            state = unpack_state(store.blobs.get_state(store.runs.existing(config.run.name).checkpoint))
        rows = {
            spec.name: Rows(data.train_images[of], data.train_labels[of])
            for spec, of in zip(specs, split.indices, strict=True)
        }
        method = build_method(config)
        sums = sums_of(state) if config.method_config().sums_securely else []
        sums = [replace(one, gradients=tuple(gradients_of(one.devices, record, method))) for one in sums]
        return Recorded(record, rows, method, config, sums)


def simulation_of(wanted: Audit, fleet: Dataset) -> Simulation:
    """Returns the simulation that runs a run.toml's method and models on a data set."""
    config = wanted.config
    models = config.model.model_dump(exclude_unset=True)
    return Simulation(
        method=config.run.method,
        modules=tuple(config.run.modules),
        settings=config.method,
        dataset=fleet,
        devices=wanted.devices,
        models=wanted.models or tuple(filter(None, [config.model.device])),
        extractor=models.get("extractor", ""),
        server_model=models.get("server", ""),
        alpha=wanted.alpha,
        rounds=_rounds(wanted),
        seed=wanted.seed,
        threads=config.run.threads,
        knowledge_type=config.contract.knowledge_type,
        torch_device=config.server.torch_device,
        with_alone=False,
        with_fedavg=False,
    )


def _rounds(wanted: Audit) -> int:
    """Returns the number of rounds; by default the method's own, at most 5."""
    usual = min(int(wanted.config.method_config().usual_rounds), USUAL_ROUNDS)
    return usual if wanted.rounds is None else wanted.rounds


def report(wanted: Audit, public: PublicSet, recorded: Recorded) -> AuditReport:
    """Attacks all messages of a run and summarizes the results."""
    attacked = {device: _some(rows, wanted.seed) for device, rows in recorded.rows.items()}
    everything = Rows(
        torch.cat([*(rows.inputs for rows in attacked.values()), public.decoys.inputs]),
        torch.cat([*(rows.labels for rows in attacked.values()), public.decoys.labels]),
    )
    ends = np.cumsum([len(rows) for rows in attacked.values()])
    own = dict(zip(attacked, np.split(np.arange(ends[-1]), ends[:-1]), strict=True))
    summed = [one.as_messages() for one in recorded.sums]
    sources = [(recorded.record.of(device), rows) for device, rows in own.items()]
    for one, messages in zip(recorded.sums, summed, strict=True):
        sources.append((messages, np.concatenate([own[device] for device in one.devices])))
    attacker = Attacker(recorded.method, public.attacker, device_class(wanted.config.run.method))
    result = dict[Part, list[Scored]]()
    for messages, members in sources:
        for part, scores in attack(messages, attacker, everything).items():
            result.setdefault(part, []).extend(_score(scores, members, everything, len(public.decoys)))
    parts = _by_part(result, [*recorded.record.messages, *(message for messages in summed for message in messages)])
    return AuditReport(
        method=wanted.config.run.method,
        public_set=wanted.data.name,
        devices=wanted.devices,
        rounds=recorded.config.run.rounds,
        trained_rows=sum(len(rows) for rows in recorded.rows.values()),
        attacked_rows=int(ends[-1]),
        decoys=int(public.decoys.labels.bincount()[everything.labels[: ends[-1]]].min()),
        parts=parts,
        classes=_classes(recorded),
        smallest_batch=smallest_batch(recorded.record.messages),
        mu=max_mu([messages[0] for messages in summed] or recorded.record.messages),
        sums=tuple(len(one.devices) for one in recorded.sums),
        unattacked={name: one for name, one in _tensors(recorded.record.messages).items() if not parts[name]},
    )


def _tensors(messages: Sequence[Message]) -> dict[str, tuple[str, ...]]:
    """Returns the declared columns of all parts of tensors of the method, by the part's name."""
    found = ((name, part) for message in messages for name, part in message.sent.items())
    return {name: part.columns() for name, part in found if isinstance(part, NamedTensors)}


def _some(rows: Rows, seed: int) -> Rows:
    """Returns the attacked rows of a device."""
    taken = np.random.default_rng([seed, 2]).permutation(len(rows))[:ATTACKED_ROWS]
    return Rows(rows.inputs[taken], rows.labels[taken])


def _score(scores: Scores, own: np.ndarray, rows: Rows, decoys: int) -> Iterator[Scored]:
    """Yields each own row's score with those of the decoys of its class, which are the last rows."""
    labels = rows.labels.numpy()
    for row in own:
        yield Scored(float(scores[row]), scores[-decoys:][labels[-decoys:] == labels[row]])


def _by_part(found: Mapping[Part, Sequence[Scored]], messages: Sequence[Message]) -> dict[str, dict[str, Linkage]]:
    """Returns the results by part and attack; a part that cannot be tested for single rows has none."""
    return {
        name: {attack: linkage(scored) for (part, attack), scored in found.items() if part == name}
        for name in parts_sent(messages)
    }


def _classes(recorded: Recorded) -> float | None:
    """Returns how well the devices' class shares are known."""
    classes = len(recorded.config.contract.class_names())
    estimates = {device: class_shares(recorded.known_of(device), classes) for device in recorded.rows}
    known = {device: one for device, one in estimates.items() if one is not None}
    if not known:
        return None
    true = [np.bincount(recorded.rows[device].labels, minlength=classes) for device in known]
    return known_shares(np.stack([*known.values()]), np.stack([item / item.sum() for item in true]))


def attack(messages: Sequence[Message], attacker: Attacker, rows: Rows) -> dict[Part, Scores]:
    """Scores rows by every part of a device's messages that can be tested for single rows.

    Args:
        messages: All messages of one device, in order.
        attacker: The attacker's knowledge.
        rows: Candidates.

    Returns:
        Scores by the name of the attacked part and of the attack.
    """
    kinds = {type(part) for message in messages for part in message.sent.values()}
    scores: dict[Part, Scores] = {}
    for score in dict.fromkeys(_ATTACKS[kind] for kind in KINDS.values() if kind in kinds and kind in _ATTACKS):
        scores |= score(messages, attacker, rows)
    return scores


def parts_sent(messages: Sequence[Message]) -> list[str]:
    """Returns the names of all parts that devices sent, in order of their first use."""
    return list(dict.fromkeys(name for message in messages for name in message.sent))


def max_mu(messages: Sequence[Message]) -> float | None:
    """Returns the largest Gaussian-DP parameter of answers or secure sums; None if one of them is not private."""
    answers = [message.sent for message in messages if message.sent]
    if not answers or not all(isinstance(part, ClassSums) for sent in answers for part in sent.values()):
        return None
    mus = [part.mu for sent in answers for part in sent.values() if isinstance(part, ClassSums)]
    return max(mus) if all(mus) else None


def smallest_batch(messages: Sequence[Message]) -> int | None:
    """Returns the fewest rows of a gradient in the messages; None if there is no gradient."""
    parts = (part for message in messages for part in message.sent.values())
    return min((part.batch_size for part in parts if isinstance(part, DistillationGradient)), default=None)
