"""A device's steps of a secure sum, with and without PyTorch."""

from __future__ import annotations

import re
import struct
from collections.abc import Sequence

from fleetdistill.knowledge import PrivateRows, SecureMessage
from fleetdistill.methods.base import Answer, Ask
from fleetdistill.methods.classstats.exchange import DeviceStatistics, SentStatistics
from fleetdistill.methods.classstats_private.exchange import PrivateStatistics
from fleetdistill.methods.classstats_secure.config import MIN_IN_SUM, ClassStatsSummedConfig, SumSettings

KEYS, SHARES, INPUT, CHECK, UNMASK = "secure_keys", "secure_shares", "secure_input", "secure_check", "secure_unmask"
STEPS = (KEYS, SHARES, INPUT, CHECK, UNMASK)
"""Steps of a sum in their order; `secure_check` is only in sums with signed keys."""

_BLAMED = re.compile("what device '([^']+)' sent in this sum cannot be used: ")
_FEATURES_VERSION = "1"
"""Version of the public features; increased when the scattering or its whitening changes."""


def unusable(device: str, why: str) -> str:
    """Returns the reason with which a device declines a step if it cannot use another's keys or box."""
    return f"what device {device!r} sent in this sum cannot be used: {why}"


def blamed_in(reason: str) -> str:
    """Returns the device that `unusable` names in a reason to decline; empty if it is another reason."""
    found = _BLAMED.match(reason)
    return found[1] if found else ""


class MaskedStatistics(DeviceStatistics):
    """Statistics that leave the device only under a mask."""

    _config: SumSettings

    sending_steps = STEPS

    def first_ask(self) -> Ask:
        """Returns an ask for the keys of a sum of as few devices as the run allows."""
        config = self._config
        fewest = max(MIN_IN_SUM, config.min_in_sum)
        parameters = config.parameters_for(fewest, self._classes, self.rows.shape[1])
        session = SecureMessage(parameters=parameters.pack(), nonce=bytes(32))
        return Ask(round=1, step=KEYS, seed=0, parts={"session": session})

    def send(self, step: str) -> Answer:
        """Returns all rows in the first step, and nothing in the others, which the device answers from its session."""
        rows = PrivateRows(self.rows, self.labels, self._classes)
        return Answer(parts={"statistics": rows} if step == KEYS else {}, samples=len(self.labels))


class SecureStatistics(MaskedStatistics, PrivateStatistics):
    """Statistics to which the device adds its share of the sum's noise."""


class SummedStatistics(MaskedStatistics, SentStatistics):
    """Statistics without noise, limited to what `SentStatistics` sends."""

    _config: ClassStatsSummedConfig


def statistics_digest(
    classes: Sequence[str],
    input_shape: Sequence[int],
    settings: SumSettings,
    *,
    extractor: str = "",
    weights: bytes = b"",
    file: bytes = b"",
) -> bytes:
    """Returns the digest of what summed numbers mean, 32 bytes; devices with another one are in another sum.

    Args:
        classes: Names of the classes in label order.
        input_shape: Shape of one input.
        settings: The method's, all of them: a device whose rows count by other rules could be told from the others.
        extractor: Fingerprint of the run's extractor, hexadecimal; empty with scattering.
        weights: Digest of the extractor's weights; empty with scattering.
        file: Digest of the extractor as ONNX, for devices without PyTorch; empty for none.
    """
    from fleetdistill.methods import config_to_plan
    from fleetdistill.secure.primitives import sha256, tag
    from fleetdistill.wire.codec import encode

    texts = [_FEATURES_VERSION, extractor, *classes]
    encoded = b"".join(struct.pack("<I", len(text.encode())) + text.encode() for text in texts)
    shape = struct.pack(f"<I{len(input_shape)}I", len(input_shape), *input_shape)
    digests = b"".join(struct.pack("<I", len(one)) + one for one in (weights, file))
    return sha256(tag("contract"), shape, digests, encode({"settings": config_to_plan(settings)}).sha256, encoded)
