"""Server half of class statistics by secure sums: it learns the sum of devices' statistics, not one device's.

docs/reference/methods/classstats_secure.md describes the sum and who has to be trusted for what. Not yet reviewed by a
cryptographer.
"""

from __future__ import annotations

import math
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch

from fleetdistill.errors import QuorumNotReached, SecureSumError
from fleetdistill.knowledge import ClassSums, Kind, SecureMessage
from fleetdistill.knowledge.secure import (
    BOX_BYTES,
    KEYS_BYTES,
    MAX_KEYS_BYTES,
    SHARE_BYTES,
    SIGNATURE_BYTES,
    SIGNED_KEYS_BYTES,
)
from fleetdistill.methods.classstats_private.sums import RowSums
from fleetdistill.methods.classstats_secure.config import CERTIFICATES, MIN_IN_SUM, ROSTER, UNSIGNED, SumSettings
from fleetdistill.methods.classstats_secure.encoding import decode, moments_of_sums
from fleetdistill.methods.classstats_secure.exchange import CHECK, INPUT, KEYS, SHARES, UNMASK, statistics_digest
from fleetdistill.methods.classstats_secure.noise import local_variances, noise_bound
from fleetdistill.secure.primitives import lift
from fleetdistill.secure.session import PRIVATE, Parameters
from fleetdistill.training.model import fingerprint
from fleetdistill.wire.codec import encode
from fleetdistill_server.event_kinds import SECURE_SUM, SECURE_SUM_FAILED
from fleetdistill_server.figures import SECURE_SUMS, SumFigures
from fleetdistill_server.methods.base import Needs
from fleetdistill_server.methods.classstats.merge import Merged, MergeRules
from fleetdistill_server.methods.classstats.server import ClassStatsServer
from fleetdistill_server.methods.cohort import Cohort, DeviceAnswer, Notes, PayloadFor
from fleetdistill_server.methods.secure.secure_sum import SecureSum, SumSession
from fleetdistill_server.methods.traffic import Exchange, Sizes
from fleetdistill_server.texts import UNREVIEWED, counted

DEVICES_IN_TABLE = 10
"""Devices of a sum for which tables show bytes."""
CERTIFICATE_IN_TABLE = 400
"""Bytes of a device's certificate for which tables show bytes."""
_WHY = "The events late and declined of this round say why"
_KEYS = {
    UNSIGNED: SecureMessage.schema("keys", (KEYS_BYTES,)),
    CERTIFICATES: SecureMessage.schema("keys", (SIGNED_KEYS_BYTES + CERTIFICATE_IN_TABLE,), most=MAX_KEYS_BYTES),
    ROSTER: SecureMessage.schema("keys", (SIGNED_KEYS_BYTES,)),
}


class SumServer(ClassStatsServer):
    """Stores the sums, and the class space of their merge. A sum is one part of the merge."""

    keeps_short_rounds = True  # a sum that is made cannot be made again over other devices
    config: SumSettings
    kind: ClassVar[type[Kind]] = ClassSums
    after_forgetting: ClassVar[str]
    """What becomes of the other devices of a forgotten sum."""

    def __init__(self, config: SumSettings, context: Any) -> None:
        super().__init__(config, context)
        self._members: dict[str, str] = {}  # the sum that contains a device
        self._made: dict[str, Parameters] = {}  # the sums of this round
        self._blamed: set[str] = set()  # devices that the next sum leaves out

    # --- declarations

    @classmethod
    def needs(cls, config: Any) -> Needs:
        """Requires the devices of a first sum, and a common extractor if the run names one."""
        return replace(super().needs(config), min_devices=config.min_devices)

    @classmethod
    def exchanges(cls, config: Any, sizes: Sizes) -> Sequence[Exchange]:
        """Returns the five asks of a sum of ten devices, and the lesson."""
        *_, learn = super().exchanges(config, sizes)
        devices = DEVICES_IN_TABLE
        block = config.parameters_for(config.max_in_sum, sizes.classes, cls.dimensions(config, sizes))
        most = block.degree + 1 if block.degree else block.most
        numbers = (block.numbers * block.width,)
        schema = SecureMessage.schema
        check = Exchange(step=CHECK, up={"signature": schema("signature", (SIGNATURE_BYTES,))}, end=1)
        boxes = schema("boxes", (devices - 1, BOX_BYTES), most=most)
        return [
            Exchange(step=KEYS, up={"keys": _KEYS[config.keys]}, end=1),
            Exchange(step=SHARES, up={"boxes": boxes}, end=1),
            Exchange(
                step=INPUT,
                down={"session": boxes},
                up={"numbers": schema("numbers", numbers, features=sizes.cuts)},
                end=1,
            ),
            *([check] if config.signs_keys else []),
            Exchange(step=UNMASK, up={"shares": schema("shares", (devices, SHARE_BYTES), most=most)}, end=1),
            learn,
        ]

    # --- rounds

    async def round(self, cohort: Cohort) -> None:
        """Sums what is new, and sends the class space; what a short round leaves are its sums only."""
        deliveries = self.deliveries.state_dict()
        try:
            await super().round(cohort)
        except QuorumNotReached:
            self.deliveries.load_state_dict(deliveries)
            raise

    async def _collect_statistics(self, cohort: Cohort, asked: Sequence[str]) -> None:
        """Makes sums of the devices that are in none yet, if they are enough; the others wait for company.

        If none of the first sums is made, the round is short; later, the other devices get the class space without it.
        """
        self._made = {}
        lacking = [device for device in asked if device not in self._members and self.deliveries.is_askable(device)]
        failure, is_new = None, False
        groups = self._groups(self._without_blamed(lacking, cohort), cohort)
        for number, group in enumerate(groups):
            needed = self._needed(len(group))
            which = f" of group {number + 1}" if len(groups) > 1 else ""
            try:
                if len(group) < needed:
                    raise QuorumNotReached(KEYS, len(group), needed)
                await self._sum(cohort, group, number, which)
                is_new = True
            except (QuorumNotReached, SecureSumError) as error:
                failure = error if isinstance(error, QuorumNotReached) else QuorumNotReached(UNMASK, 0, needed)
                spent = sum(name not in self._parts for name in self._members.values())
                if len(group) < needed and (spent or (group and self._parts)):
                    text = f"{counted(len(group), 'new device')} must wait for a sum of at least {needed}"
                    lost = f"; {counted(spent, 'device')} more can be in no further sum of this run" if spent else ""
                    cohort.event("waiting-for-batch", f"{text}{lost} {UNREVIEWED}", once=True)
                elif group:
                    text = f"no sum of {len(group)} devices{which}: {error}"
                    text += "; nothing of them is known" if isinstance(error, QuorumNotReached) else ""
                    text += f"; {counted(spent, 'device')} can be in no further sum of this run" if spent else ""
                    cohort.event(SECURE_SUM_FAILED, f"{text}. {_WHY} {UNREVIEWED}")
        if failure is not None and not self._parts:
            raise failure
        if is_new:
            self.merge_parts(cohort)
            self.check_merge()

    def _without_blamed(self, devices: Sequence[str], cohort: Cohort) -> list[str]:
        """Returns the devices without those whose keys or boxes another one could not use, once for each such sum.

        The server cannot tell whether the sender lies or the device that blames it.
        """
        others = [device for device in devices if device not in self._blamed]
        if others:
            for device in sorted(self._blamed.intersection(devices)):
                text = f"another device could not use what {device} sent in the last sum, and this one is without it"
                cohort.event("wrong-share", f"{text} {UNREVIEWED}", device)
            self._blamed = set()
        return others

    def _groups(self, devices: Sequence[str], cohort: Cohort) -> list[list[str]]:
        """Returns the devices in random groups that are large enough for sums; in one if they are too few for more."""
        count = max(1, min(self.config.groups, len(devices) // max(MIN_IN_SUM, self.config.min_in_sum)))
        order = torch.randperm(len(devices), generator=cohort.generator("groups of secure sums")).tolist()
        drawn = [devices[index] for index in (order if count > 1 else range(len(devices)))]
        return [sorted(drawn[group::count][: self.config.max_in_sum]) for group in range(count)]

    def _needed(self, asked: int) -> int:
        return max(MIN_IN_SUM, self.config.fewest(asked))

    async def _sum(self, cohort: Cohort, devices: Sequence[str], number: int, which: str) -> None:
        """Makes a round's sum of these devices; `which` tells events of several sums apart.

        Raises:
            QuorumNotReached, SecureSumError: There is no sum.
        """
        parameters = self.config.parameters_for(len(devices), self.context.classes, self.fixed.dimensions)
        nonce = torch.randint(256, (32,), generator=cohort.generator(f"secure sum {number}"), dtype=torch.uint8)

        def ask(step: str, payload: PayloadFor, *, to: Sequence[str]) -> AsyncIterator[DeviceAnswer]:
            return self.deliveries.ask(cohort, step, payload, to=to, quorum=0.0)

        session = SumSession(
            cohort,
            ask,
            parameters,
            run=self.context.run,
            digest=self._digest(),
            nonce=bytes(nonce.tolist()),
            roster_key=bytes.fromhex(self.config.roster_key),
            authorities=self._authorities(),
        )
        try:
            result = await session.sum(devices)
            self._take(result, session.figures(), parameters, cohort, which)
        except (QuorumNotReached, SecureSumError) as error:
            spent = sorted(session.spent)
            self._members |= dict.fromkeys(spent, f"sum {session.sid.hex()[:16]}")
            self._free(spent)
            cohort.report(SECURE_SUMS, {str(number + 1): asdict(session.figures(error))})
            raise
        finally:
            self._blamed |= session.blamed
        cohort.report(SECURE_SUMS, {str(number + 1): asdict(session.figures())})

    def _take(self, result: SecureSum, made: SumFigures, parameters: Parameters, notes: Notes, which: str) -> None:
        """Adds a sum to the parts of the merge. Raises SecureSumError if it cannot be one."""
        for device in result.wrong_shares:
            text = f"{device} gave a wrong share of a secret; the sum is right without it {UNREVIEWED}"
            notes.event("wrong-share", text, device)
        sums = decode(lift(result.total, parameters.width), parameters)
        if reason := why_implausible(sums, parameters):
            text = (
                f"{reason}; the sum is thrown away, and with it {len(result.devices)} devices, {self.after_forgetting}"
            )
            notes.event("implausible-sum", f"{text} {UNREVIEWED}")
            raise SecureSumError(reason)
        devices, name = len(result.devices), f"sum {result.sid.hex()[:16]}"
        self._parts[name], self._made[name] = (self.part_of(sums, parameters, devices), ""), parameters
        self._members |= dict.fromkeys(result.devices, name)
        text = f"the sum of {devices} devices{which} is made in {made.seconds:.1f} s, without knowing one device's part"
        text += f"; {made.shares} of them gave shares, {made.threshold} were needed"
        lost = f"; dropped out: {made.dropped_text}" if made.dropped else ""
        notes.event(SECURE_SUM, f"{text}{lost} {UNREVIEWED}")

    def _authorities(self) -> bytes:
        """Returns the accepted CAs' certificates of now, if the devices' certificates vouch for their keys."""
        file = self.context.authorities_file
        return Path(file).read_bytes() if self.config.keys == CERTIFICATES and file else b""

    def _digest(self) -> bytes:
        initial = self.initial()
        return statistics_digest(
            self.context.class_names,
            self.context.input_shape,
            self.config,
            extractor="" if self._given is None else fingerprint(self.context.extractor()),
            weights=b"" if initial is None else encode({"initial": initial}).sha256,
            file=self.extractor_digest,
        )

    # --- the merge

    def part_of(self, sums: RowSums, parameters: Parameters, devices: int) -> ClassSums:
        """Returns the part of the merge that is the sum of so many devices."""
        raise NotImplementedError

    def merged(self, parts: Mapping[str, Any], rules: MergeRules, notes: Notes) -> Merged:
        """Merges the sums; all devices of a sum are counted or none."""
        moments, counted, left_out = self.merged_sums(parts, rules, _OfSums(notes))
        labels = {device: counted[name] for device, name in self._members.items() if name in counted}
        return moments, labels, left_out

    def merged_sums(self, parts: Mapping[str, Any], rules: MergeRules, notes: Notes) -> Merged:
        """Returns the merge of the sums, and the classes of each sum in it."""
        raise NotImplementedError

    def _left_out_of(self, device: str) -> tuple[int, ...]:
        known = self._counted.get(device)
        return () if known is None else tuple(sorted(set(range(self.context.classes)) - set(known)))

    def _lacks_statistics(self, device: str, version: str) -> bool:
        return device not in self._members

    def is_due(self, present: Mapping[str, str]) -> bool:
        """Returns whether a present device lacks the class space, or devices that are in no sum are enough for one."""
        here = [device for device in present if not self.deliveries.is_unresponsive(device)]
        new = sum(device not in self._members for device in here)
        lacks = self._space is not None and any(self.deliveries.lacks(device, self.merge_name) for device in here)
        return lacks or new >= self._needed(new)

    def forget(self, device: str, notes: Notes) -> None:
        """Removes the whole sum that contains the device: a server that knows no part cannot subtract one."""
        self.deliveries.forget(device)
        self._blamed.discard(device)
        name = self._members.pop(device, None)
        if name is None or name not in self._parts:  # in no sum, or in one that was forgotten before
            return
        others = sorted(other for other, member in self._members.items() if member == name)
        self._free(others)
        del self._parts[name]
        text = f"the sum with {device} is removed, and with it {len(others)} other devices, {self.after_forgetting}"
        notes.event("batch-forgotten", f"{text} {UNREVIEWED}", device)
        self.merge_parts(notes)

    def _free(self, devices: Sequence[str]) -> None:
        """Lets the devices of a forgotten sum be summed again."""
        for device in devices:
            del self._members[device]

    # --- state

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "members": dict(self._members), "blamed": sorted(self._blamed)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        self._members, self._blamed = dict(state["members"]), set(state.get("blamed", ()))


class _OfSums:
    """Notes of a merge whose parts are sums: no event of it is one device's."""

    def __init__(self, notes: Notes) -> None:
        self._notes = notes
        self.guard, self.report, self.generator = notes.guard, notes.report, notes.generator

    def event(self, kind: str, text: str, device: str = "", *, once: bool = False) -> None:
        self._notes.event(kind, text, once=once)


def why_implausible(sums: RowSums, parameters: Parameters) -> str | None:
    """Returns why a sum cannot be one of honest devices, or None. It cannot be said whose fault it is.

    Counts and the second moment's diagonal must be those of rows within the clip, and the covariance positive; with
    noise, up to what the noise exceeds with probability 2^-40.

    Args:
        sums: The decoded sum.
        parameters: Of the session.
    """
    noise, grid = local_variances(parameters), parameters.grid_bits
    of_counts = float(parameters.most * noise.counts / 4**parameters.count_bits)
    of_diagonal = float(parameters.most * noise.diagonal / 16**grid)
    count_bound, diagonal_bound = noise_bound(of_counts, parameters), noise_bound(of_diagonal, parameters)
    diagonal_d = np.diagonal(sums.second_moment)
    if sums.counts.min() < -count_bound or sums.counts.max() > 2**parameters.row_bits + count_bound:
        return f"a class has {sums.counts[np.abs(sums.counts).argmax()]:.0f} rows, of 2^{parameters.row_bits} at most"
    if diagonal_d.min() < -diagonal_bound:
        return f"a second moment is negative, {diagonal_d.min():.4g}"
    rows, total = float(sums.counts.sum()), float(diagonal_d.sum())
    if parameters.mode == PRIVATE:
        spread = parameters.dimensions * of_diagonal + parameters.classes * of_counts
        largest = rows + noise_bound(spread, parameters)
    else:
        largest = 4.0**parameters.clip_bits * parameters.dimensions * rows
    if total > largest:
        return f"the rows have squared lengths of {total:.4g} together, {rows:.0f} rows at most {largest:.4g}"
    if parameters.mode != PRIVATE:
        smallest = float(np.linalg.eigvalsh(moments_of_sums(sums).covariance)[0])
        if smallest < -parameters.dimensions * 2.0**-grid or math.isnan(smallest):
            return f"the covariance has the eigenvalue {smallest:.4g}, which is negative beyond rounding"
    return None
