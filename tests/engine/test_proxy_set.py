"""The proxy set as a thing of the platform: registered once, named by its digest, fetched once, cached and verified."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.devices import compute_of
from support.driving import DriveDevices
from support.fleets import Prepared, prepare
from support.wire_samples import make_contract, make_identity, make_profile

from fleetdistill.errors import ConfigurationError, DataError, RefusedError, RunError, WireError
from fleetdistill.knowledge import EMBEDDING, ProxyKnowledge, ProxySet
from fleetdistill.training.proxy_set import PART, proxy_data, proxy_of
from fleetdistill.wire.codec import decode, encode
from fleetdistill.wire.codes import Code
from fleetdistill.wire.v1 import contract_pb2, knowledge_pb2, service_pb2
from fleetdistill_lab.simulation.data.test_parts import proxy_rows
from fleetdistill_lab.simulation.spec.arrays import load_arrays
from fleetdistill_lab.simulation.spec.device import make_device
from fleetdistill_lab.simulation.spec.plan import RUN
from fleetdistill_lab.simulation.spec.settings import Simulation
from fleetdistill_server.config.run_config import RunConfig, run_config
from fleetdistill_server.engine.contract import build_method, register_proxy
from fleetdistill_server.engine.contract import make_contract as contract_of
from fleetdistill_server.engine.engine import Engine
from fleetdistill_server.intake.device_api import DeviceApi
from fleetdistill_server.intake.ingest import Ingest
from fleetdistill_server.intake.memory_link import MemoryLink
from fleetdistill_server.store.store import Store

CLASSES, SHAPE = 3, [2, 2]


def write(file: Path, rows: int = 6, **changes: Any) -> Path:
    inputs = np.random.default_rng(1).random((rows, *SHAPE), np.float32)
    np.savez(file, **{"inputs": inputs, "labels": np.arange(rows) % CLASSES, **changes})
    return file


def config(file: Path, method: str = "fedavg", **proxy: str) -> RunConfig:
    return run_config(
        {
            "run": {"name": "r", "method": method},
            "contract": {"classes": CLASSES, "input_shape": SHAPE},
            "proxy": {"data": str(file), "name": "p", "licence": "CC0-1.0", **proxy},
        }
    )


# --- registering


def test_a_registered_proxy_set_keeps_order_name_and_licence(tmp_path: Path) -> None:
    file = write(tmp_path / "p.npz")
    data, payload = register_proxy(config(file, name="ours", licence="CC-BY-4.0"))
    assert data is not None
    assert payload is not None
    (sent,) = decode(payload).values()
    assert isinstance(sent, ProxySet)
    with np.load(file) as arrays:
        np.testing.assert_array_equal(sent.inputs, arrays["inputs"])
        np.testing.assert_array_equal(sent.labels, arrays["labels"])
        np.testing.assert_array_equal(data.inputs.numpy(), arrays["inputs"])
    assert (sent.name, sent.licence, sent.labels.dtype) == ("ours", "CC-BY-4.0", np.int32)  # type: ignore[comparison-overlap]


def test_the_digest_is_a_version_of_everything(tmp_path: Path) -> None:
    def digest(**changes: Any) -> bytes:
        arrays = {name: changes.pop(name) for name in ("inputs", "labels") if name in changes}
        payload = register_proxy(config(write(tmp_path / "p.npz", **arrays), **changes))[1]
        assert payload is not None
        return payload.sha256

    inputs = np.random.default_rng(1).random((6, *SHAPE), np.float32)
    labels = np.arange(6) % CLASSES
    assert digest() == digest() == digest(inputs=inputs.astype(np.float64))
    others = [
        digest(name="q"),
        digest(licence="MIT"),
        digest(inputs=inputs[::-1], labels=labels[::-1]),
        digest(labels=labels[::-1]),
        digest(inputs=inputs + np.float32(1e-6)),
    ]
    assert len({digest(), *others}) == 6


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"rows": 0}, r"\[proxy\] data: proxy set 'p' is empty"),
        ({"labels": np.array([0, 1, 2, 3, 0, 1])}, "label 3 at row 3 is outside"),
        ({"labels": np.zeros(6)}, "labels are float64 of shape"),
        ({"labels": np.arange(5) % 3}, "6 inputs but 5 labels"),
        ({"inputs": np.zeros((6, 3), np.float32)}, r"inputs of shape \[3\], but the run has \[2, 2\]"),
        ({"inputs": np.full((6, 2, 2), np.nan, np.float32)}, "NaN or infinity, first at row 0"),
        ({"inputs": np.zeros((6, 2, 2), np.uint8)}, "inputs are uint8"),
    ],
)
def test_a_proxy_set_that_does_not_fit_the_run_is_refused(tmp_path: Path, changes: Any, sentence: str) -> None:
    with pytest.raises(ConfigurationError, match=sentence):
        register_proxy(config(write(tmp_path / "p.npz", **changes)))


def test_a_missing_or_damaged_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"\[proxy\] data: .*none\.npz' does not exist"):
        register_proxy(config(tmp_path / "none.npz"))
    (tmp_path / "bad.npz").write_bytes(b"PK\x03\x04 no zip")
    with pytest.raises(ConfigurationError, match=r"not an \.npz file; expected one with the arrays inputs and labels"):
        register_proxy(config(tmp_path / "bad.npz"))


@pytest.mark.parametrize("lacking", ["data", "name", "licence"])
def test_a_proxy_set_needs_data_name_and_licence(tmp_path: Path, lacking: str) -> None:
    with pytest.raises(ConfigurationError, match=rf"\[proxy\].*missing: {lacking}"):
        config(tmp_path / "p.npz", **{lacking: ""})


def test_a_class_without_a_sample_is_warned_of(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    register_proxy(config(write(tmp_path / "p.npz", labels=np.array([0, 0, 2, 2, 0, 2]))))
    assert "proxy set 'p' has no samples of classes 1" in caplog.text


def test_a_method_that_needs_one_is_refused_without() -> None:
    plain = run_config(
        {
            "run": {"name": "r", "method": "cdkt"},
            "contract": {"classes": 10, "input_shape": [1, 8, 8]},
            "model": {"device": "digits_mlp_small"},
        }
    )
    with pytest.raises(ConfigurationError, match=r"cdkt needs a labelled proxy set.*set \[proxy\] data in run.toml"):
        contract_of(plain, build_method(plain))


def test_a_run_without_a_proxy_set_is_described_as_before(tmp_path: Path) -> None:
    bare = run_config({"run": {"name": "r"}, "contract": {"classes": 3, "input_shape": [4]}})
    assert "proxy" not in bare.fixed_part()
    moved = [config(tmp_path / name).fixed_part() for name in ("here.npz", "there.npz")]
    assert moved[0] == moved[1]
    assert config(tmp_path / "p.npz", licence="MIT").fixed_part() != moved[0]


# --- a run with one


@pytest.fixture
def fleet(tmp_path: Path) -> Prepared:
    return prepare(
        Simulation(method="cdkt", devices=2, rounds=1, train_limit=200, test_limit=20, torch_device="cpu"),
        tmp_path / "work",
    )


class CountingLink(MemoryLink):
    """Notes what is downloaded."""

    def __init__(self, api: DeviceApi) -> None:
        super().__init__(api)
        self.wanted: list[bytes] = []

    def download(self, identity: service_pb2.Identity, sha256: bytes, first_byte: int) -> Any:
        self.wanted.append(sha256)
        return super().download(identity, sha256, first_byte)


class Stopped(Exception):
    pass


class Wait(DriveDevices):
    async def wait(self, seconds: float = 0.0) -> None:
        raise Stopped


@pytest.fixture
def opened(fleet: Prepared) -> Iterator[tuple[Store, DeviceApi, bytes]]:
    """A store whose run is prepared, and the digest of its proxy set."""
    store = Store.in_memory()
    Engine(store, fleet[0], Wait([], lambda: None)).prepare()
    api = DeviceApi(store)
    yield store, api, api.sessions.contract(RUN).proxy_digest
    store.close()


def test_the_contract_names_the_proxy_set_and_its_size(opened: tuple[Store, DeviceApi, bytes]) -> None:
    _, api, digest = opened
    contract = api.sessions.contract(RUN)
    assert (len(digest), contract.proxy_samples, contract.requirements.proxy_set) == (32, 80, True)


def test_a_device_fetches_it_once_caches_it_and_works_with_it(
    fleet: Prepared, opened: tuple[Store, DeviceApi, bytes]
) -> None:
    _, api, digest = opened
    spec = fleet[1][0]
    for expected in (1, 0, 0):  # a new device; the same one started again, twice
        link = CountingLink(api)
        with make_device(spec, link) as device:
            worker = compute_of(device)
            assert worker.has_payload(digest)
            proxy = worker.method.local.proxy
            assert proxy is not None
            assert len(proxy) == 80
            assert worker.method.local.proxy_digest == digest
        assert link.wanted.count(digest) == expected


@pytest.mark.parametrize("damage", [-1, 30], ids=["data", "header"])
def test_a_damaged_cache_is_noticed_and_fetched_anew(
    fleet: Prepared, opened: tuple[Store, DeviceApi, bytes], damage: int
) -> None:
    _, api, digest = opened
    spec = fleet[1][0]
    with make_device(spec, MemoryLink(api)) as device:
        assert device.model is not None
    file = Path(spec.state_dir) / "downloads" / f"{digest.hex()}.payload"
    content = bytearray(file.read_bytes())
    content[damage] ^= 1
    file.write_bytes(content)
    link = CountingLink(api)
    with make_device(spec, link) as device:
        assert device.model is not None
    assert link.wanted.count(digest) == 1


def test_only_a_device_of_the_run_may_fetch_it(opened: tuple[Store, DeviceApi, bytes]) -> None:
    _, api, digest = opened
    request = service_pb2.DownloadRequest(identity=make_identity("stranger", b"s" * 32, RUN), sha256=digest)
    with pytest.raises(RefusedError) as error:
        api.downloads.open(request)
    assert error.value.code == Code.BAD_IDENTITY


def test_an_empty_digest_names_nothing(opened: tuple[Store, DeviceApi, bytes]) -> None:
    _, api, digest = opened
    contract = api.sessions.contract(RUN)
    profile = make_profile(
        classes=10, features=[], proxy_digest=digest, knowledge_types=[contract.knowledge_type], model_name="m"
    )
    identity = make_identity("d", b"", RUN)
    identity.secret = api.check_in(service_pb2.CheckInRequest(identity=identity, profile=profile)).secret
    assert api.downloads.open(service_pb2.DownloadRequest(identity=identity, sha256=digest)).payload.sha256 == digest
    with pytest.raises(RefusedError) as error:
        api.downloads.open(service_pb2.DownloadRequest(identity=identity, sha256=b""))
    assert error.value.code == Code.NOT_FOUND


def test_a_device_that_knows_no_proxy_sets_is_refused(opened: tuple[Store, DeviceApi, bytes]) -> None:
    _, api, digest = opened
    profile = make_profile(classes=10, features=[], knowledge_types=[api.sessions.contract(RUN).knowledge_type])
    with pytest.raises(RefusedError, match=f"proxy set: the device has none, run 'simulation' has {digest.hex()[:12]}"):
        api.check_in(service_pb2.CheckInRequest(identity=make_identity("d", b"", RUN), profile=profile))


def test_run_restarted_with_other_proxy_set_is_refused(fleet: Prepared, opened: tuple[Store, DeviceApi, bytes]) -> None:
    store, _, digest = opened
    file = Path(fleet[0].proxy.data)
    with np.load(file) as arrays:
        inputs, labels = arrays["inputs"], arrays["labels"]
    Engine(store, fleet[0], Wait([], lambda: None)).prepare()  # the same one is fine
    np.savez(file, inputs=inputs[::-1], labels=labels[::-1])
    with pytest.raises(RunError, match=f"with a proxy set with digest {digest.hex()[:12]}, but the current file has"):
        Engine(store, fleet[0], Wait([], lambda: None)).prepare()


# --- what a device takes, and what ingest takes of it


def test_another_part_than_a_proxy_set_is_refused() -> None:
    with pytest.raises(WireError, match="part 'proxy' is NoneType, expected a ProxySet"):
        proxy_of({})


def test_a_proxy_set_of_another_shape_is_refused_by_the_device() -> None:
    sent = ProxySet(name="p", licence="l", inputs=np.zeros((2, 3), np.float32), labels=np.zeros(2, np.int32))
    with pytest.raises(DataError, match=r"has inputs of shape \[3\], but the run has \[4\]"):
        proxy_data(sent, [4], CLASSES)


def about_proxy(columns: tuple[str, ...], **changes: Any) -> contract_pb2.Contract:
    return make_contract(
        method="cdkt",
        proxy_digest=b"p" * 32,
        proxy_samples=5,
        features=[contract_pb2.NamedShape(name=EMBEDDING, shape=[4])],
        requirements=contract_pb2.Requirements(proxy_set=True, columns=columns),
        **changes,
    )


def take(sent: ProxyKnowledge, contract: contract_pb2.Contract) -> None:
    payload = encode({"knowledge": sent})
    Ingest("d1", payload.header(), contract, {"knowledge": "proxy_knowledge"})


GOOD = ProxyKnowledge(
    valid=True,
    proxy_digest=b"p" * 32,
    logits=np.zeros((5, CLASSES), np.float32),
    embeddings=np.zeros((5, 4), np.float32),
)
BOTH = ("features", "logits")


@pytest.mark.parametrize(
    ("columns", "sent"),
    [
        (BOTH, GOOD),
        (("logits",), replace(GOOD, embeddings=None)),
        (("features",), replace(GOOD, logits=None)),
        ((), replace(GOOD, valid=False, logits=None, embeddings=None)),
    ],
)
def test_knowledge_about_the_proxy_set_that_fits_is_taken(columns: tuple[str, ...], sent: ProxyKnowledge) -> None:
    take(sent, about_proxy(columns))


@pytest.mark.parametrize(
    ("columns", "changes", "sentence"),
    [
        (BOTH, {"logits": None}, "lacks logits, which cdkt needs"),
        (BOTH, {"embeddings": None}, "lacks embeddings, which cdkt needs"),
        (BOTH, {"valid": False}, "has valid = False, must be True"),
        (BOTH, {"proxy_digest": b"q" * 32}, "has the digest of another proxy set; expected the contract's"),
        (BOTH, {"logits": np.zeros((4, CLASSES), np.float32)}, r"logits has shape \[4, 3\], expected \[5, 3\]"),
        (BOTH, {"embeddings": np.zeros((5, 7), np.float32)}, r"embeddings has shape \[5, 7\], expected \[5, 4\]"),
        (("features",), {}, "tensor 'knowledge/logits' is not part of the contract"),
        (("logits",), {}, "tensor 'knowledge/embeddings' is not part of the contract"),
        ((), {"valid": False, "embeddings": None}, "tensor 'knowledge/logits' is not part of the contract"),
    ],
)
def test_knowledge_that_does_not_fit_proxy_set_is_refused(
    columns: tuple[str, ...], changes: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(RefusedError, match=sentence):
        take(replace(GOOD, **changes), about_proxy(columns))


def test_a_proxy_set_never_leaves_a_device() -> None:
    from fleetdistill.device.consent import check_may_leave

    sent = ProxySet(name="p", licence="l", inputs=np.zeros((1, 4), np.float32), labels=np.zeros(1, np.int32))
    with pytest.raises(ConfigurationError, match="is a ProxySet, which must never leave a device"):
        check_may_leave({PART: sent}, ("features", "labels", "logits"))
    assert knowledge_pb2.Part(proxy_set=knowledge_pb2.ProxySet(name="p")).WhichOneof("kind") == "proxy_set"


# --- simulation


@given(st.lists(st.integers(0, 3), min_size=8, max_size=60), st.integers(0, 4))
def test_proxy_rows_are_last_of_each_class_and_others_are_left(labels: list[int], per_class: int) -> None:
    y = np.array(labels)
    pools = [np.flatnonzero(y == label) for label in np.unique(y)]
    if per_class >= min(map(len, pools)):
        with pytest.raises(DataError, match="but the smallest class has"):
            proxy_rows(y, per_class)
        return
    taken, left = proxy_rows(y, per_class)
    assert sorted([*taken, *left]) == list(range(len(y)))
    for pool in pools:
        mine = np.intersect1d(pool, taken)
        assert len(mine) == per_class
        assert set(pool[len(pool) - per_class :]) == set(mine)


def test_devices_and_proxy_set_share_no_sample(fleet: Prepared) -> None:
    settings, specs, _ = fleet
    with np.load(settings.proxy.data) as arrays:
        proxy, labels = arrays["inputs"], arrays["labels"]
    assert np.bincount(labels).tolist() == [8] * 10
    rows = {image.tobytes() for image in proxy}
    own = [image.tobytes() for spec in specs for image in load_arrays(spec.data_file)[0]]
    assert len(own) == 200 - 80
    assert rows.isdisjoint(own)


def test_other_methods_hold_nothing_out_unless_asked_to(tmp_path: Path) -> None:
    for per_class, samples in ((None, 200), (4, 160)):
        wanted = Simulation(method="fedavg", devices=2, train_limit=200, proxy_per_class=per_class)
        settings, specs, _ = prepare(wanted, tmp_path / str(samples))
        assert sum(len(load_arrays(spec.data_file)[1]) for spec in specs) == samples
        assert settings.proxy.data == ""
