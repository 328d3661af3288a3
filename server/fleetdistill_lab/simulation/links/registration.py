"""Registers simulated devices at the server without making them.

One device of each kind checks in. What the others would report differs from it in their rows only, so they are entered
from its profile in one transaction. A device is made when a round first draws it; it then checks in itself, with the
profile that is registered.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from pathlib import Path

from fleetdistill.device.identity import save_identity
from fleetdistill.state.data_version import data_version
from fleetdistill.state.memory import MemoryStorage
from fleetdistill.state.saved_profile import save_profile
from fleetdistill.wire.v1 import contract_pb2, service_pb2
from fleetdistill_lab.simulation.spec.compute import Shared
from fleetdistill_lab.simulation.spec.device import DeviceSpec
from fleetdistill_server.intake.device_api import DeviceApi

Kind = tuple[str, str, str]
"""Model, predictor and attack: what a profile depends on besides the rows."""


class Registration:
    """Registers devices of one run.

    Args:
        api: The server's side of the device API.
        run: Name of the run.
        shared: What the devices of this process share, with their data.
        check_in: Makes a device and lets it check in.
    """

    def __init__(self, api: DeviceApi, run: str, shared: Shared, check_in: Callable[[DeviceSpec], object]) -> None:
        self._api = api
        self._run = run
        self._shared = shared
        self._check_in = check_in
        self._first: dict[Kind, DeviceSpec] = {}

    def register(self, specs: Sequence[DeviceSpec]) -> None:
        """Registers devices: the first one of each kind checks in, the others are entered in one transaction."""
        others = []
        for spec in specs:
            if _kind(spec) in self._first:
                others.append(spec)
            else:
                self._first[_kind(spec)] = spec
                self._check_in(spec)
        profiles = {kind: self._profile(first) for kind, first in self._first.items()}
        self._api.register(
            self._run,
            ((spec.name, self._secret(spec), self._profile_like(profiles[_kind(spec)], spec)) for spec in others),
        )

    def contents(self, spec: DeviceSpec) -> dict[str, bytes]:
        """Returns the state of a registered device that has not been made, by file name.

        It is that of a device that has checked in: its identity, and the profile that the server has.
        """
        state = MemoryStorage(Path(spec.state_dir))
        save_identity(state, service_pb2.Identity(run=self._run, device=spec.name, secret=self._secret(spec)))
        state.save_identity({"data_key": self._data_key(spec).hex()})
        save_profile(state, self._profile(spec))
        return state.contents

    def _profile(self, spec: DeviceSpec) -> contract_pb2.DeviceProfile:
        """Returns a registered device's profile from the store."""
        known = self._api.store.devices.get(self._run, spec.name)
        assert known is not None  # registered
        return contract_pb2.DeviceProfile.FromString(known.profile)

    def _profile_like(self, first: contract_pb2.DeviceProfile, spec: DeviceSpec) -> contract_pb2.DeviceProfile:
        """Returns the profile of a device of the kind whose first device has the profile `first`."""
        profile = contract_pb2.DeviceProfile()
        profile.CopyFrom(first)
        of_first = self._first[_kind(spec)]
        if first.samples == of_first.rows and first.data_version:  # else the run or an attack hides them
            profile.samples = spec.rows
        if first.data_version:
            profile.data_version = data_version(self._data_key(spec), self._shared.samples(spec.data_file).digest)
        return profile

    def _secret(self, spec: DeviceSpec) -> bytes:
        return _derive(spec, "secret")

    def _data_key(self, spec: DeviceSpec) -> bytes:
        return _derive(spec, "data key")


def _kind(spec: DeviceSpec) -> Kind:
    return spec.model, spec.predictor, spec.attack


def _derive(spec: DeviceSpec, purpose: str) -> bytes:
    """Returns 32 bytes that are the same after a resume; nobody is kept out of a simulation by them."""
    return hashlib.blake2b(f"{spec.seed} {purpose} {spec.name}".encode(), digest_size=32).digest()
