"""Whatever happens in a store, in any order: what is needed stays readable, and what is not goes in the end."""

from __future__ import annotations

import contextlib
import math
import time
from dataclasses import replace
from typing import Any
from unittest import mock

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from support.wire_samples import EXPECTS, make_contract, make_identity, make_payload, make_profile

from fleetdistill.errors import RefusedError, StoreError
from fleetdistill.state import failpoints
from fleetdistill.wire import payload as wire
from fleetdistill.wire.codes import Code
from fleetdistill.wire.v1 import service_pb2
from fleetdistill_server.intake.device_api import DeviceApi
from fleetdistill_server.store.records import Ask, Upload
from fleetdistill_server.store.retention import free_after_round, needed, prune, sweep
from fleetdistill_server.store.rollback import roll_back
from fleetdistill_server.store.store import Store

RUNS, DEVICES = ("r1", "r2"), ("d1", "d2")
# Few, so that asks, answers, rounds and runs share payloads.
PAYLOADS = [make_payload(rows) for rows in (1, 2, 3)]
digests = st.sampled_from([item.sha256 for item in PAYLOADS])
runs, devices, payloads = st.sampled_from(RUNS), st.sampled_from(DEVICES), st.sampled_from(PAYLOADS)


class Retention(RuleBasedStateMachine):
    """A server's life on a store in memory, whose payloads have no age: a sweep may strike at any moment."""

    @initialize(keep=st.integers(1, 2), states=st.integers(1, 3))
    def start(self, keep: int, states: int) -> None:
        self.store = Store.in_memory()
        self.api = DeviceApi(self.store)
        self.secrets: dict[tuple[str, str], bytes] = {}
        self.lost: set[bytes] = set()
        self.codes: list[str] = []
        for run in RUNS:
            self.store.runs.begin(run, {})
            self.store.runs.set_keep_rounds(run, keep)
            self.store.runs.set_keep_checkpoints(run, states)
            self.store.runs.publish_contract(run, make_contract(run=run).SerializeToString())
            self.store.runs.set_checkpoint(run, self.store.blobs.put_state(b"state of the start"))
            for device in DEVICES:
                request = service_pb2.CheckInRequest(identity=make_identity(device, run=run), profile=make_profile())
                self.secrets[run, device] = self.api.check_in(request).secret

    @rule(run=runs, payload=payloads)
    def ask_a_step(self, run: str, payload: Any) -> None:
        opened = self.store.runs.open_round(run)
        number = opened.number if opened else self.store.runs.start_round(run, DEVICES)
        steps = [item for item in range(1, 9) if not self.store.asks.of_step(run, number, item)]
        row: dict[str, Any] = {"run": run, "round": number, "step_number": steps[0] if steps else 8, "step": "train"}
        row |= {"expects": EXPECTS, "payload": payload.sha256, "payload_bytes": payload.data_bytes, "seed": 1}
        self.store.blobs.put(payload)
        self.store.asks.add([Ask(**row, device=device, deadline_at=time.time() + 600) for device in DEVICES])
        self.lost.discard(payload.sha256)

    @rule(run=runs, device=devices, payload=payloads, struck=st.booleans(), dies=st.booleans())
    def answer(self, run: str, device: str, payload: Any, struck: bool, dies: bool) -> None:
        """A whole upload; struck by a sweep between the payload's rename and the receipt's commit, it is sent again."""
        if self.store.asks.next_open(run, device) is None:
            self.ask_a_step(run, payload)
        ask = self.store.asks.next_open(run, device)
        if ask is None:
            return  # the round has as many steps as this test gives it
        commit = self.api.uploads._commit
        if struck:
            self.api.uploads._commit = self._sweep_first(commit, dies)
        for _ in range(3):
            try:
                self._upload(run, ask, payload)
                break
            except RefusedError as refusal:
                self.codes.append(refusal.code)
                self.api.uploads._commit = commit
        self.api.uploads._commit = commit
        assert self.store.asks.upload_of(ask.id) is not None
        assert set(self.codes) <= {Code.INCOMPLETE, Code.OUT_OF_STEP}
        self.lost.discard(payload.sha256)

    def _upload(self, run: str, ask: Ask, payload: Any) -> None:
        """Goes on where the server stands, as a device does."""
        identity = make_identity(ask.device, self.secrets[run, ask.device], run)
        name = service_pb2.UploadName(round=ask.round, step_number=ask.step_number, attempt=1)
        first = self.api.uploads.status(service_pb2.UploadStatusRequest(identity=identity, name=name)).next_byte
        header = service_pb2.UploadHeader(
            identity=identity, name=name, payload=payload.header(), samples=1, first_byte=first
        )
        session = self.api.uploads.begin(header)
        try:
            for chunk in wire.chunks(payload.source, payload.slots, first):
                session.feed(chunk)
            session.finish()
        finally:
            session.abandon()

    def _sweep_first(self, commit: Any, dies: bool) -> Any:
        def struck(job: Any) -> Any:
            self.a_sweep_dies() if dies else self.sweep()
            return commit(job)

        return struck

    @rule(run=runs, device=devices, payload=payloads)
    def an_upload_dies_on_its_way(self, run: str, device: str, payload: Any) -> None:
        ask = self.store.asks.next_open(run, device)
        if ask is not None:
            staging = self.store.blobs.stage(f"ask-{ask.id}-attempt-1", payload.parts)
            staging.append(payload.source.read(staging.length, 1))

    @rule(payload=payloads)
    def a_front_dies_between_rename_and_commit(self, payload: Any) -> None:
        self.store.blobs.put(payload)
        self.lost.discard(payload.sha256)

    @rule(run=runs, data=st.data())
    def close_the_round(self, run: str, data: st.DataObject) -> None:
        opened = self.store.runs.open_round(run)
        if opened is None:
            return
        number = opened.number
        if data.draw(st.booleans()):
            self.store.runs.close_short_round(run, number, "too few")
            return
        answered = [row.ask for row in self._acknowledged(run)]
        state = self.store.blobs.put_state(
            data.draw(st.sampled_from([b"one state", b"another", b"state of the start"]))
        )
        used = [ask for ask in answered if data.draw(st.booleans())]
        spent = self.store.runs.close_round(run, number, state, used, {})
        if data.draw(st.booleans()):  # or the engine dies before it
            free_after_round(self.store, run, spent)

    @rule(run=runs, data=st.data())
    def roll_back(self, run: str, data: st.DataObject) -> None:
        """The newest closed round is then an earlier one, whose payloads a prune may have deleted."""
        to = data.draw(st.sampled_from(self.store.runs.checkpoints(run)))
        done = roll_back(self.store, run, to.round)
        row = self.store.runs.existing(run)
        assert (row.checkpoint, row.completed_rounds) == (to.sha256, done.completed_rounds)
        counted = [item for item in self.store.runs.rounds(run) if item.status == "closed"]
        assert len(counted) == done.completed_rounds
        spoken = self.store.runs.payloads_between(run, 0, 1 << 40)
        self.lost |= {item for item in spoken if not self.store.blobs.has(item)}

    @rule(run=runs)
    def the_disk_damages_an_answer(self, run: str) -> None:
        for upload in self._acknowledged(run)[:1]:
            self.store.blobs.quarantine(upload.sha256)
            self.store.asks.withdraw_upload(upload.ask, "a flipped bit")
            self.lost.add(upload.sha256)

    @rule()
    def sweep(self) -> None:
        sweep(self.store, 0.0)

    @rule()
    def a_sweep_dies(self) -> None:
        """Between the first file and its commit."""
        with failpoints.switched_on("engine.gc.after-drop=error:EIO"), contextlib.suppress(OSError, StoreError):
            sweep(self.store, 0.0)

    @rule(run=runs, keep=st.integers(1, 3), dry_run=st.booleans())
    def prune(self, run: str, keep: int, dry_run: bool) -> None:
        prune(self.store, run, keep_rounds=keep, dry_run=dry_run)

    @rule(run=runs, asked=st.lists(payloads, max_size=2), keep=st.integers(1, 2), old=st.sets(digests))
    def prune_beside_a_server(self, run: str, asked: list[Any], keep: int, old: set[bytes]) -> None:
        """The server may be about to speak of what is young, so of that nothing goes."""
        for payload in asked:  # rounds that no engine has freed
            self.ask_a_step(run, payload)
            number = self.store.runs.open_number(run)
            assert number is not None
            self.store.runs.close_round(run, number, self.store.blobs.put_state(b"one state"), [], {})
        held = self.store.blobs.held()
        aged = [replace(item, age_seconds=math.inf if item.sha256 in old else 0.0) for item in held]
        ages = {item.sha256: item.age_seconds for item in aged}
        patched = mock.patch.multiple(self.store.blobs, held=lambda: aged, age_seconds=ages.__getitem__)
        with patched:
            prune(self.store, run, keep_rounds=keep, served=True)
        gone = {item.sha256 for item in held} - {item.sha256 for item in self.store.blobs.held()}
        assert gone <= old

    @precondition(lambda self: hasattr(self, "store"))
    @invariant()
    def what_is_needed_is_readable(self) -> None:
        for run in RUNS:
            self.store.blobs.get_state(self.store.runs.existing(run).checkpoint)
            for kept in self.store.runs.checkpoints(run):
                self.store.blobs.get_state(kept.sha256)
            wanted = {row.sha256 for row in self._acknowledged(run)}
            opened = self.store.runs.open_round(run)
            if opened is not None:
                asks = [item for step in range(1, 9) for item in self.store.asks.of_step(run, opened.number, step)]
                wanted |= {ask.payload for ask in asks if ask.payload}
            newest = [item.number for item in self.store.runs.rounds(run) if item.status == "closed"][-1:]
            newest = [
                item for item in newest if item >= self.store.runs.first_kept_round(run)
            ]  # a prune released others
            wanted |= {row.sha256 for row in self.store.asks.uploads(run) if row.round in newest and _counts(row)}
            for sha256 in wanted - self.lost:
                self.store.blobs.open(sha256, verify=True)

    def _acknowledged(self, run: str) -> list[Upload]:
        return [row for row in self.store.asks.uploads(run) if row.status == "acknowledged"]

    def teardown(self) -> None:
        """In the end nothing is left but what is needed."""
        if not hasattr(self, "store"):
            return
        sweep(self.store, 0.0)
        kept = needed(self.store)
        assert all(item.sha256 in kept for item in self.store.blobs.held())
        open_asks = self.store.asks.open_ids()
        assert all(int(item.key.split("-")[1]) in open_asks for item in self.store.blobs.staging())
        self.store.close()


def _counts(row: Upload) -> bool:
    return row.quarantined_at is None


TestRetention = pytest.mark.long(pytest.mark.slow(Retention.TestCase))
TestRetention.settings = settings(max_examples=50, stateful_step_count=30)
