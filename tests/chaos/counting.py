"""A method without torch that counts: every answer says whose it is, and the server's state says what it has used.

So the store's word on what a round used can be held against what the method really had in hand. An answer is drawn
anew each time (`count` and random filling), hence an answer that is computed twice has two digests, and every digest is
used at most once in an honest run.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from fleetdistill import methods as device_methods
from fleetdistill.compute import Compute, Computed
from fleetdistill.knowledge import Kind, Plan, SampleKnowledge
from fleetdistill.methods.base import Answer, Ask, DeviceMethod, answers
from fleetdistill.methods.local import LocalTraining
from fleetdistill.replacement import Replacement
from fleetdistill.wire.codec import encode
from fleetdistill.wire.digests import Algorithm, has_blake3
from fleetdistill.wire.v1 import contract_pb2, service_pb2, tensor_pb2

NAME = "counting"
BALLAST = "ballast"
WIDTH = 1024
"""float32 numbers of one row of ballast: 4 KiB."""
_SMALL_ROWS = (1, 8)
_LARGE_ROWS = (300, 700)  # 1.2 to 2.8 MiB: two or three chunks


@dataclass(frozen=True, kw_only=True)
class CountingConfig(LocalTraining):
    """Settings of the counting method.

    Attributes:
        steps: Asks of one round.
        large_share: Part of the answers that has several chunks.
        ballast_bytes: What comes with every second ask, to be fetched.
    """

    steps: int = 2
    large_share: float = 0.1
    ballast_bytes: int = 4096


class CountingDevice(DeviceMethod):
    """Device half: answers with ballast of a size that the ask's seed decides.

    Its state is how many of its answers have a receipt; an answer's weight is its place among them, from 1.
    """

    def __init__(self, config: Any, local: Any = None) -> None:
        super().__init__(config, local)
        self.count = 0

    @classmethod
    def metrics_steps(cls, config: Any) -> Sequence[str]:
        return ()

    @answers("count")
    def answer_count(self, ask: Ask) -> Answer:
        rng = np.random.default_rng(ask.seed)
        large = rng.random() < self.config.large_share
        rows = int(rng.integers(*(_LARGE_ROWS if large else _SMALL_ROWS)))
        ids = np.arange(rows, dtype=np.int64)
        ids[0] = (self.count << 32) + secrets.randbits(31)
        ids[1:] += 1 << 62  # apart from the first in any case
        filling = np.frombuffer(secrets.token_bytes(rows * WIDTH), np.uint8).astype(np.float32)
        ballast = filling.reshape(rows, WIDTH)
        self.count += 1
        return Answer(parts={"count": SampleKnowledge(sample_ids=ids, features={BALLAST: ballast})}, samples=self.count)


class CountingWorker(Compute):
    """Computes for a device without torch."""

    def __init__(self, contract: contract_pb2.Contract) -> None:
        super().__init__(contract)
        config = device_methods.config_from_plan(contract.method, Plan.read(contract.config))
        self._method: Any = device_methods.device_class(contract.method)(config, None)  # type: ignore[arg-type]

    def profile(self, allow: Sequence[str]) -> contract_pb2.DeviceProfile:
        return contract_pb2.DeviceProfile(
            model_name="none",
            samples=1_000_000,  # an answer's weight is its place in the count, and no answer has more than are declared
            classes=len(self.contract.classes),
            input_shape=self.contract.input_shape,
            features=[contract_pb2.NamedShape(name=BALLAST, shape=[WIDTH])],
            knowledge_types=[tensor_pb2.ELEMENT_TYPE_FLOAT32],
            allowed_columns=sorted(allow),
            sdk_version="chaos",
        )

    def state(self) -> bytes:
        return json.dumps({"count": self._method.count}).encode()

    def restore(self, saved: bytes, delivered: bytes | None) -> None:
        self._method.count = json.loads(saved)["count"]
        self.has_state = True

    def answer(self, ask: service_pb2.Ask, parts: Mapping[str, Kind], allow: Sequence[str]) -> Computed:
        answer = self._method.handle(Ask(round=ask.round, step=ask.step, seed=ask.seed, parts=parts))
        return Computed(answer, self.state(), Replacement(replaced=True), self.state())

    def delivered_state(self) -> bytes:
        return self.state()


def register() -> None:
    """Adds the device half to this process; `counting_server.register` adds both."""
    device_methods.register(NAME, CountingConfig, CountingDevice)


def digest_of(parts: Mapping[str, Kind]) -> str:
    """What the upload of these parts is called on the wire, computed anew from what was read."""
    algorithm = Algorithm.BLAKE3 if has_blake3() else Algorithm.SHA256  # as device and front agree
    return encode(parts, np.dtype(np.float32), algorithm).digest.hex()
