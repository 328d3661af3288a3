"""Conformance tests of the wire format: plays devices against a server, or a server against a device.

    python -m fleetdistill_lab.conformance 127.0.0.1:50051
    python -m fleetdistill_lab.conformance --listen

docs/reference/wire-format.md has the rules. The SDK does not import this package.
"""

from __future__ import annotations

from fleetdistill_lab.conformance.device_check import ListeningServer
from fleetdistill_lab.conformance.rules import DEVICE_RULES, PAGE, SERVER_RULES, Report, Result, Rule
from fleetdistill_lab.conformance.server_check import RUN_TOML, check_server

__all__ = [
    "DEVICE_RULES",
    "PAGE",
    "RUN_TOML",
    "SERVER_RULES",
    "ListeningServer",
    "Report",
    "Result",
    "Rule",
    "check_server",
]
