"""Rules that the kit checks of a device."""

from __future__ import annotations

from fleetdistill.conformance.report import Rule

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
