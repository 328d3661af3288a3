"""The sections of run.toml that the front uses, `[server]` and `[limits]`, and the TLS that they describe.

This module must not import `fleetdistill_server.methods`.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal
from urllib.parse import parse_qs, urlsplit

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, model_validator

from fleetdistill.errors import ConfigurationError
from fleetdistill.names import did_you_mean
from fleetdistill_server.config.limits import Limits
from fleetdistill_server.config.section import Section, read_toml, sentences

__all__ = ["OF_A_RUN", "ServerSection"]

ENROL_PORT = 50052
"""Default port for enrolment."""
_LAST_PORT = 65_535
_MIN_BUDGET = 5_000_000
"""Smallest `disk_budget_bytes` with SQLite: its log has 4.1 MB, the rest of 40 rounds with one device 0.4 MB."""


@dataclass(frozen=True)
class Tls:
    """TLS of a front.

    Attributes:
        directory: Directory of the PKI.
        enrol_listen: `host:port` of the enrolment port.
        certificate_days: Lifetime of a device's certificate in days.
    """

    directory: Path
    enrol_listen: str
    certificate_days: float


def _host_and_port(address: str) -> str:
    host, _, port = address.rpartition(":")
    plain = (host.startswith("[") and host.endswith("]")) or ":" not in host
    if not (host and plain and port.isascii() and port.isdecimal()):
        raise ValueError("must be host:port, such as 127.0.0.1:50051 or [::1]:50051")
    if int(port) > _LAST_PORT:
        raise ValueError(f"must be host:port with a port of at most {_LAST_PORT}")
    return address


Address = Annotated[str, AfterValidator(_host_and_port)]
"""`host:port`; the system assigns a free port for 0."""


OF_A_RUN = ("engine_timeout_seconds", "max_upload_bytes", "torch_device", "keep_rounds", "keep_checkpoints")
"""Settings of [server] that each run has of its own on a server of many runs; the others are the server's."""


class ServerSection(Section):
    """[server]: addresses, files and timing of the server; may change between starts of a run."""

    listen: Address = "127.0.0.1:50051"
    store: str = "fleetdistill-store"
    database: str = ""
    blobs: Annotated[str, AfterValidator(lambda url: url.rstrip("/"))] = ""
    lease_seconds: Annotated[float, Field(gt=0)] = 60.0
    engine_timeout_seconds: Annotated[float, Field(ge=5)] = 60.0
    max_upload_bytes: Annotated[int, Field(ge=1)] = 4 << 30
    torch_device: str = "auto"
    pki: str = ""
    enrol_listen: Annotated[str, AfterValidator(lambda address: address and _host_and_port(address))] = ""
    certificate_days: Annotated[float, Field(gt=0, le=3650)] = 30.0
    compression: Literal["zstd", "none"] = "zstd"
    keep_rounds: Annotated[int, Field(ge=1, lt=2**32)] = 1
    keep_checkpoints: Annotated[int, Field(ge=1, lt=2**32)] = 3
    disk_budget_bytes: Annotated[int, Field(ge=0)] = 0
    keep_free_bytes: Annotated[int, Field(ge=0)] = 100 << 20
    metrics: Annotated[str, AfterValidator(lambda address: address and _host_and_port(address))] = ""
    traces: Literal["off", "otlp"] = "off"
    engines_at_once: Annotated[int, Field(ge=0, le=1024)] = 0
    data_directories: list[str] = ["."]  # noqa: RUF012  (pydantic copies it)

    @model_validator(mode="after")
    def _check_storage(self) -> ServerSection:  # of the section, whose errors do not show a value with a password
        _check_database(self.database)
        _check_blobs(self.blobs)
        _check_budget(self.disk_budget_bytes, self.database)
        return self

    def tls(self) -> Tls | None:
        """Returns the TLS settings, or None for plain text. Enrolment uses the host of `listen` by default."""
        if not self.pki:
            return None
        usual = f"{self.listen.rpartition(':')[0]}:{ENROL_PORT}"
        return Tls(Path(self.pki), self.enrol_listen or usual, self.certificate_days)

    def absolute(self) -> ServerSection:
        """Returns this section with absolute paths besides the store's, for readers in another folder."""
        places = [str(Path(place).absolute()) for place in self.data_directories]
        pki = self.pki and str(Path(self.pki).absolute())
        return self.model_copy(update={"pki": pki, "data_directories": places})

    def on_ports(self, port: int | None, enrol_port: int | None) -> ServerSection:
        """Returns this section with other ports, so that a restarted front keeps its ports.

        Args:
            port: Port of `listen`; None leaves it unchanged.
            enrol_port: Port of `enrol_listen`; None leaves it unchanged.
        """
        tls = self.tls()
        changes = {}
        if port is not None:
            changes["listen"] = _with_port(self.listen, port)
        if enrol_port is not None and tls is not None:
            changes["enrol_listen"] = _with_port(tls.enrol_listen, enrol_port)
        return self.model_copy(update=changes)


def _with_port(address: str, port: int) -> str:
    return f"{address.rpartition(':')[0]}:{port}"


def _check_database(url: str) -> None:
    parts = urlsplit(url)
    if url and parts.scheme not in ("postgresql", "postgres"):
        raise ValueError("database must be a URL such as postgresql://user@host:5432/fleetdistill, or empty")
    if parts.password or {"password", "sslpassword"} & parse_qs(parts.query).keys():
        raise ValueError("database must not contain a password; set PGPASSWORD or use ~/.pgpass")


def _check_blobs(url: str) -> None:
    parts = urlsplit(url)
    if "@" in parts.netloc or parts.query:
        raise ValueError("blobs must not contain keys; set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY")
    if url and not (parts.scheme == "s3" and parts.netloc and parts.path.strip("/")):
        raise ValueError("blobs must be s3://bucket/prefix, or empty for files in the store's directory")


def _check_budget(budget: int, database: str) -> None:
    if not database and 0 < budget < _MIN_BUDGET:
        raise ValueError(
            f"disk_budget_bytes is {budget}, must be 0 for no limit or at least {_MIN_BUDGET}: SQLite's log alone "
            "grows to 4.1 MB, and uploads would be refused then; add the size of the run's payloads"
        )


class ServerConfig(BaseModel):
    """The sections of run.toml that the front needs; other sections are ignored."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    server: ServerSection = ServerSection()
    limits: Limits = Limits()


def load_server_config(path: Path) -> ServerConfig:
    """Reads `[server]` and `[limits]` of a run.toml.

    Raises:
        ConfigurationError: The file cannot be read, or one of their settings is unknown, of the wrong type or out of
            range.
    """
    return _checked(path, read_toml(path), [])


def load_service_config(path: Path) -> ServerConfig:
    """Reads a server.toml, which has only the sections `[server]` and `[limits]`.

    Raises:
        ConfigurationError: As `load_server_config`, and for any other section.
    """
    values = read_toml(path)
    return _checked(path, values, [_further_section(name) for name in values if name not in SETTINGS])


def _checked(path: Path, values: dict[str, Any], problems: list[str]) -> ServerConfig:
    """Returns checked settings. Raises ConfigurationError with `problems` and all others."""
    try:
        config = ServerConfig.model_validate(values)
    except ValidationError as error:
        raise ConfigurationError(f"{path}: {'; '.join([*problems, sentences(error, SETTINGS)])}") from error
    if problems:
        raise ConfigurationError(f"{path}: {'; '.join(problems)}")
    return config


def _further_section(name: str) -> str:
    if name not in RUN_SECTIONS:
        return f"[{name}]: unknown section{did_you_mean(name, [*SETTINGS, *RUN_SECTIONS])}"
    return (
        f"[{name}] belongs to a run, but the file has no section [run]; add [run], or keep only [server] and [limits] "
        "to serve runs made with `fleetdistill runs create`"
    )


RUN_SECTIONS = ("run", "contract", "model", "method", "proxy", "evaluation", "engine")
"""Sections of a run.toml that a server.toml does not have."""
SETTINGS = {"server": list(ServerSection.model_fields), "limits": list(Limits.model_fields)}
"""Known settings of each section."""
