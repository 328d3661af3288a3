"""Rules of the wire format, and the results of checking them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fleetdistill.errors import ConfigurationError

PAGE = "docs/reference/wire-format.md"
"""The page that contains the rules."""


@dataclass(frozen=True)
class Rule:
    """A rule of the page.

    Attributes:
        name: Short name, unique within a list of rules.
        section: Heading of the section that contains the rule.
        text: The rule, one sentence.
    """

    name: str
    section: str
    text: str


@dataclass(frozen=True)
class Result:
    """Result of the checks of one rule.

    Attributes:
        rule: The rule.
        checks: Number of checks; 0 if the run did not get that far.
        found: Why the first failed check failed; empty if none failed.
    """

    rule: Rule
    checks: int
    found: str

    @property
    def passed(self) -> bool:
        """Whether the rule was checked and no check failed."""
        return self.checks > 0 and not self.found

    def __str__(self) -> str:
        state = "passed" if self.passed else "FAILED" if self.found else "NOT CHECKED"
        line = f"{state:<11}  {self.rule.name}: {self.rule.text} ({self.rule.section})"
        return f"{line}\n{'':<11}  found: {self.found}" if self.found else line


class Report:
    """Collects the results of checks.

    Args:
        rules: All rules that a run checks.
    """

    def __init__(self, rules: Sequence[Rule]) -> None:
        self._rules = {rule.name: rule for rule in rules}
        self._checks = dict.fromkeys(self._rules, 0)
        self._found: dict[str, str] = {}

    def expect(self, name: str, ok: object, found: str = "the rule is violated") -> bool:
        """Records a check.

        Args:
            name: Name of the rule.
            ok: Whether the other side kept the rule.
            found: What it did instead.

        Returns:
            Whether `ok` is true.

        Raises:
            ConfigurationError: There is no such rule.
        """
        if name not in self._rules:
            raise ConfigurationError(f"there is no rule {name!r}")
        self._checks[name] += 1
        if not ok:
            self._found.setdefault(name, found)
        return bool(ok)

    def results(self) -> list[Result]:
        """Returns one result per rule, in the order of the rules."""
        return [Result(rule, self._checks[name], self._found.get(name, "")) for name, rule in self._rules.items()]

    @property
    def passed(self) -> bool:
        """Whether all rules passed."""
        return all(result.passed for result in self.results())

    def __str__(self) -> str:
        results = self.results()
        count = sum(result.passed for result in results)
        return "\n".join([*map(str, results), f"{count} of {len(results)} rules of {PAGE} passed"])


DEVICE_RULES = (
    Rule("id", "Identity and secret", "the id has 1 to 64 of the allowed characters and is the same in every call"),
    Rule("secret", "Identity and secret", "after the first check-in every request has the same secret of 32 bytes"),
    Rule("run", "Identity and secret", "after the first check-in every request names the run, or none"),
    Rule("profile", "Check-in", "the profile fits the contract"),
    Rule("check-in.first", "Overview", "the device checks in before any other call"),
    Rule("check-in.again", "Errors and retries", "after bad-identity with check_in the device checks in again"),
    Rule("wait", "Asks", "wait_seconds is 0 to 60"),
    Rule("pause", "Asks", "after come_back the device calls no earlier than after_seconds"),
    Rule("decline", "Asks", "an ask with an unknown step is declined, with its round and step number"),
    Rule("finished", "Asks", "after finished the device makes no further calls, except Leave"),
    Rule("download.known", "Downloads", "a download has a digest of the contract or of the ask"),
    Rule("download.resume", "Downloads", "after an interruption the download continues, at most at what was received"),
    Rule("download.crc", "Downloads", "after a chunk with a wrong CRC-32C the device downloads again"),
    Rule("download.digest", "Downloads", "a payload with a wrong digest is not used, and its ask is declined"),
    Rule("upload.status", "Uploads", "UploadStatus precedes every Upload"),
    Rule("upload.first_byte", "Uploads", "first_byte is the next_byte of the status"),
    Rule("upload.header", "Uploads", "a stream has one header, then chunks"),
    Rule("upload.name", "Uploads", "the name has round, step number and payload of the ask"),
    Rule("upload.attempt", "Asks", "the attempt is at least first_attempt"),
    Rule("upload.samples", "Uploads", "samples is 1 to the number in the profile"),
    Rule("upload.same", "Uploads", "the same attempt has the same bytes"),
    Rule("upload.resume", "Uploads", "an interrupted upload continues at next_byte"),
    Rule(
        "upload.later", "Errors and retries", "after too-many the same answer is sent again, not before after_seconds"
    ),
    Rule("upload.checksum", "Errors and retries", "after checksum the answer is sent again"),
    Rule("upload.receipt", "Uploads", "a lost receipt is requested with UploadStatus, without another upload"),
    Rule("upload.closed", "Uploads", "an answer to a closed ask is dropped without an upload"),
    Rule("upload.empty", "Uploads", "the answer to a step without parts has no parts, tensors or chunks"),
    Rule("parts", "Parts of each step", "an answer has exactly the parts of its step, and possibly metrics"),
    Rule("tensors", "Kinds of parts", "the tensors have the names, types and shapes of the contract"),
    Rule("finite", "Kinds of parts", "all numbers are finite"),
    Rule(
        "header", "Payloads", "the header describes its tensors without data, with their size and a digest of 32 bytes"
    ),
    Rule("digest", "Payloads", "the digest is that of parts and data"),
    Rule("chunks.place", "Chunks", "chunks follow each other without gaps, 1 byte to 1 MiB each"),
    Rule("chunks.crc", "Chunks", "a chunk has the CRC-32C of its data"),
    Rule("chunks.compression", "Compression", "chunks are uncompressed if the reply to the check-in says so"),
    Rule("answers", "Overview", "every other ask is answered"),
)
"""All rules that `ListeningServer` checks."""
SERVER_RULES = (
    Rule("conforming", "Overview", "calls that keep the rules are accepted"),
    Rule("contract", "Check-in", "a check-in without a profile returns the contract and no secret"),
    Rule("secret.new", "Identity and secret", "a first check-in with an empty secret returns one of 32 bytes"),
    Rule("secret.own", "Identity and secret", "a first check-in with a secret is accepted and returns none"),
    Rule("secret.other", "Identity and secret", "another secret for a known id is bad-identity, without check_in"),
    Rule("id.unknown", "Identity and secret", "a call with an unknown id is bad-identity, with check_in"),
    Rule("id.malformed", "Identity and secret", "an id with other characters is bad-identity"),
    Rule("run.unknown", "Identity and secret", "an unknown run is unknown-run"),
    Rule("check-in.again", "Check-in", "a check-in can be repeated"),
    Rule(
        "check-in.times", "Check-in", "lease_seconds and heartbeat_seconds are above 0, the heartbeat at most the lease"
    ),
    Rule("profile.classes", "Check-in", "another number of classes is contract-mismatch"),
    Rule("profile.input_shape", "Check-in", "another input shape is contract-mismatch"),
    Rule("profile.knowledge_types", "Check-in", "a profile without the knowledge type is contract-mismatch"),
    Rule("profile.samples", "Check-in", "a profile without samples is contract-mismatch"),
    Rule("profile.fingerprint", "Check-in", "another model fingerprint is contract-mismatch"),
    Rule("profile.columns", "Check-in", "a column that is not allowed is column-not-allowed"),
    Rule("profile.size", "Check-in", "a profile of more than 64 KiB is too-large"),
    Rule("profile.names", "Check-in", "a model name of more than 128 characters is too-large"),
    Rule("profile.data_version", "Check-in", "a data version of more than 32 bytes is bad-message"),
    Rule("errors", "Errors and retries", "every error has an ErrorInfo of the domain, and the status of its code"),
    Rule("ask", "Asks", "an ask has a round, a step number, a step, a first attempt and a deadline"),
    Rule("ask.again", "Asks", "an open ask is returned again"),
    Rule("heartbeat", "Asks", "a heartbeat reports whether the device has an open ask"),
    Rule("decline", "Asks", "a decline closes the ask, and has no effect if it is repeated"),
    Rule("leave", "Asks", "after Leave the device's asks are closed"),
    Rule("finished", "Asks", "an ended run returns finished"),
    Rule("download", "Downloads", "a download has a header, then chunks, with the digest of the ask"),
    Rule("download.chunks", "Chunks", "chunks follow each other without gaps, with their CRC-32C, at most 1 MiB each"),
    Rule("download.resume", "Downloads", "a download continues at first_byte"),
    Rule("download.unknown", "Downloads", "a digest that neither ask nor contract has is not-found"),
    Rule("status.new", "Uploads", "the status of a new upload is an open ask without bytes"),
    Rule("status.receipt", "Uploads", "the status of an accepted answer contains its receipt"),
    Rule("receipt", "Uploads", "a receipt has an id, the attempt, the digest, the size and the time"),
    Rule("repeat", "Uploads", "a repeated answer gets the same receipt"),
    Rule("repeat.attempt", "Uploads", "another attempt after the receipt gets the receipt of the first"),
    Rule("resume.incomplete", "Uploads", "a stream that ends early is incomplete, and the ask stays open"),
    Rule("resume", "Uploads", "an upload continues at next_byte"),
    Rule("resume.offset", "Uploads", "another first_byte than the server's is out-of-step, and the ask stays open"),
    Rule("upload.other-ask", "Uploads", "an answer to another payload is closed, and the ask stays open"),
    Rule("upload.not-asked", "Uploads", "an answer without an ask is not-asked"),
    Rule("upload.no-header", "Uploads", "a stream without a header is bad-message"),
    Rule("upload.two-headers", "Uploads", "a second header is bad-message"),
    Rule("chunks.gap", "Chunks", "a chunk after a gap is out-of-step, and the ask stays open"),
    Rule("chunks.crc", "Chunks", "a wrong CRC-32C is checksum, and the ask stays open"),
    Rule("digest", "Payloads", "a wrong digest is checksum, and the ask stays open"),
    Rule("final", "Uploads", "a final error closes the ask, and UploadStatus gives the reason"),
    Rule("parts.missing", "Uploads", "an answer without a part of its step is bad-message"),
    Rule("parts.extra", "Uploads", "an answer with another part is bad-message"),
    Rule("tensor.missing", "Kinds of parts", "a missing tensor is bad-tensor"),
    Rule("tensor.extra", "Kinds of parts", "a tensor that the contract does not have is bad-tensor"),
    Rule("tensor.shape", "Kinds of parts", "another shape is bad-tensor"),
    Rule("tensor.type", "Kinds of parts", "another element type is bad-tensor"),
    Rule("tensor.data", "Payloads", "data in the header is bad-message"),
    Rule("tensor.encoding", "Payloads", "a tensor without an encoding is bad-message"),
    Rule("value.finite", "Kinds of parts", "NaN is bad-value"),
    Rule("header.data_bytes", "Payloads", "a size that is not the sum of the tensors is bad-message"),
    Rule("header.sha256", "Payloads", "a digest of other than 32 bytes is bad-message"),
    Rule("header.limit", "Limits", "more than max_upload_bytes is too-large"),
    Rule("samples.zero", "Uploads", "an answer with a weight of 0 samples is bad-value"),
    Rule("samples.more", "Uploads", "more samples than the profile declared is bad-value, with check_in"),
    Rule("chunks.empty", "Chunks", "an empty chunk is bad-message"),
    Rule("chunks.limit", "Chunks", "a chunk of more than 1 MiB is bad-message"),
    Rule("chunks.beyond", "Chunks", "a chunk that exceeds the payload is bad-message"),
    Rule("chunks.compression", "Compression", "an unknown compression is bad-message"),
)
"""All rules that `check_server` checks."""
