"""A server that names code and files in every string that it can send, and a device under an audit hook.

Runs in a process of its own: an audit hook cannot be removed. `main` prints one JSON object with what was seen.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
from fuzz.fields import Path as FieldPath
from fuzz.fields import paths
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message
from support.devices import compute_of
from support.hostile_server import LyingLink, terms
from support.open_device import open_device

from fleetdistill import COLUMNS
from fleetdistill.errors import FleetDistillError, RefusedError
from fleetdistill.knowledge import ProxySet
from fleetdistill.methods import METHODS
from fleetdistill.methods.base import Ask
from fleetdistill.wire import payload as wire
from fleetdistill.wire.codec import Payload, encode
from fleetdistill.wire.digests import digest
from fleetdistill.wire.v1 import knowledge_pb2, service_pb2

MARK = "server_named_this"
"""In every name that the server gives, so that the audit hook recognises its use."""
NAMES = (f"{MARK}:factory", f"../{MARK}.py")
SETTINGS: dict[str, dict[str, Any]] = {
    "classstats": {"features": "model", "dimensions": 0},
    "classstats_private": {"features": "model", "epsilon": 3.0},
    "classstats_secure": {"features": "model", "epsilon": 3.0},
    "classstats_summed": {"features": "model"},
    "dafkd": {"kd_samples": 4, "generator": "embedding_generator", "noise_dim": 3, "local_epochs": 1},
}
RECEIVED: dict[str, Message] = {
    "CheckInResponse": service_pb2.CheckInResponse(),
    "NextAskResponse": service_pb2.NextAskResponse(),
    "UploadStatusResponse": service_pb2.UploadStatusResponse(),
    "Receipt": service_pb2.Receipt(),
    "PayloadHeader": knowledge_pb2.PayloadHeader(),
}
"""Replies of the server with strings; those to heartbeats, declines and `Leave` have none."""

seen: list[str] = []


def watch() -> None:
    """Records every audit event with the mark: an import, an open file, compiled or executed code, a process."""

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        given = arguments[:2] if event == "import" else arguments  # the rest is sys.path and its like
        if any(MARK in repr(item) for item in given):
            seen.append(f"{event} {given!r}"[:300])

    sys.addaudithook(hook)


def fields(message: Message) -> list[FieldPath]:
    """Paths to all string fields of a message."""
    return [
        path for path in paths(cast(Descriptor, message.DESCRIPTOR)) if path[-1].type == FieldDescriptor.TYPE_STRING
    ]


def renamed(valid: Any, path: FieldPath, name: str) -> Any:
    """A copy of a message in which the strings at a path are a name; what is not there is added."""
    changed = type(valid).FromString(valid.SerializeToString())
    _rename(changed, path, name)
    return changed


def _rename(message: Any, path: FieldPath, name: str) -> None:
    field, rest = path[0], path[1:]
    value = getattr(message, field.name)
    if not rest and field.is_repeated:
        value[:] = [name] * max(len(value), 1)
    elif not rest:
        setattr(message, field.name, name)
    else:
        inner = list(value) or [value.add()] if field.is_repeated else [value]
        for item in inner:
            if not field.is_repeated:
                item.SetInParent()
            _rename(item, rest, name)


class NamingLink(LyingLink):
    """A server of one method whose messages of one type are changed at one field."""

    def __init__(
        self, method: str, first: Ask | None, type_name: str = "", path: FieldPath = (), name: str = ""
    ) -> None:
        super().__init__(terms=terms(method, SETTINGS.get(method)))
        self._type, self._path, self._name = type_name, path, name
        if method == "cdkt":
            self.terms.contract.proxy_digest, self.terms.contract.proxy_samples = self.holds(_proxy()), 6
        if first is not None:
            payload = self.holds(self._lying(encode(first.parts)))
            self.asks = [service_pb2.Ask(round=1, step_number=1, step=first.step, seed=1, payload=payload)]

    def _lying(self, payload: Payload) -> Payload:
        """A payload whose parts are changed, with the digest that they have then."""
        header = self._said(payload.header())
        data = wire.pieces(payload.source, 0, payload.data_bytes)
        return Payload(header.parts, payload.slots, payload.source, digest(header.parts, data))

    def _said(self, message: Any) -> Any:
        if type(message).__name__ != self._type:
            return message
        return renamed(message, self._path, self._name)

    def check_in(self, identity: Any, profile: Any) -> Any:
        return self._said(super().check_in(identity, profile))

    def next_ask(self, identity: Any, wait_seconds: float) -> Any:
        return self._said(super().next_ask(identity, wait_seconds))

    def upload_status(self, identity: Any, name: Any) -> Any:
        return self._said(super().upload_status(identity, name))

    def upload(self, header: Any, chunks: Iterator[Any]) -> Any:
        return self._said(super().upload(header, chunks))


def _proxy() -> Any:
    random = np.random.default_rng(0)
    inputs = random.random((6, 4)).astype(np.float32)
    return encode({"proxy": ProxySet(name="p", licence="none", inputs=inputs, labels=np.arange(6) % 3)})


def model() -> Any:
    import torch
    from torch import nn

    from fleetdistill.training.model import split_sequential

    torch.manual_seed(0)
    return split_sequential(nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 3)), 2)


def play(link: Any, folder: Path) -> str:
    """A device takes part until the server has no more asks; returns its events, and the error that ended it."""
    data = (np.random.default_rng(0).random((12, 4)).astype(np.float32), np.arange(12) % 3)
    heard: list[str] = []
    with tempfile.TemporaryDirectory(dir=folder) as state_dir:
        try:
            with open_device(
                server=link,
                model=model,
                data=data,
                state_dir=state_dir,
                allow=COLUMNS,
                export="never",
                on_event=lambda event: heard.append(event.kind),
            ) as device:
                for _ in range(3):
                    device.step(0)
        except FleetDistillError as error:
            heard.append(type(error).__name__)
    return " ".join(heard)


def first_ask(method: str, folder: Path) -> Ask:
    """The ask that the method itself takes for its first one."""
    data = (np.random.default_rng(0).random((12, 4)).astype(np.float32), np.arange(12) % 3)
    given: dict[str, Any] = {"model": model, "data": data, "allow": COLUMNS, "export": "never"}
    with (
        tempfile.TemporaryDirectory(dir=folder) as state_dir,
        open_device(server=NamingLink(method, None), state_dir=state_dir, **given) as device,
    ):
        result: Ask = compute_of(device).first_ask()
    return result


def cases(method: str, ask: Ask) -> Iterator[tuple[str, FieldPath, str]]:
    """Message, field and name of each lie; messages that are the same for all methods only with the first method."""
    for type_name in RECEIVED:
        for path in fields(RECEIVED[type_name]):
            own = "config" in {field.name for field in path} or type_name == "PayloadHeader"
            for name in NAMES if own or method == "feddkc" else ():
                yield type_name, path, name


def main(folder: Path, methods: Sequence[str] = tuple(METHODS)) -> None:
    """Plays every lie, and prints the events that used a name, the cases, and what became of the honest ones."""
    (folder / f"{MARK}.py").write_text("import pathlib\npathlib.Path(__file__).with_suffix('.ran').touch()\n")
    sys.path.insert(0, str(folder))
    asks = {method: first_ask(method, folder) for method in methods}
    honest = {method: play(NamingLink(method, asks[method]), folder) for method in methods}
    watch()
    played = 0
    for method in methods:
        for case in cases(method, asks[method]):
            play(NamingLink(method, asks[method], *case), folder)
            played += 1
        played += _settings(method, asks[method], folder)
    played += _refusals(asks["feddkc"], folder) if "feddkc" in asks else 0
    used, imported = list(seen), MARK in sys.modules
    print(json.dumps({"used": used, "imported": imported, "honest": honest, "played": played, "control": _control()}))


def _settings(method: str, ask: Ask, folder: Path) -> int:
    """Every setting of the contract that is a text, one after the other, names code."""
    entries = NamingLink(method, ask).terms.contract.config.entries
    texts = [number for number, entry in enumerate(entries) if entry.HasField("text")]
    for number in texts:
        for name in NAMES:
            link = NamingLink(method, ask)
            link.terms.contract.config.entries[number].text = name
            play(link, folder)
    return len(texts) * len(NAMES)


def _refusals(ask: Ask, folder: Path) -> int:
    """Refusals whose code, text and details name code."""

    class Refusing(NamingLink):
        def check_in(self, identity: Any, profile: Any) -> Any:
            raise RefusedError(NAMES[0], NAMES[0], {NAMES[0]: NAMES[1], "after_seconds": NAMES[0]})

    play(Refusing("feddkc", ask), folder)
    return 1


def _control() -> bool:
    """Whether the hook sees what an operator's path does: the same name, from local configuration, is imported."""
    from fleetdistill.models import build_model

    before = len(seen)
    try:
        build_model(NAMES[0])
    except FleetDistillError:
        return len(seen) > before and MARK in sys.modules
    return False
