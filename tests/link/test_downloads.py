"""Downloads into files: resumed by a later process, verified as a whole, never fetched twice, bounded."""

from __future__ import annotations

import errno
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import google_crc32c
import pytest
from platforms.other_system import windows_files
from support.wire_samples import data_of, in_pieces, make_knowledge, make_payload, with_blake3

from fleetdistill.errors import LinkError, NoRoomError, PayloadTooLargeError, RefusedError, WireError
from fleetdistill.link import downloads as transfer
from fleetdistill.link.downloads import Downloads, download
from fleetdistill.wire import digests
from fleetdistill.wire.codec import Payload, decode, encode
from fleetdistill.wire.codes import AFTER_SECONDS, Code
from fleetdistill.wire.v1 import knowledge_pb2, service_pb2

IDENTITY = service_pb2.Identity(run="digits", device="d1")
PIECE = 64
ROOM = 1 << 20


class Server:
    """The download call of a link: gives payloads in small chunks, and breaks off after some of them if told to."""

    def __init__(self, *payloads: Payload) -> None:
        self.payloads = {payload.sha256: payload for payload in payloads}
        self.first_bytes: list[int] = []
        self.break_after: list[int] = []
        self.spoil: Callable[[knowledge_pb2.Chunk], None] = lambda chunk: None
        self.sent = 0

    def download(self, identity: Any, sha256: bytes, first_byte: int) -> Any:
        if sha256 not in self.payloads:
            raise RefusedError("not-found", "no such payload")
        self.first_bytes.append(first_byte)
        payload = self.payloads[sha256]
        return payload.header(), self._chunks(
            payload, first_byte, self.break_after.pop(0) if self.break_after else None
        )

    def _chunks(self, payload: Payload, first: int, limit: int | None) -> Iterator[knowledge_pb2.Chunk]:
        place = 0
        for chunk in in_pieces(payload, PIECE):
            start = chunk.offset
            if start + len(chunk.data) <= first:
                continue
            cut = max(first - start, 0)
            chunk = knowledge_pb2.Chunk(offset=chunk.offset + cut, data=chunk.data[cut:])
            chunk.crc32c = google_crc32c.value(chunk.data)
            if limit is not None and place == limit:
                raise LinkError("the connection broke")
            self.spoil(chunk)
            place += 1
            self.sent += len(chunk.data)
            yield chunk


@pytest.fixture(params=["linux", "windows"], autouse=True)
def system(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "windows":
        windows_files(monkeypatch)


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfer, "PAUSE_SECONDS", 0.0)


def fetch(folder: Path, server: Server, payload: Payload, **changes: Any) -> Payload:
    """What a process that has just started fetches."""
    return Downloads(folder, changes.pop("max_bytes", ROOM)).fetch(server, IDENTITY, payload.sha256, **changes)  # type: ignore[arg-type]


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def same(one: Payload, other: Payload) -> bool:
    return (one.header(), data_of(one)) == (other.header(), data_of(other))


def break_for_good(folder: Path, server: Server, payload: Payload, after: int) -> None:
    """A process that gets so many chunks and then never reaches the server again."""
    server.break_after = [after, *([0] * (transfer.ATTEMPTS - 1))]
    with pytest.raises(LinkError):
        fetch(folder, server, payload)
    server.first_bytes.clear()


def test_a_download_is_whole_mapped_and_read_only(tmp_path: Path) -> None:
    payload = make_payload(50)
    result = fetch(tmp_path / "new", Server(payload), payload)
    assert same(result, payload)
    assert names(tmp_path / "new") == [f"{payload.sha256.hex()}.payload"]
    (knowledge,) = decode(result).values()
    assert not knowledge.logits.flags.writeable  # type: ignore[attr-defined]


def test_a_payload_without_data_is_a_download_too(tmp_path: Path) -> None:
    payload = make_payload(0)
    assert same(fetch(tmp_path, Server(payload), payload), payload)
    assert same(fetch(tmp_path, Server(), payload), payload)


def test_a_broken_download_goes_on_within_the_process(tmp_path: Path) -> None:
    payload, server = make_payload(50), Server(make_payload(50))
    server.break_after = [5, 3]
    assert same(fetch(tmp_path, server, payload), payload)
    assert len(server.first_bytes) == 3
    assert server.first_bytes == sorted(set(server.first_bytes))
    assert server.sent == payload.data_bytes, "nothing came twice"


def test_a_later_process_goes_on_where_the_last_one_stopped(tmp_path: Path) -> None:
    payload, server = make_payload(50), Server(make_payload(50))
    break_for_good(tmp_path, server, payload, after=7)
    assert names(tmp_path) == [f"{payload.sha256.hex()}.part"]
    assert same(fetch(tmp_path, server, payload), payload)
    (first,) = server.first_bytes
    assert first >= 7 * PIECE // 2
    assert server.sent == payload.data_bytes, "nothing came twice"


@pytest.mark.parametrize("cut", [0, 1, 7, 8, 9, 60, -1, -PIECE])
def test_part_cut_off_anywhere_by_crash_is_resumed_or_restarted(tmp_path: Path, cut: int) -> None:
    payload, server = make_payload(50), Server(make_payload(50))
    break_for_good(tmp_path, server, payload, after=7)
    (part,) = tmp_path.iterdir()
    part.write_bytes(part.read_bytes()[:cut])
    assert same(fetch(tmp_path, server, payload), payload)


def test_a_damaged_part_is_found_at_the_end_and_thrown_away(tmp_path: Path) -> None:
    payload, server = make_payload(50), Server(make_payload(50))
    break_for_good(tmp_path, server, payload, after=7)
    (part,) = tmp_path.iterdir()
    data = bytearray(part.read_bytes())
    data[-1] ^= 1
    part.write_bytes(data)
    assert same(fetch(tmp_path, server, payload), payload)
    assert server.first_bytes[0] > 0
    assert server.first_bytes[1:] == [0], "once more, from the start"


def test_part_with_other_header_is_discarded_even_with_same_data(tmp_path: Path) -> None:
    payload, other = make_payload(50), encode({"other": make_knowledge(50)})
    assert data_of(payload) == data_of(other)
    break_for_good(tmp_path, Server(other), other, after=7)
    (tmp_path / f"{other.sha256.hex()}.part").rename(tmp_path / f"{payload.sha256.hex()}.part")
    server = Server(payload)
    assert same(fetch(tmp_path, server, payload), payload)
    assert server.first_bytes[1:] == [0], "once more, from the start"


def test_held_payload_is_not_fetched_again_even_by_later_process(tmp_path: Path) -> None:
    payload, nobody = make_payload(50), Server()
    fetch(tmp_path, Server(payload), payload)
    assert same(fetch(tmp_path, nobody, payload), payload)
    assert nobody.first_bytes == []


@pytest.mark.parametrize("damage", ["a byte", "the end", "all"])
def test_a_held_payload_that_is_damaged_is_fetched_again(tmp_path: Path, damage: str) -> None:
    payload = make_payload(50)
    fetch(tmp_path, Server(payload), payload)
    (path,) = tmp_path.iterdir()
    data = path.read_bytes()
    changed = {"a byte": data[:-1] + bytes([data[-1] ^ 1]), "the end": data[:-1], "all": b""}[damage]
    path.write_bytes(changed)
    server = Server(payload)
    assert Downloads(tmp_path, ROOM).stored(payload.sha256) is None
    assert same(fetch(tmp_path, server, payload), payload)
    assert server.first_bytes == [0]


def test_only_what_is_wanted_stays(tmp_path: Path) -> None:
    """However many asks a device answers, it holds the proxy set, the last payload and one that is under way."""
    payloads = [make_payload(rows) for rows in range(1, 9)]
    proxy, *others = payloads
    server = Server(*payloads)
    downloads = Downloads(tmp_path, ROOM)
    downloads.fetch(server, IDENTITY, proxy.sha256)  # type: ignore[arg-type]
    for other in others:
        downloads.fetch(server, IDENTITY, other.sha256, keep=[proxy.sha256])  # type: ignore[arg-type]
        assert names(tmp_path) == sorted(f"{held.sha256.hex()}.payload" for held in (proxy, other))
    break_for_good(tmp_path, Server(make_payload(20)), make_payload(20), after=1)
    downloads.fetch(server, IDENTITY, proxy.sha256)  # type: ignore[arg-type]
    assert names(tmp_path) == [f"{proxy.sha256.hex()}.payload"]


# --- unkind servers and disks


def test_a_chunk_that_fails_its_checksum_is_fetched_again(tmp_path: Path) -> None:
    payload, server = make_payload(50), Server(make_payload(50))
    spoiled = [5]

    def spoil(chunk: knowledge_pb2.Chunk) -> None:
        spoiled[0] -= 1
        if spoiled[0] == 0:
            chunk.data = bytes([chunk.data[0] ^ 1]) + chunk.data[1:]

    server.spoil = spoil
    assert same(fetch(tmp_path, server, payload), payload)
    assert len(server.first_bytes) == 2
    assert server.first_bytes[1] > 0


def test_data_not_matching_digest_are_refused_and_not_kept(tmp_path: Path) -> None:
    payload = make_payload(50)
    server = Server(payload)
    server.payloads[payload.sha256] = make_payload(51)
    with pytest.raises(WireError, match=r"a download is payload .*, expected"):
        fetch(tmp_path, server, payload)
    assert names(tmp_path) == []
    server.payloads[payload.sha256] = replace(make_payload(51), sha256=payload.sha256)
    with pytest.raises(WireError, match=r"a download has SHA-256 .*, expected"):
        fetch(tmp_path, server, payload)
    assert names(tmp_path) == []


def test_a_download_with_blake3_is_verified_by_it(tmp_path: Path) -> None:
    payload = with_blake3(make_payload(50))
    assert same(fetch(tmp_path / "a", Server(payload), payload), payload)
    server = Server(payload)
    server.payloads[payload.sha256] = replace(payload, source=make_payload(51).source)
    with pytest.raises(WireError, match=r"a download has BLAKE3 .*, expected"):
        fetch(tmp_path / "b", server, payload)


def test_a_device_without_the_package_verifies_sha256(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    payload = replace(make_payload(50), blake3=bytes(32))
    monkeypatch.setattr(digests, "has_blake3", lambda: False)
    assert same(fetch(tmp_path / "a", Server(payload), payload), payload)
    monkeypatch.undo()
    with pytest.raises(WireError, match=r"a download has BLAKE3 .*, expected 0000"):
        fetch(tmp_path / "b", Server(payload), payload)


def test_a_download_with_blake3_resumes_and_is_kept(tmp_path: Path) -> None:
    payload = with_blake3(make_payload(50))
    server = Server(payload)
    break_for_good(tmp_path, server, payload, after=3)
    assert same(fetch(tmp_path, server, payload), payload)
    assert server.first_bytes[-1] > 0
    kept = Downloads(tmp_path, 1 << 30).stored(payload.sha256)
    assert kept is not None
    assert same(kept, payload)
    assert kept.blake3 == payload.blake3


def test_more_data_than_announced_are_refused_at_once(tmp_path: Path) -> None:
    payload = make_payload(50)
    server = Server(payload)

    def more(chunk: knowledge_pb2.Chunk) -> None:
        chunk.data = bytes(payload.data_bytes)
        chunk.crc32c = google_crc32c.value(chunk.data)

    server.spoil = more
    with pytest.raises(WireError, match=f"a download has more than its {payload.data_bytes} bytes"):
        fetch(tmp_path, server, payload)
    assert names(tmp_path) == []


def test_a_download_over_the_bound_is_refused_before_its_data(tmp_path: Path) -> None:
    payload, server = make_payload(50), Server(make_payload(50))
    with pytest.raises(PayloadTooLargeError):
        fetch(tmp_path, server, payload, max_bytes=payload.data_bytes - 1)
    assert server.sent == 0
    assert same(fetch(tmp_path, server, payload, max_bytes=payload.data_bytes), payload)


def test_download_without_disk_space_says_so_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    payload, server = make_payload(50), Server(make_payload(50))
    usage = shutil.disk_usage(tmp_path)
    with monkeypatch.context() as patched:
        patched.setattr(shutil, "disk_usage", lambda path: usage._replace(free=100))
        text = f"a download needs {payload.data_bytes} more bytes, but the disk has 100 bytes free"
        with pytest.raises(NoRoomError, match=text):
            fetch(tmp_path, server, payload)
    server.spoil = lambda chunk: _full_disk()
    with pytest.raises(NoRoomError, match="cannot be used: "):
        fetch(tmp_path, server, payload)
    assert names(tmp_path) == []


def _full_disk() -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


# --- one-off downloads


def test_a_download_that_is_kept_nowhere_outlives_its_file() -> None:
    payload = make_payload(50)
    assert same(download(Server(payload), IDENTITY, payload.sha256), payload)  # type: ignore[arg-type]


def test_file_claiming_to_be_another_payload_is_not_used_for_it(tmp_path: Path) -> None:
    payload, other = make_payload(5), make_payload(6)
    fetch(tmp_path, Server(other), other)
    (tmp_path / f"{other.sha256.hex()}.payload").rename(tmp_path / f"{payload.sha256.hex()}.payload")
    assert Downloads(tmp_path, ROOM).stored(payload.sha256) is None


def test_a_server_that_names_a_pause_is_called_only_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Busy:
        calls = 0

        def download(self, identity: Any, sha256: bytes, first_byte: int) -> Any:
            self.calls += 1
            raise RefusedError(Code.TOO_MANY, "too many calls", {AFTER_SECONDS: "7.0"})

    monkeypatch.setattr(transfer, "PAUSE_SECONDS", 0.0)
    link: Any = Busy()
    with pytest.raises(LinkError) as refused:
        Downloads(tmp_path, ROOM).fetch(link, IDENTITY, bytes(32))
    assert (link.calls, refused.value.after_seconds) == (1, 7.0)
