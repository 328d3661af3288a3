"""What a secure sum costs: bytes and CPU time of a device and of the server, and a fleet's sum over gRPC.

    python benchmarks/secure_sums.py cost --devices 5 10 100 1000
    python benchmarks/secure_sums.py ring --devices 1000 10000
    python benchmarks/secure_sums.py grpc --devices 100

`cost`: the device is the SDK's `SecureSums` with a state directory, the server `SumSession`, without link and store.
The other devices' messages are valid, but cheap: boxes are sealed for the one device alone, pair masks between two
survivors are left out, because they cancel, and shares are random numbers that give the secrets. The sum is checked
against the plain sum, number for number. A device's bytes are headers and data of its payloads.

`ring`: all devices of a ring compute all that they send, without state directories. A twentieth drops out, a third of
them at each of `secure_shares`, `secure_input` and `secure_unmask`, and the sum is checked number for number. Bytes and
CPU time of a device are means.

`grpc`: `simulate --link grpc` with classstats_secure, and in the same run with classstats_private, of the same rows.
Seconds of the sum are those of the event `secure-sum`. Linux only.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fleetdistill import SecureTerms, Signer
from fleetdistill.device.events import DeviceLock, Events
from fleetdistill.device.secure import ANY_TERMS, SecureSums
from fleetdistill.knowledge import PrivateRows, SecureMessage
from fleetdistill.methods.base import Answer, Ask
from fleetdistill.methods.classstats_secure.config import ClassStatsSecureConfig
from fleetdistill.methods.classstats_secure.exchange import CHECK, INPUT, KEYS, SHARES, UNMASK, statistics_digest
from fleetdistill.secure.member import Member, endorse
from fleetdistill.secure.primitives import (
    PRIME,
    Numbers,
    from_bytes,
    hkdf,
    public_key,
    reduce,
    tag,
    to_bytes,
    verification_key,
    weights_at_zero,
    wrap,
)
from fleetdistill.secure.session import (
    KeysEntry,
    Masks,
    Parameters,
    session_id,
    session_threshold,
    survivors_message,
    unpack_members,
)
from fleetdistill.state.files import Files
from fleetdistill.state.secure_sessions import SecureSessions
from fleetdistill.wire.codec import Payload, decode, encode
from fleetdistill.wire.v1 import contract_pb2
from fleetdistill_server.methods.cohort import DeviceAnswer, PayloadFor
from fleetdistill_server.methods.secure.secure_sum import SumSession
from fleetdistill_server.testing import FakeCohort

CLASSES, DIMENSIONS, ROWS = 10, 64, 300
DROPPED = 0.05
RUN, CLASS_NAMES, SHAPE = "sums", [str(label) for label in range(CLASSES)], [1, 28, 28]
ROSTER = bytes(range(32))
NONCE = bytes(32)
FLEET_ROWS, EPSILON = 60, 10.0
FRONT = "fleetdistill_server.front"


class Crowd:
    """The devices of a sum but the first, as far as the first and the server can see them.

    Args:
        names: Ids of all devices, in order.
        config: Of the run.
        parameters: Of the sum.
        sid: Its id.
        dropped: Number of devices, the last ones, that send no input.
    """

    def __init__(
        self, names: Sequence[str], config: ClassStatsSecureConfig, parameters: Parameters, sid: bytes, dropped: int
    ) -> None:
        self._names, self._signs, self._sid, self._count = names, config.signs_keys, sid, len(names)
        self._masks = Masks(sid=sid, count=parameters.numbers, width=parameters.width)
        self._width, self._dropped = parameters.width, range(len(names) - dropped, len(names))
        self._threshold = session_threshold(len(names), 0)
        self._others = range(1, len(names))
        self._identities = {index: os.urandom(32) for index in self._others}
        self.inputs = {index: self._random_numbers(parameters) for index in self._others}
        self._self_seeds, self._mask_seeds, self._members = {}, {}, {}
        for index in self._others:
            root = os.urandom(32)
            self._self_seeds[index] = hkdf(root, sid, tag("self seed"), 31)
            self._mask_seeds[index] = hkdf(root, sid, tag("mask seed"), 31)
            identity = self._identities[index] if self._signs else None
            self._members[index] = Member(root, self.inputs[index], sid, self._width, identity=identity)
        self._random_shares = np.frombuffer(os.urandom(len(names) * 32), np.uint8).reshape(-1, 32) & 0x7F
        self._weights = weights_at_zero(range(1, self._threshold + 1))
        self._entries: Mapping[int, bytes] = {}
        self._digest, self._shared, self._survivors = b"", frozenset[int](), frozenset[int]()
        self._first_boxes: Any = None
        self._first_shares: Any = None

    def _random_numbers(self, parameters: Parameters) -> Numbers:
        return reduce(np.frombuffer(os.urandom(8 * parameters.numbers), np.uint64), parameters.width)

    def note(self, step: str, asked: SecureMessage, reply: SecureMessage) -> None:
        """Takes what the first device was asked in a step, and what it answered."""
        if step == SHARES:
            self._entries = {entry.index: entry.keys for entry in asked.entries}
            self._digest, self._first_boxes = asked.roster, reply.boxes
        elif step == INPUT:
            self._shared = unpack_members(asked.members, self._count)
        elif step == UNMASK:
            self._survivors, self._first_shares = unpack_members(asked.members, self._count), reply.shares

    def answer(self, index: int, step: str, asked: SecureMessage) -> Payload | None:
        """Returns a device's answer to a step; None if it has dropped out."""
        if step == KEYS:
            return _packed("keys", self._members[index].keys_entry(self._names[index]) + self._endorsement(index))
        if step == SHARES:
            box = self._members[index].boxes(index, {0: self._entries[0]}, self._digest, self._threshold)[0]
            return _packed("boxes", box + bytes(80 * (self._count - 2)), 80)
        if step == INPUT:
            return None if index in self._dropped else _packed("numbers", to_bytes(self._masked(index), self._width))
        if step == CHECK:
            survivors = unpack_members(asked.members, self._count)
            text = survivors_message(self._sid, self._digest, self._count, self._shared, survivors)
            return _packed("signature", self._members[index].sign(text))
        return _packed("shares", b"".join(self._share_of(owner, index) for owner in sorted(self._shared)), 32)

    def _endorsement(self, index: int) -> bytes:
        key = verification_key(self._identities[index])
        return endorse(ROSTER, self._names[index], key) if self._signs else b""

    def _masked(self, index: int) -> Numbers:
        """The input with all masks but those of pairs of survivors, which cancel in the sum."""
        secret = self._masks.mask_secret(self._mask_seeds[index])
        public = public_key(secret)
        total = self.inputs[index] + self._masks.of_self(self._self_seeds[index])
        for other in (0, *self._dropped):
            total = total + self._masks.of_pair(
                index, secret, public, other, KeysEntry.read(self._entries[other]).mask_key
            )
        return reduce(total, self._width)

    def _share_of(self, owner: int, holder: int) -> bytes:
        """A share of what the server needs of `owner`: the second device's makes those of all others fit."""
        if owner == 0:
            box = self._first_boxes[holder - 1].tobytes()
            first = {0: self._entries[0]}, self._digest, self._threshold, {0: box}
            return self._members[holder].unmasking_shares(holder, *first, self._survivors)[0]
        if holder > 1:
            return self._random_shares[(owner + holder) % self._count].tobytes()
        seed = self._self_seeds[owner] if owner in self._survivors else self._mask_seeds[owner]
        known = {0: self._first_shares[sorted(self._shared).index(owner)].tobytes()}
        known |= {other: self._share_of(owner, other) for other in range(2, self._threshold)}
        rest = sum(self._weights[other] * int.from_bytes(share, "little") for other, share in known.items())
        wanted = int.from_bytes(seed, "little") - rest
        return (wanted * pow(self._weights[1], -1, PRIME) % PRIME).to_bytes(32, "little")


def _packed(name: str, data: bytes, row: int = 0) -> Payload:
    array = np.frombuffer(data, np.uint8)
    fields: dict[str, Any] = {name: array.reshape(-1, row) if row else array}
    return encode({name: SecureMessage(**fields)})


class Costs:
    """Bytes and CPU seconds of one sum.

    Attributes:
        up: Bytes of the first device's answers.
        down: Bytes of its asks.
        device: CPU seconds of the device, of each step.
        server: CPU seconds of the server.
    """

    def __init__(self) -> None:
        self.up = self.down = 0
        self.device: dict[str, float] = {}
        self.server = 0.0


def measured_sum(devices: int, keys: str, dropped: int) -> Costs:
    """Makes a sum, and returns its costs. Raises RuntimeError if it is not the plain sum."""
    config = ClassStatsSecureConfig(epsilon=1.0, keys=keys)
    parameters = config.parameters(CLASSES, DIMENSIONS, least=config.fewest(devices), honest=config.honest(devices))
    digest = statistics_digest(CLASS_NAMES, SHAPE, config)
    names = [f"device-{index:04d}" for index in range(devices)]
    sid = session_id(RUN, 1, 1, NONCE, digest, parameters.pack())
    crowd, costs, outside = Crowd(names, config, parameters, sid, dropped), Costs(), 0.0
    random = np.random.default_rng(0)
    rows = PrivateRows(random.normal(size=(ROWS, DIMENSIONS)), random.integers(0, CLASSES, ROWS), CLASSES)
    contract = contract_pb2.Contract(run=RUN, classes=CLASS_NAMES, input_shape=SHAPE)
    with tempfile.TemporaryDirectory() as directory:
        files = Files(Path(directory))
        events = Events(DeviceLock(lambda event: None), names[0])
        first = SecureSums(files, names[0], _terms(names[0], keys), None, events)

        def answered(step: str, message: SecureMessage) -> Payload:
            sent = encode({"session": message})
            began = time.process_time()
            ask = Ask(round=1, step=step, seed=0, parts=decode(sent))
            parts = first.answer(Answer(parts={"statistics": rows}, samples=ROWS), ask, contract, config).parts
            result = encode(parts)
            costs.device[step] = time.process_time() - began
            costs.up += result.header_bytes + result.data_bytes
            costs.down += sent.header_bytes + sent.data_bytes
            crowd.note(step, message, next(iter(parts.values())))
            return result

        async def ask(step: str, payload: PayloadFor, *, to: Sequence[str]) -> AsyncIterator[DeviceAnswer]:
            nonlocal outside
            for name in to:
                message = (payload(name) if callable(payload) else payload or {})["session"]
                began = time.process_time()
                index = names.index(name)
                sent = answered(step, message) if index == 0 else crowd.answer(index, step, message)
                outside += time.process_time() - began
                if sent is not None:
                    yield DeviceAnswer(name, 1, sent)

        session = SumSession(FakeCohort({}, number=1), ask, parameters, run=RUN, digest=digest, nonce=NONCE)
        began = time.process_time()
        result = asyncio.run(session.sum(names))
        costs.server = time.process_time() - began - outside
        frozen = SecureSessions(files).open()
        assert frozen is not None
        inputs = {0: from_bytes(frozen.numbers, parameters.width), **crowd.inputs}
        plain = sum(inputs[index] for index in range(devices - dropped))
        if len(result.devices) != devices - dropped or not np.array_equal(
            result.total, reduce(plain, parameters.width)
        ):
            raise RuntimeError("the secure sum is not the plain sum of its members")
    return costs


def _terms(name: str, keys: str) -> SecureTerms:
    if keys == "unsigned":
        return ANY_TERMS
    key = os.urandom(32)
    endorsement = endorse(ROSTER, name, verification_key(key))
    return SecureTerms(
        min_devices=3, signer=Signer(key=key, endorsement=endorsement, roster_key=verification_key(ROSTER))
    )


def print_costs(fleets: Sequence[int]) -> None:
    """Prints the table of `cost`."""
    print(
        "| devices | keys | drop out | bytes up | bytes down | CPU ms of a device: first step, rest | of the server |"
    )
    print(f"|{'---|' * 7}")
    for devices in fleets:
        for keys in ("unsigned", "roster"):
            for dropped in (0, max(1, round(DROPPED * devices))):
                costs = measured_sum(devices, keys, dropped)
                start, rest = costs.device.pop(KEYS), sum(costs.device.values())
                print(
                    f"| {devices} | {keys} | {dropped} | {costs.up:,} | {costs.down:,} | {1000 * start:.0f}, "
                    f"{1000 * rest:.0f} | {1000 * costs.server:.0f} |",
                    flush=True,
                )


# --- a ring of whole devices


def measured_ring(devices: int) -> tuple[Parameters, Costs]:
    """Makes a sum in a ring, and returns its costs, means of a device. Raises RuntimeError if it is wrong."""
    config = ClassStatsSecureConfig(epsilon=1.0, graph="ring", max_in_sum=devices)
    parameters = config.parameters_for(devices, CLASSES, DIMENSIONS)
    width, sid = parameters.width, session_id(RUN, 1, 1, NONCE, NONCE, parameters.pack())
    names = [f"device-{index:05d}" for index in range(devices)]
    random = np.random.default_rng(0)
    bound = 2 ** (8 * width - 1) // devices
    inputs = [wrap(random.integers(-bound, bound, parameters.numbers), width) for _ in names]
    members = [Member(os.urandom(32), numbers, sid, width) for numbers in inputs]
    indices = {name: index for index, name in enumerate(names)}
    lost = set()
    for number, step in enumerate((SHARES, INPUT, UNMASK)):
        lost |= {(step, name) for name in names[number :: 3 * round(1 / DROPPED)]}
    seen: list[_Seen] = [_Seen() for _ in names]
    threshold, costs, outside = session_threshold(devices, parameters.degree), Costs(), 0.0
    costs.device = dict.fromkeys((KEYS, SHARES, INPUT, UNMASK), 0.0)

    def answer(index: int, step: str, asked: SecureMessage) -> Payload:
        member, own = members[index], seen[index]
        if step == KEYS:
            return _packed("keys", member.keys_entry(names[index]))
        if step == SHARES:
            own.entries = {entry.index: entry.keys for entry in asked.entries if entry.index != index}
            own.roster = asked.roster
            boxes = member.boxes(index, own.entries, own.roster, threshold)
            return _packed("boxes", b"".join(boxes[other] for other in sorted(boxes)), 80)
        listed = unpack_members(asked.members, devices)
        if step == INPUT:
            senders = sorted(listed & own.entries.keys())
            assert asked.boxes is not None
            own.boxes = {other: row.tobytes() for other, row in zip(senders, asked.boxes, strict=True)}
            return _packed("numbers", to_bytes(member.masked_numbers(index, own.entries, own.roster, own.boxes), width))
        shares = member.unmasking_shares(index, own.entries, own.roster, threshold, own.boxes, listed)
        return _packed("shares", b"".join(shares[other] for other in sorted(shares)), 32)

    async def ask(step: str, payload: PayloadFor, *, to: Sequence[str]) -> AsyncIterator[DeviceAnswer]:
        nonlocal outside
        for name in to:
            message = (payload(name) if callable(payload) else payload or {})["session"]
            if (step, name) in lost:
                continue
            sent = encode({"session": message})
            began = time.process_time()
            result = answer(indices[name], step, message)
            spent = time.process_time() - began
            costs.device[step] += spent / devices
            costs.down += sent.header_bytes + sent.data_bytes
            costs.up += result.header_bytes + result.data_bytes
            outside += spent
            yield DeviceAnswer(name, 1, result)

    session = SumSession(FakeCohort({}, number=1), ask, parameters, run=RUN, digest=NONCE, nonce=NONCE)
    began = time.process_time()
    result = asyncio.run(session.sum(names))
    costs.server = time.process_time() - began - outside
    costs.up, costs.down = costs.up // devices, costs.down // devices
    plain = np.sum([inputs[indices[name]] for name in result.devices], axis=0, dtype=np.uint64)
    if len(result.devices) != devices - 2 * len(names[:: 3 * round(1 / DROPPED)]) or not np.array_equal(
        result.total, reduce(plain, width)
    ):
        raise RuntimeError("the secure sum is not the plain sum of its members")
    return parameters, costs


class _Seen:
    """What a device has been told."""

    entries: dict[int, bytes]
    boxes: dict[int, bytes]
    roster: bytes


def print_rings(fleets: Sequence[int]) -> None:
    """Prints the table of `ring`."""
    print("| devices | neighbours | t | bytes up | bytes down | CPU ms of a device | of the server |")
    print(f"|{'---|' * 7}")
    for devices in fleets:
        parameters, costs = measured_ring(devices)
        print(
            f"| {devices:,} | {parameters.degree} | {session_threshold(devices, parameters.degree)} | {costs.up:,} | "
            f"{costs.down:,} | {1000 * sum(costs.device.values()):.1f} | {1000 * costs.server:,.0f} |",
            flush=True,
        )


# --- over gRPC


def simulated(method: str, devices: int, folder: Path) -> dict[str, float]:
    """Runs one exchange of a fleet over gRPC; returns its wall and CPU seconds from the first ask to its end."""
    from wire_fleet import cpu_seconds

    from fleetdistill_lab import Progress, Simulation, simulate
    from fleetdistill_lab.simulation.spec.plan import RUN as SIMULATED
    from fleetdistill_server.store.store import Store

    at: dict[int, tuple[float, float, float]] = {}

    def note(progress: Progress) -> None:
        if progress.phase == "fleet":
            at.setdefault(progress.completed, (time.monotonic(), cpu_seconds(), cpu_seconds(FRONT)))

    random = np.random.default_rng(0)
    centres = random.random((CLASSES, 1, 28, 28), np.float32)
    labels = np.arange(devices * FLEET_ROWS) % CLASSES
    inputs = np.clip(centres[labels] + random.normal(0, 0.1, (len(labels), 1, 28, 28)), 0, 1).astype(np.float32)
    simulate(
        Simulation(
            method=method,
            dataset={
                "train_inputs": inputs,
                "train_labels": labels,
                "test_inputs": inputs[:100],
                "test_labels": labels[:100],
            },
            partition="iid",
            settings={"epsilon": EPSILON},
            devices=devices,
            rounds=1,
            link="grpc",
            torch_device="cpu",
            with_alone=False,
            with_fedavg=False,
            out=folder / method,
        ),
        note,
    )
    wall, cpu, front = (end - start for start, end in zip(at[0], at[1], strict=True))
    result = {"wall s of the exchange": wall, "CPU s of all": cpu, "CPU s of the front": front}
    (database,) = (folder / method).rglob("store.sqlite")
    with contextlib.closing(Store.open(database.parent)) as store:
        for event in store.history.events(SIMULATED, "secure-sum"):
            result["s of the sum"] = float(event.text.partition(" made in ")[2].partition(" s,")[0])
    return result


def print_over_grpc(devices: int) -> None:
    """Prints the figures of `grpc`."""
    with tempfile.TemporaryDirectory() as name:
        private = simulated("classstats_private", devices, Path(name))
        secure = simulated("classstats_secure", devices, Path(name))
    print(f"| {devices} devices over gRPC | classstats_private | classstats_secure | ratio |\n|---|---|---|---|")
    for what, value in secure.items():
        other = private.get(what)
        print(f"| {what} | {'' if other is None else f'{other:.1f}'} | {value:.1f} |", end=" ")
        print(f"{value / other:.1f} |" if other else "|", flush=True)


def main() -> int:
    """Prints a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["cost", "ring", "grpc"], nargs="?", default="cost")
    parser.add_argument("--devices", type=int, nargs="+")
    given = parser.parse_args()
    if given.what == "cost":
        print_costs(given.devices or (5, 10, 100, 1000))
    elif given.what == "ring":
        print_rings(given.devices or (1000, 10_000))
    else:
        for devices in given.devices or (100,):
            print_over_grpc(devices)
    return 0


if __name__ == "__main__":
    sys.exit(main())
