"""What a link counts for the bytes of a day."""

from __future__ import annotations

from support.hostile_server import LyingLink, terms

from fleetdistill.device.permission import MeteredLink
from fleetdistill.wire.v1 import contract_pb2, service_pb2

IDENTITY = service_pb2.Identity(run="digits", device="d1")


def test_a_check_in_counts_identity_profile_and_reply() -> None:
    counted: list[int] = []
    profile = contract_pb2.DeviceProfile(model_name="m" * 100)
    MeteredLink(LyingLink(), counted.append).check_in(IDENTITY, profile)
    assert sum(counted) == IDENTITY.ByteSize() + profile.ByteSize() + terms().ByteSize()
