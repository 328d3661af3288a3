"""A server that lies to an operator's client, over TLS: each command ends with one sentence, and prints no escapes."""

from __future__ import annotations

import itertools
import json
import threading
from collections.abc import Callable, Iterator
from concurrent import futures
from pathlib import Path
from typing import Any

import grpc
import pytest
from support.processes import PATIENCE_SECONDS
from support.secured import make_pki
from typer.testing import CliRunner

from fleetdistill.link.credentials import split
from fleetdistill.wire.v1 import operations_pb2 as words
from fleetdistill_server.cli.app import app
from fleetdistill_server.operations import client
from fleetdistill_server.operations.source import LocalStore
from fleetdistill_server.security.certificates import Role
from fleetdistill_server.security.pki import SERVER
from fleetdistill_server.store.store import Store

_SERVICE = "fleetdistill.wire.v1.OperationsService"
ESCAPE = "\x1b]0;pwned\x07\x1b[2J"
DEEP = "[" * 100_000
Reply = Callable[[], Any]


class LyingServer:
    """Answers each call of `OperationsService` with what a test has put in place.

    Attributes:
        replies: By method, a function that returns a message, or an iterator of messages for a stream.
        given: Arguments of a command that name this server.
    """

    def __init__(self, work: Path) -> None:
        authority = make_pki(work / "pki")
        authority.issue_person(Role.OPERATOR, "olga", 1.0, work / "olga")
        key, chain = split((authority.directory / SERVER).read_bytes())
        credentials = grpc.ssl_server_credentials([(key, chain)])
        self.replies: dict[str, Reply] = {}
        self.server = grpc.server(futures.ThreadPoolExecutor(4))
        methods = words.DESCRIPTOR.services_by_name["OperationsService"].methods
        handlers = {method.name: self._handler(method) for method in methods}
        self.server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(_SERVICE, handlers),))
        port = self.server.add_secure_port("127.0.0.1:0", credentials)
        self.given = ["--server", f"127.0.0.1:{port}", "--identity", str(work / "olga")]
        self.server.start()

    def _handler(self, method: Any) -> Any:
        def reply(request: Any, context: grpc.ServicerContext) -> Any:
            if method.name not in self.replies:
                context.abort(grpc.StatusCode.INTERNAL, ESCAPE)
            return self.replies[method.name]()

        stream = method.server_streaming
        kind = grpc.unary_stream_rpc_method_handler if stream else grpc.unary_unary_rpc_method_handler
        return kind(reply, None, lambda message: message.SerializeToString())

    def said(self, *command: str, code: int = 1) -> str:
        """What a command prints, which has no escape sequence."""
        done = CliRunner().invoke(app, [*command, *self.given])
        assert done.exit_code == code, done.output
        assert done.exception is None or isinstance(done.exception, SystemExit)
        assert not {"\x1b", "\x07"} & set(done.output)
        return done.output


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LyingServer]:
    liar = LyingServer(tmp_path_factory.mktemp("liar"))
    yield liar
    liar.server.stop(None).wait()


@pytest.fixture
def liar(started: LyingServer) -> LyingServer:
    started.replies = {}
    return started


LARGE_PAGE = words.ReadResponse(facts=json.dumps({"text": "x" * 4_000_000}))


def view(facts: str = "{}", **rows: Any) -> Reply:
    pages = [words.ReadResponse(list=name, rows=map(json.dumps, given)) for name, given in rows.items()]
    return lambda: iter([words.ReadResponse(facts=facts), *pages])


ROW = {"run": "r", "method": "fedavg", "status": "running", "reason": ESCAPE, ESCAPE: "[bold]x[/bold]"}


def test_texts_of_tables_have_no_escapes(liar: LyingServer) -> None:
    liar.replies["Read"] = view(json.dumps({"problems": [ESCAPE], "failed_runs": [ESCAPE]}), runs=[ROW])
    assert "[bold]x[/bold]" in liar.said("runs", "list", code=0)
    call = dict.fromkeys(("arguments", "role", "name", "address", "call", "result", "at"), ESCAPE)
    liar.replies["ReadForOperators"] = view('{"more": false}', operators=[call])
    assert "operators (1)" in liar.said("operators", code=0)


@pytest.mark.parametrize("command", ["start", "pause", "stop", "cancel"])
def test_replies_have_no_escapes(liar: LyingServer, command: str) -> None:
    liar.replies["ChangeRun"] = lambda: words.ChangeRunResponse(run=words.RunState(run=ESCAPE, status=ESCAPE))
    confirmed = ["--yes"] if command == "cancel" else []
    assert r"\x1b]0;pwned" in liar.said("runs", command, "r", *confirmed, code=0)


def test_errors_have_no_escapes(liar: LyingServer) -> None:
    assert r"INTERNAL, \x1b]0;pwned" in liar.said("runs", "show", "r")


def changes() -> Iterator[words.WatchRunResponse]:
    run = words.RunProgress(run=ESCAPE, status="finished", reason=ESCAPE, method=ESCAPE)
    events = [words.EventProgress(event=ESCAPE, device=ESCAPE, text=ESCAPE, at=float("nan"))]
    rounds = [words.RoundProgress(round=1, status=ESCAPE, seconds=float("inf"), test_accuracy=float("nan"))]
    result = [words.RunChange(event=event) for event in events] + [words.RunChange(round=item) for item in rounds]
    yield words.WatchRunResponse(changes=[*result, words.RunChange(run=run)])


@pytest.mark.parametrize("how", [[], ["--json"]])
def test_watch_prints_no_escapes(liar: LyingServer, how: list[str]) -> None:
    liar.replies["WatchRun"] = changes
    assert "pwned" in liar.said("runs", "watch", "r", *how, code=0)


@pytest.mark.parametrize(
    ("reply", "sentence"),
    [
        (view(DEEP), "not valid JSON"),
        (view("{"), "not valid JSON"),
        (view('{"problems": [NaN]}'), "NaN is not a number of JSON"),
        (view("[1]"), "sent list in JSON, expected an object"),
        (view(runs=[5]), "sent int in JSON, expected an object"),
        (view(), "cannot be shown"),
        (view(runs=[ROW, {"run": "other"}]), "cannot be shown"),
        (lambda: itertools.repeat(LARGE_PAGE), "for one view"),
    ],
    ids=["deep", "cut", "nan", "list", "number", "nothing", "unequal", "endless"],
)
def test_a_view_that_is_none_is_an_error(liar: LyingServer, reply: Reply, sentence: str) -> None:
    liar.replies["Read"] = reply
    assert sentence in liar.said("runs", "list")


@pytest.mark.parametrize("rows", [[{}] * 101, [{"a": [0] * 99}], [{"a": [[]] * 99}]], ids=["rows", "values", "lists"])
def test_a_view_of_many_small_values_is_an_error(
    liar: LyingServer, monkeypatch: pytest.MonkeyPatch, rows: list[Any]
) -> None:
    """Each takes many times its bytes in memory."""
    monkeypatch.setattr(client, "MAX_READ_VALUES", 100)
    liar.replies["Read"] = view(runs=rows)
    assert "sent more than 134217728 bytes or 100 values for one view" in liar.said("runs", "list")


def test_a_backup_of_which_nothing_comes_is_an_error(
    liar: LyingServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client, "STALL_SECONDS", 0.1)
    ended = threading.Event()

    def stalled() -> Iterator[words.FilePart]:
        yield MODEL
        ended.wait(PATIENCE_SECONDS)

    liar.replies["BackUp"] = stalled
    try:
        assert "the server sent nothing for 0.1 s" in liar.said("backup", str(tmp_path / "copy"))
    finally:
        ended.set()
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("tokens", [[], ["a", "b"], [ESCAPE], ["two\nlines"]], ids=["none", "two", "escape", "lines"])
def test_other_tokens_than_asked_for_are_refused(liar: LyingServer, tokens: list[str]) -> None:
    liar.replies["CreateTokens"] = lambda: words.CreateTokensResponse(tokens=tokens)
    assert "something else than the tokens" in liar.said("enrol", "--count", "1")


def files(*parts: words.FilePart) -> Reply:
    return lambda: iter(parts)


MODEL = words.FilePart(path="model.onnx", data=b"x")


@pytest.mark.parametrize(
    ("reply", "sentence"),
    [
        (files(MODEL, words.FilePart(report=DEEP)), "not valid JSON"),
        (files(MODEL, words.FilePart(report="[]")), "sent list in JSON"),
        (files(MODEL, words.FilePart(report='{"bytes": 1}')), "report on the files is not valid"),
        (
            files(MODEL, words.FilePart(report='{"bytes": 1, "max_difference": [1]}')),
            "report on the files is not valid",
        ),
        (files(MODEL, words.FilePart(report='{"bytes": -1}')), "sent 1 of -1 bytes"),
        (files(MODEL, words.FilePart(report='{"bytes": 1, "max_difference": -1}')), "the difference -1.0 to PyTorch's"),
        (files(MODEL, words.FilePart(report='{"bytes": 1, "max_difference": 0}')), "is not a valid ONNX file"),
        (files(MODEL, MODEL), "File exists"),
        (files(words.FilePart(path="../model.onnx", data=b"x")), "not part of a backup or a model"),
    ],
    ids=["deep", "list", "missing", "type", "negative", "difference", "garbage", "twice", "above"],
)
def test_a_model_that_is_none_leaves_nothing(liar: LyingServer, tmp_path: Path, reply: Reply, sentence: str) -> None:
    liar.replies["ExportModel"] = reply
    assert sentence in liar.said("export", "r", "--out", str(tmp_path / "m.onnx"))
    assert not list(tmp_path.iterdir())


def test_a_model_in_small_parts_has_a_bound_too(
    liar: LyingServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client, "MAX_MODEL_BYTES", 3)
    rest = words.FilePart(report='{"bytes": 4, "max_difference": 0}')
    liar.replies["ExportModel"] = files(MODEL, *[words.FilePart(data=b"x")] * 3, rest)
    assert "sent more than 3 bytes" in liar.said("export", "r", "--out", str(tmp_path / "m.onnx"))
    assert not list(tmp_path.iterdir())


def manifest(payloads: Any = (), **others: Any) -> words.FilePart:
    made = {"format": 1, "made_at": "", "database": "", "payloads": payloads, "checkpoints": [], **others}
    return words.FilePart(path="backup/manifest.json", data=json.dumps(made).encode())


REPORT = words.FilePart(report="{}")


@pytest.mark.parametrize(
    ("reply", "sentence"),
    [
        (files(manifest(["../" * 9 + "etc/passwd"]), REPORT), "not named by a SHA-256"),
        (files(manifest([5]), REPORT), "not named by a SHA-256"),
        (files(manifest(5), REPORT), "cannot be read"),
        (files(words.FilePart(path="backup/manifest.json", data=DEEP.encode()), REPORT), "cannot be read"),
        (files(manifest(["0" * 64]), REPORT), "damaged"),
        (files(manifest(), words.FilePart(report='{"lost": 5}')), "report on the files is not valid"),
        (files(manifest(), words.FilePart(report='{"bytes": "many"}')), "report on the files is not valid"),
    ],
    ids=["path", "number", "count", "deep", "missing", "lost", "bytes"],
)
def test_a_backup_that_is_none_leaves_nothing(liar: LyingServer, tmp_path: Path, reply: Reply, sentence: str) -> None:
    liar.replies["BackUp"] = reply
    assert sentence in liar.said("backup", str(tmp_path / "copy"))
    assert not list(tmp_path.iterdir())


def test_payloads_missing_in_a_backup_are_named_or_counted(liar: LyingServer, tmp_path: Path) -> None:
    """A server names 100 of them at most; this one names 2 of 7."""
    Store.open(tmp_path / "store").close()
    LocalStore(tmp_path / "store").back_up(tmp_path / "made")
    copied = {f"backup/{item.name}": item.read_bytes() for item in (tmp_path / "made").iterdir() if item.is_file()}
    report = words.FilePart(report=json.dumps({"lost": ["payload a", "payload b"], "lost_in_all": 7}))
    liar.replies["BackUp"] = files(*[words.FilePart(path=path, data=data) for path, data in copied.items()], report)
    said = liar.said("backup", str(tmp_path / "copy"), code=1)
    told = [line.removeprefix("warning: not in the backup: ") for line in said.splitlines() if "warning" in line]
    assert told == ["payload a", "payload b", "warning: and 5 more payloads"]
