"""The kit as devices: our server passes, and a server that breaks a rule fails the check of that rule."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest
from conformance.plain_server import PlainServer, plain_server
from support.served import served

from fleetdistill.errors import RefusedError
from fleetdistill.wire.codes import Code
from fleetdistill_lab.conformance import RUN_TOML, Report, check_server


def checked(kind: type[PlainServer]) -> Report:
    with plain_server(kind) as address:
        return check_server(address, seconds=60)


def failed(report: Report) -> list[str]:
    return [result.rule.name for result in report.results() if result.found]


@pytest.mark.slow
def test_our_server_keeps_every_rule(tmp_path: Path) -> None:
    with served(tmp_path, tomllib.loads(RUN_TOML)) as address:
        report = check_server(address)
    assert report.passed, str(report)


def test_our_device_api_keeps_every_rule_without_the_front() -> None:
    report = checked(PlainServer)
    assert report.passed, str(report)


class SecretForAll(PlainServer):
    def reply(self, method, request, response):
        if method == "CheckIn" and request.HasField("profile") and request.identity.secret:
            response.secret = bytes(32)
        return response


class ShortSecret(PlainServer):
    def reply(self, method, request, response):
        if method == "CheckIn" and response.secret:
            response.secret = response.secret[:16]
        return response


class RareHeartbeats(PlainServer):
    def reply(self, method, request, response):
        if method == "CheckIn":
            response.heartbeat_seconds = 2 * response.lease_seconds
        return response


class Accepts(PlainServer):
    """Accepts what one code should reject."""

    code = Code.INTERNAL

    def refusal(self, method, request, error):
        return None if (method, error.code) == ("CheckIn", self.code) else error


class AcceptsProfiles(Accepts):
    code = Code.CONTRACT_MISMATCH


class AcceptsColumns(Accepts):
    code = Code.COLUMN_NOT_ALLOWED


class OtherCode(PlainServer):
    def refusal(self, method, request, error):
        return RefusedError(Code.BAD_VALUE, str(error), error.details) if error.code == Code.BAD_TENSOR else error


class NoCheckIn(PlainServer):
    def refusal(self, method, request, error):
        return RefusedError(error.code, str(error))


class NoDeadline(PlainServer):
    def reply(self, method, request, response):
        if method == "NextAsk" and response.HasField("ask"):
            response.ask.deadline_seconds = 0
        return response


class SilentHeartbeat(PlainServer):
    def reply(self, method, request, response):
        if method == "Heartbeat":
            response.ask_open = False
        return response


class OtherChecksums(PlainServer):
    def reply(self, method, request, response):
        if method == "Download stream":
            response[1].chunk.crc32c ^= 1
        return response


class FromTheStart(PlainServer):
    def Download(self, request, context):
        request.first_byte = 0
        return super().Download(request, context)


class OtherReceipts(PlainServer):
    uploads = 0

    def reply(self, method, request, response):
        if method == "Upload":
            self.uploads += 1
            response.receipt.id += str(self.uploads)
        return response


class NoReceiptInStatus(PlainServer):
    def reply(self, method, request, response):
        if method == "UploadStatus":
            response.ClearField("receipt")
        return response


class NoReason(PlainServer):
    def reply(self, method, request, response):
        if method == "UploadStatus":
            response.closed_code = ""
        return response


class AheadOfItself(PlainServer):
    def reply(self, method, request, response):
        if method == "UploadStatus" and response.next_byte:
            response.next_byte += 4096
        return response


FAULTY = {
    SecretForAll: {"secret.own", "check-in.again"},
    ShortSecret: {"secret.new", "conforming"},
    RareHeartbeats: {"check-in.times"},
    AcceptsProfiles: {
        f"profile.{item}" for item in ("classes", "input_shape", "knowledge_types", "samples", "fingerprint")
    },
    AcceptsColumns: {"profile.columns"},
    OtherCode: {f"tensor.{item}" for item in ("missing", "extra", "shape", "type")},
    NoCheckIn: {"id.unknown"},
    NoDeadline: {"ask"},
    SilentHeartbeat: {"heartbeat"},
    OtherChecksums: {"download.chunks"},
    FromTheStart: {"download.resume"},
    OtherReceipts: {"status.receipt", "repeat", "repeat.attempt"},
    NoReceiptInStatus: {"status.receipt"},
    NoReason: {"final", "decline", "leave"},
    AheadOfItself: {"resume.incomplete", "conforming"},
}


@pytest.mark.long
@pytest.mark.parametrize("server", FAULTY, ids=lambda server: server.__name__)
def test_a_faulty_server_fails_the_checks_of_its_rules(server: type[PlainServer]) -> None:
    report = checked(server)
    assert set(failed(report)) == FAULTY[server], str(report)
    assert not report.passed
