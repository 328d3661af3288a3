"""Accuracy of class statistics by secure sums by epsilon, devices and rows: the table of benchmarks/RESULTS.md.

    FLEETDISTILL_DATA=... python benchmarks/experiments/secure_statistics.py fashion-mnist mnist

A cell has the general model's accuracy with noise from each device (classstats_private, noise drawn as floats with the
variance of exact noise), and with the sum's noise (classstats_secure, exact noise of the operating system). Extractor,
encoding, noise, sums, merge and model are the product's, and both methods have the same rows.

With seed 0 every sum is made by `SumSession` and the devices' `SecureSums`, with keys, boxes, masks and shares, and
compared with the plain sum of the inputs that the devices have frozen; with the other seeds the same inputs are added.
"""

from __future__ import annotations

import asyncio
import math
import os
import sys
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import numpy as np
import torch
from private_statistics import accuracy, dealt, features, merged_space, mu_of

from fleetdistill.device.events import DeviceLock, Events
from fleetdistill.device.secure import ANY_TERMS, SecureSums
from fleetdistill.errors import KnowledgeError
from fleetdistill.knowledge import Array, ClassSpace, PrivateRows
from fleetdistill.methods.base import Answer, Ask
from fleetdistill.methods.classstats.class_space import make_space
from fleetdistill.methods.classstats.shared_statistics import Moments
from fleetdistill.methods.classstats_private.merge import merge_private, strength
from fleetdistill.methods.classstats_private.sums import NoiseScale, RowSums, class_sums, on_grid, unit_rows
from fleetdistill.methods.classstats_secure.config import ClassStatsSecureConfig
from fleetdistill.methods.classstats_secure.encoding import decode, exact_numbers, unit_rows_on_grid
from fleetdistill.methods.classstats_secure.exchange import statistics_digest
from fleetdistill.methods.classstats_secure.noise import noise_vector, scale_of_sum
from fleetdistill.secure.primitives import Numbers, from_bytes, lift, reduce, wrap
from fleetdistill.secure.session import Parameters
from fleetdistill.state.memory import MemoryStorage
from fleetdistill.state.secure_sessions import SecureSessions
from fleetdistill.wire.v1 import contract_pb2
from fleetdistill_lab.simulation.data.datasets import load_dataset
from fleetdistill_server.methods.cohort import DeviceAnswer, PayloadFor
from fleetdistill_server.methods.secure.secure_sum import SumSession
from fleetdistill_server.testing import FakeCohort, Member

EPSILONS = (10.0, 3.0, 1.0, 0.3)
FLEETS = ((5, 300), (5, 3000), (20, 600), (20, 3000), (100, 600))
SEEDS = (0, 1, 2)
CLASSES = 10
RUN, CLASS_NAMES, SHAPE = "sums", [str(label) for label in range(CLASSES)], [1, 28, 28]


def parameters_of(config: ClassStatsSecureConfig, devices: int, dimensions: int) -> Parameters:
    """Returns a sum's parameters, as the server makes them."""
    return config.parameters(CLASSES, dimensions, least=config.fewest(devices), honest=config.honest(devices))


def made_sum(fleet: Sequence[PrivateRows], config: ClassStatsSecureConfig, parameters: Parameters) -> Numbers:
    """Makes a sum by the whole protocol. Raises RuntimeError unless it is the plain sum of the frozen inputs."""
    stores = {f"device-{number:03d}": MemoryStorage(Path()) for number in range(len(fleet))}
    contract = contract_pb2.Contract(run=RUN, classes=CLASS_NAMES, input_shape=SHAPE)

    def member(name: str, rows: PrivateRows) -> Member:
        device = SecureSums(stores[name], name, ANY_TERMS, None, Events(DeviceLock(lambda event: None), name))

        def answer(ask: Ask) -> Answer:
            return device.answer(Answer(parts={"statistics": rows}, samples=1), ask, contract, config)

        return answer

    cohort = FakeCohort({name: member(name, rows) for name, rows in zip(stores, fleet, strict=True)})

    def ask(step: str, payload: PayloadFor, *, to: Sequence[str]) -> AsyncIterator[DeviceAnswer]:
        return cohort.ask(step, payload, to=to, quorum=0.0)

    digest = statistics_digest(CLASS_NAMES, SHAPE, config)
    session = SumSession(cohort, ask, parameters, run=RUN, digest=digest, nonce=os.urandom(32))
    result = asyncio.run(session.sum(list(stores)))
    frozen = [SecureSessions(stores[name]).open() for name in result.devices]
    plain = sum(from_bytes(item.numbers, parameters.width) for item in frozen if item is not None)
    if len(result.devices) != len(fleet) or not np.array_equal(result.total, reduce(plain, parameters.width)):
        raise RuntimeError("the secure sum is not the plain sum of its members")
    return result.total


def added(fleet: Sequence[PrivateRows], parameters: Parameters) -> Numbers:
    """Returns the sum of the inputs that the devices would freeze, without masks."""
    total = np.zeros(parameters.numbers, dtype=np.int64)
    for device in fleet:
        steps = unit_rows_on_grid(unit_rows(device.rows), parameters.grid_bits)
        total += exact_numbers(steps, device.labels, CLASSES, parameters.count_bits) + noise_vector(parameters)
    return wrap(total, parameters.width)


def space_of(sums: RowSums, scale: NoiseScale) -> ClassSpace | None:
    """Returns the class space of one sum; None if the noise leaves no two classes."""
    found = merge_private([sums], [scale])
    if found is None:
        return None
    counts, size = np.maximum(np.rint(found.counts), 1).astype(np.int64), found.means.shape[1]
    moments = Moments(
        labels=tuple(found.labels.tolist()),
        counts=counts,
        means=found.means * math.sqrt(size),
        covariance=found.covariance * size,
        df=max(int(counts.sum()) - len(counts), 1),
    )
    try:
        return make_space(moments, shrinkage=0.0)
    except KnowledgeError:
        return None


def without_noise(rows: Array, labels: Array) -> ClassSpace | None:
    """Returns the class space of one sum of all rows."""
    return space_of(class_sums(on_grid(unit_rows(rows)), labels, CLASSES), NoiseScale.of(mu_of(math.inf)))


def with_secure_sum(fleet: Sequence[PrivateRows], epsilon: float, *, whole: bool) -> ClassSpace | None:
    """Returns the class space of a secure sum, of the whole protocol or of its inputs alone."""
    config = ClassStatsSecureConfig(epsilon=epsilon)
    parameters = parameters_of(config, len(fleet), fleet[0].rows.shape[1])
    total = made_sum(fleet, config, parameters) if whole else added(fleet, parameters)
    return space_of(decode(lift(total, parameters.width), parameters), scale_of_sum(parameters, len(fleet)))


def shown(values: Sequence[float]) -> str:
    """Returns mean and standard deviation in %."""
    return f"{100 * np.mean(values):.1f} ± {100 * np.std(values, ddof=1):.1f}"


def main() -> None:
    """Prints the table of each data set as Markdown."""
    torch.set_num_threads(1)
    print("| data | devices | rows a device | no noise |", *(f"{e:g}: each device / sum (R) |" for e in EPSILONS))
    for name in sys.argv[1:]:
        data = load_dataset(name, data_dir=Path(os.environ["FLEETDISTILL_DATA"]))
        train, test = features(data.train_images), features(data.test_images)
        labels, test_labels = data.train_labels.numpy(), data.test_labels.numpy()
        for devices, rows in FLEETS:
            dealt_rows = [dealt(labels, devices, rows, math.inf, seed) for seed in SEEDS]
            all_rows = [np.concatenate(own) for own in dealt_rows]
            clean = [accuracy(without_noise(train[own], labels[own]), test, test_labels) for own in all_rows]
            cells = [shown(clean)]
            for epsilon in EPSILONS:
                local, secure = [], []
                for seed, own in zip(SEEDS, dealt_rows, strict=True):
                    fleet = [PrivateRows(train[item], labels[item], CLASSES) for item in own]
                    local.append(accuracy(merged_space(train, labels, own, mu_of(epsilon), seed), test, test_labels))
                    space = with_secure_sum(fleet, epsilon, whole=seed == SEEDS[0])
                    secure.append(accuracy(space, test, test_labels))
                honest = ClassStatsSecureConfig(epsilon=epsilon).honest(devices)
                found = strength(rows, [mu_of(epsilon) * math.sqrt(honest)] * devices)
                cells.append(f"{shown(local)} / {shown(secure)} ({found:.0f})")
            print(f"| {name} | {devices} | {rows} |", *(f"{cell} |" for cell in cells), flush=True)


if __name__ == "__main__":
    main()
