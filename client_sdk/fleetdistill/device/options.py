"""Groups of a device's options: its server and run, and what it uses of its process."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from fleetdistill.checked import check_address, check_flag, check_name, check_type, shown
from fleetdistill.clock import Clock
from fleetdistill.errors import ConfigurationError
from fleetdistill.link.abilities import Abilities
from fleetdistill.link.base import Link

if TYPE_CHECKING:
    from opentelemetry.trace import TracerProvider


@dataclass(frozen=True, eq=False)
class Server:
    """The server of a device, the run in which it takes part, and how the connection is secured.

        Device(server=Server("fleet.example.org:50051", run="digits", enrolment="token"), ...)

    Attributes:
        address: `"host:port"` of the aggregation server, or a `Link`.
        run: Name of the run, or `Abilities`, from which the server chooses the run. Optional if the server has a single
            run. Two runs on one machine are two `Device`s, each with its own `state_dir`.
        enrolment: One-time token from the operator, or a file with the token. The device then uses TLS, obtains a
            certificate and renews it automatically. Not required once `state_dir` has a certificate.
        insecure: Allows plain text to a server on another machine.

    Raises:
        ConfigurationError: A value is invalid.
    """

    address: str | Link
    _: KW_ONLY
    run: str | Abilities = ""
    enrolment: str | Path | None = field(default=None, repr=False)  # a token is a secret
    insecure: bool = False

    def __post_init__(self) -> None:
        if isinstance(self.address, str):
            check_address("server", self.address)
        elif not callable(getattr(self.address, "check_in", None)):
            expected = "expected host:port, or a fleetdistill.link.base.Link"
            raise ConfigurationError(f"server is {shown(self.address)}, {expected}")
        if self.run != "" and not isinstance(self.run, Abilities):
            check_name("run", self.run)
        if self.enrolment is not None:
            check_type("enrolment", self.enrolment, (str, Path), "a token, or the path of a file with a token")
        check_flag("insecure", self.insecure)


@dataclass(frozen=True, kw_only=True, eq=False)
class Runtime:
    """What a device uses of its process.

    Attributes:
        clock: Clock for tests, such as `fleetdistill.testing.ManualClock`. Default: the system clock.
        tracer_provider: The app's OpenTelemetry tracer provider, which records spans of the device's work in the traces
            of its rounds. Default: no spans.

    Raises:
        ConfigurationError: `clock` is not a clock.
    """

    clock: Clock | None = None
    tracer_provider: TracerProvider | None = None

    def __post_init__(self) -> None:
        methods = ("now", "time", "wait")
        if self.clock is not None and not all(callable(getattr(self.clock, name, None)) for name in methods):
            raise ConfigurationError(
                f"clock is {shown(self.clock)}, expected an object with the methods now, time and wait"
            )
