"""Checks that `fleetdistill serve` makes before it starts a run, and the report of `serve --check`."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import stat
import subprocess
import sys
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

from fleetdistill.errors import ConfigurationError, FleetDistillError, StoreError, in_words
from fleetdistill.link.credentials import AUTHORITIES
from fleetdistill.link.grpc_link import is_loopback
from fleetdistill.methods.classstats_private.merge import rows_needed
from fleetdistill.methods.classstats_secure.config import CERTIFICATES, SumSettings
from fleetdistill.models import MODELS, resolve
from fleetdistill.state.durable import open_to_others
from fleetdistill.wire.kind import DEFAULT_COLUMNS, allow_line
from fleetdistill_server.config.run_config import RunConfig
from fleetdistill_server.config.section import read_toml
from fleetdistill_server.config.server_config import OF_A_RUN, ServerConfig, ServerSection, load_server_config
from fleetdistill_server.extras import require
from fleetdistill_server.front.tls import check_files
from fleetdistill_server.security.pki import CA_KEY, SERVER
from fleetdistill_server.service.engine_process import engines_at_once
from fleetdistill_server.service.processes import child_environment
from fleetdistill_server.service.registration import is_prepared, register
from fleetdistill_server.service.serve_lock import SERVED_STORE, is_served, last_served, served_store, serving
from fleetdistill_server.store.location import Location, has_store
from fleetdistill_server.store.store import Store, open_for_trial
from fleetdistill_server.texts import SUMS_UNREVIEWED, counted, readable_bytes
from fleetdistill_server.tracing.spans import check_traces
from fleetdistill_server.views.certificates import not_valid
from fleetdistill_server.views.health import disk_problems
from fleetdistill_server.views.runs import UNTIL_STOPPED

_LOOK_SECONDS = 0.1
_OPTIONAL = {
    "database": ("psycopg", "postgres"),
    "blobs": ("s3fs", "s3"),
    "pki": ("cryptography", "tls"),
    "metrics": ("prometheus_client", "server"),
}
"""Settings of [server] that need an optional module, with the module and the extra that installs it."""
_OF_TLS = ("enrol_listen", "certificate_days")
"""Settings of [server] that only a server with TLS has."""


def check_security(server: ServerSection, insecure: bool) -> str:
    """Rejects plain text on public addresses and an unusable PKI; returns a warning or "".

    Raises:
        ConfigurationError: The server must not listen with these settings.
    """
    tls = server.tls()
    if tls is not None:
        check_files(tls.directory)
        return ""
    if is_loopback(server.listen):
        return ""
    if not insecure:
        raise ConfigurationError(
            f"[server] listen is {server.listen!r}, which is not a loopback address, and TLS is not configured. "
            "Create a PKI with `fleetdistill pki init` and set [server] pki, listen on 127.0.0.1 behind a tunnel, or "
            "allow plain text with --insecure"
        )
    return f"serving in plain text on {server.listen}; anyone on the network path can read and modify the traffic"


def without_access(server: ServerSection) -> list[str]:
    """Returns a sentence about the first place of the store, and of the PKI, that this user cannot use."""
    store, tls = Path(server.store), server.tls()
    places: list[tuple[Path, Iterable[Path], int]] = [(store, _in_store(store), os.R_OK | os.W_OK)]
    if tls is not None:
        places.append((tls.directory, (tls.directory, tls.directory / SERVER, tls.directory / AUTHORITIES), os.R_OK))
    result = []
    for root, paths, mode in places:
        if path := next((path for path in paths if not _may_use(path, mode)), None):
            lacks = "written" if mode & os.W_OK else "read"
            result.append(
                f"{path} cannot be {lacks} by this user{_owner_of(path)}; run `chown -R USER {root}` as root with the "
                "server's user, `chmod -R u+rwX` if its mode is the reason, and fleetdistill's commands as this user"
            )
    return result


def _in_store(store: Path) -> Iterator[Path]:
    """Yields a store's directories and the files of its first level, each before what it contains."""
    yield store
    if store.is_dir():
        for path in sorted(store.iterdir()):
            yield path
            if path.is_dir():
                yield from (inner for inner in sorted(path.iterdir()) if inner.is_dir())


def _may_use(path: Path, mode: int) -> bool:
    effective = os.access in os.supports_effective_ids
    try:
        mode |= os.X_OK if path.is_dir() else 0
        return os.access(path, mode, effective_ids=effective) or not path.exists()
    except PermissionError:
        return False


def _owner_of(path: Path) -> str:
    try:
        return f" (owner {path.owner()}, mode {stat.S_IMODE(path.stat().st_mode):o})"
    except (OSError, KeyError):
        return ""


def check_access(server: ServerSection) -> None:
    """Raises ConfigurationError if this user cannot use the store or the PKI."""
    if found := without_access(server):
        raise ConfigurationError("; ".join(found))


def check_store_is_there(server: ServerSection) -> None:
    """Raises ConfigurationError for a store that is a file, and for a missing one if the PKI has served one."""
    if (place := Path(server.store)).exists() and not place.is_dir():
        raise ConfigurationError(f"[server] store is {server.store!r}, which is a file; name a directory")
    tls = server.tls()
    served = "" if tls is None or server.database else served_store(tls.directory)
    if tls is not None and served and not has_store(Path(server.store)):
        raise ConfigurationError(
            f"there is no store in {Path(server.store).absolute()}, but the PKI {tls.directory} has served one in "
            f"{served}. Devices leave a server that does not know their run, and an empty store has no revocations. "
            "Mount its disk, correct [server] store, or restore a backup; to begin with an empty store, delete "
            f"{tls.directory / SERVED_STORE}"
        )


def readable_keys(pki: Path) -> list[str]:
    """Returns a sentence about each key of a PKI that other users can read."""
    paths = [path for name in (SERVER, CA_KEY) if (path := pki / name).is_file()]
    exposed = [path for path in paths if stat.S_IMODE(path.stat().st_mode) & 0o077]
    return [f"other users can read the key in {path}; run `chmod 600 {path}`" for path in exposed]


def check_keys(server: ServerSection) -> None:
    """Raises ConfigurationError if other users can read a key of the server's PKI."""
    tls = server.tls()
    if tls is not None and (exposed := readable_keys(tls.directory)):
        raise ConfigurationError("; ".join(exposed))


def check_certificates(config: RunConfig) -> None:
    """Raises ConfigurationError for a run that needs devices with certificates, on a server without TLS."""
    method = config.method_config()
    if isinstance(method, SumSettings) and method.keys == CERTIFICATES and config.server.tls() is None:
        raise ConfigurationError(
            "[method] keys is 'certificates', but [server] pki is not set, so the devices have no certificates. Create "
            "a PKI with `fleetdistill pki init` and set [server] pki, or set keys to 'roster' or 'unsigned'"
        )


def check_fleet(config: RunConfig) -> None:
    """Raises ConfigurationError for a run that needs more devices than the server admits."""
    if config.limits.devices < config.run.min_devices:
        raise ConfigurationError(
            f"[limits] devices is {config.limits.devices}, but [run] min_devices is {config.run.min_devices}, so no "
            "round could begin; admit more devices, or set min_devices to at most this number"
        )


RUN_CHECKS = (check_certificates, check_fleet)
"""Checks of a run's settings that each start makes besides those of its models and data."""


def check_extras(server: ServerSection) -> None:
    """Raises ConfigurationError if a package that a setting needs is not installed."""
    for setting, (module, extra) in _OPTIONAL.items():
        if getattr(server, setting):
            require(f"[server] {setting}", module, extra)
    check_traces(server.traces)


def check_new_run(path: Path, config: RunConfig, stopped: threading.Event) -> None:
    """Builds the models and reads the data of a run in a separate process, unless the run is already prepared.

    Args:
        path: Path of run.toml.
        config: Settings read from it.
        stopped: Cancels the check when set.

    Raises:
        ConfigurationError: The models or data cannot be used; nothing was stored.
    """
    with _existing_store(config.server) as store:
        if store is not None and is_prepared(store, config):
            return
    command = [sys.executable, "-m", "fleetdistill_server.engine.preflight", str(path)]
    environment = child_environment()
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, start_new_session=True, env=environment
    ) as process:
        while process.poll() is None and not stopped.wait(_LOOK_SECONDS):
            pass
        if process.poll() is None:
            process.kill()
            return
        output = process.stdout.read().strip() if process.stdout is not None else ""
    if process.returncode:
        raise ConfigurationError(
            output or f"checking the models failed with exit status {process.returncode}; see the log"
        )


def problems(config: RunConfig, insecure: bool) -> list[str]:
    """Returns every error that prevents a run from being served; nothing is stored."""
    model = lambda: _check_device_model(config.model.device)  # noqa: E731
    checks = (lambda: _check_store(config), lambda: _built(config), model, lambda: _evaluation(config))
    settings = [partial(check, config) for check in RUN_CHECKS]
    return _failures(*_of_server(config.server, config.run.name, insecure), *settings, *checks)


def problems_of_file(path: Path, error: ConfigurationError, insecure: bool) -> list[str]:
    """Returns the error of a run.toml or server.toml whose settings cannot be used, and all errors besides."""
    checks: list[Callable[[], object]] = []
    with contextlib.suppress(ConfigurationError):  # then `error` says what is wrong with the file or with [server]
        sections = read_toml(path)
        run, model = (section if isinstance(section := sections.get(name), dict) else {} for name in ("run", "model"))
        if isinstance(device := model.get("device"), str):
            checks.append(lambda: _check_device_model(device))
        checks += _of_server(load_server_config(path).server, str(run.get("name", "")), insecure)
    return [str(error), *(failure for failure in _failures(*checks) if failure not in str(error))]


def in_use(config: ServerConfig) -> ServerConfig:
    """Returns the settings of the server that uses the store now, which is named as given; without one, those given."""
    directory = Path(config.server.store)
    started = None if serving(directory) is None else last_served(directory)
    if started is None:
        return config
    return started.model_copy(update={"server": started.server.model_copy(update={"store": config.server.store})})


def not_in_use(path: Path) -> str:
    """Returns in a sentence which settings of a file its server does not use yet; empty if there are none."""
    wanted = load_server_config(path)
    served_now = serving(Path(wanted.server.store))
    if served_now is None or served_now.run != read_toml(path).get("run", {}).get("name", ""):
        return ""  # the running server is that of another file
    old, new = (
        config.model_copy(update={"server": config.server.absolute()}).model_dump()
        for config in (in_use(wanted), wanted)
    )
    differ = [
        f"[{section}] {name} = {json.dumps(value)}, not {json.dumps(new[section][name])}"
        for section, settings in old.items()
        for name, value in settings.items()
        if value != new[section][name]
    ]
    return f"the running server has {'; '.join(differ)}; restart it to change this" if differ else ""


def service_problems(server: ServerSection, insecure: bool) -> list[str]:
    """Returns every error that prevents a server of many runs from starting; nothing is stored."""
    return _failures(*_of_server(server, "", insecure))


def cautions(server: ServerSection, *, many_runs: bool) -> list[str]:
    """Returns what does not prevent a server from starting, but should be mended."""
    result = [open_to_others(Path(server.store))]
    if many_runs and (unused := [name for name in OF_A_RUN if name in server.model_fields_set]):
        result.append(
            f"[server] {', '.join(unused)} in the file of a server of many runs has no effect: each run has its own; "
            "set it in [server] of the run's run.toml"
        )
    if not server.pki and (unused := [name for name in _OF_TLS if name in server.model_fields_set]):
        result.append(f"[server] {', '.join(unused)} has no effect without [server] pki")
    if absent := [path for path in server.data_directories if many_runs and not Path(path).is_dir()]:
        result.append(f"[server] data_directories: there is no directory {', '.join(absent)}; no run can use its data")
    return [text for text in result if text]


def service_summary(server: ServerSection) -> list[str]:
    """Returns a few lines that describe the server to be started."""
    with _existing_store(server) as store:
        names = [] if store is None else store.runs.names()
    runs = f"runs in the store: {', '.join(names) or 'none'}"
    return [f"{runs}; engines at once: {engines_at_once(server.engines_at_once)}", _listens(server)]


def _of_server(server: ServerSection, run: str, insecure: bool) -> tuple[Callable[[], object], ...]:
    checks: tuple[Callable[[], object], ...] = (
        *(partial(check, server) for check in SERVER_CHECKS),
        lambda: check_security(server, insecure),
        lambda: _raise_first(not_valid(server)),
        lambda: _raise_first(disk_problems(server, Path(server.store))),
        lambda: _check_database(server),
    )
    own = _own_addresses(server, run)
    ports = {setting: address for setting, address in _addresses(server).items() if address not in own}
    return *checks, *(partial(_check_port, setting, address) for setting, address in ports.items())


def _failures(*checks: Callable[[], object]) -> list[str]:
    result = []
    for check in checks:
        try:
            check()
        except FleetDistillError as error:
            result.append(str(error))
        except OSError as error:
            result.append(in_words(error))
    return list(dict.fromkeys(result))


def summary(config: RunConfig) -> list[str]:
    """Returns a few lines that describe the run to be served."""
    run = config.run
    built = _built(config)
    scored = _evaluation(config)
    rounds = counted(run.rounds, "round") if run.rounds else UNTIL_STOPPED
    sizes = {
        "server half": readable_bytes(built.state_bytes),
        "initial weights of a device": readable_bytes(built.initial_bytes) if built.initial_bytes else "none",
        "proxy set": counted(built.proxy_samples, "sample") if built.proxy_samples else "none",
        "evaluation": counted(scored, "sample") if scored else "none",
    }
    return [
        f"run {run.name!r}: {_progress(config)}",
        *_allowed(config),
        *_privacy(config),
        *_secure_sums(config),
        *built.extractor,
        *_range_warnings(config),
        *_pace(config),
        f"{run.method}, {rounds}, at least {counted(run.min_devices, 'device')} a round",
        ", ".join(f"{what}: {size}" for what, size in sizes.items()),
        _listens(config.server),
    ]


def _pace(config: RunConfig) -> list[str]:
    from fleetdistill_server.engine.contract import pace_warning  # imports torch

    return [f"warning: {text}"] if (text := pace_warning(config)) else []


def _listens(server: ServerSection) -> str:
    tls = server.tls()
    security = "plain text" if tls is None else f"TLS, devices enrol on {tls.enrol_listen}"
    return f"listens on {server.listen} ({security}), store {server.store}"


def _allowed(config: RunConfig) -> list[str]:
    """Returns what the devices' apps must allow besides the default; empty for nothing."""
    from fleetdistill_server.methods import server_class  # imports torch

    columns = server_class(config.run.method).columns(config.method_config())
    further = [column for column in columns if column not in DEFAULT_COLUMNS]
    if not further:
        return []
    return [f"not allowed by apps by default: {', '.join(further)}; {allow_line({*columns, *DEFAULT_COLUMNS})}"]


def _privacy(config: RunConfig) -> list[str]:
    """Returns the meaning of a private run's epsilon, and how many rows its devices need."""
    guarantee = config.method_config().guarantee
    if guarantee is None:
        return []
    devices = config.run.min_devices
    rows = rows_needed(devices, config.method_config().device_mu(devices))
    return [f"{guarantee.sentence}; with {devices} devices, about {rows:,} rows a device would do"]


def _secure_sums(config: RunConfig) -> list[str]:
    """Returns what the operator of secure sums should know; empty for other runs."""
    settings = config.method_config()
    if not settings.sums_securely:
        return []
    lines = [SUMS_UNREVIEWED]
    if settings.guarantee is None:
        lines.append("no guarantee for a row: the sums have no noise")
    if settings.keys == "roster" and not settings.roster_key:
        lines.append("roster_key is not set: one device that the roster has not endorsed lets every sum fail")
    return lines


def _built(config: RunConfig):  # type: ignore[no-untyped-def]  # its type would import torch
    from fleetdistill_server.engine.preflight import build_run

    return build_run(config)


def _evaluation(config: RunConfig) -> int:
    from fleetdistill_server.engine.preflight import evaluation_samples

    return evaluation_samples(config)


def _range_warnings(config: RunConfig) -> list[str]:
    from fleetdistill_server.engine.preflight import range_warnings

    return range_warnings(config)


def check_ports(server: ServerSection) -> None:
    """Raises ConfigurationError unless the server can listen on its ports."""
    for setting, address in _addresses(server).items():
        _check_port(setting, address)


def check_addresses(server: ServerSection) -> None:
    """Raises ConfigurationError if two settings name the same port of an address."""
    known: dict[str, str] = {}
    for setting, address in _addresses(server).items():
        if not address.endswith(":0") and address in known:
            raise ConfigurationError(
                f"[server] {known[address]} and {setting} are both {address!r}; they need two ports"
            )
        known[address] = setting


SERVER_CHECKS = (check_extras, check_access, check_store_is_there, check_keys, check_addresses)
"""Checks of `[server]` that each start makes, in their order; `serve --check` makes further ones."""


def _own_addresses(server: ServerSection, run: str) -> Collection[str]:
    """Returns the addresses in use by the server that works on the run now, or on all runs."""
    try:
        if not is_served(Path(server.store), run):
            return ()
    except StoreError:  # the check of access says why
        return ()
    started = last_served(Path(server.store))
    return _addresses(server if started is None else started.server).values()


def _addresses(server: ServerSection) -> dict[str, str]:
    tls = server.tls()
    addresses = {"listen": server.listen, **({"enrol_listen": tls.enrol_listen} if tls is not None else {})}
    return addresses | ({"metrics": server.metrics} if server.metrics else {})


def _check_port(setting: str, address: str) -> None:
    host, _, port = address.rpartition(":")
    try:
        family, kind, _, _, where = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind) as tried:
            tried.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            tried.bind(where)
    except OSError as error:
        raise ConfigurationError(f"[server] {setting}: cannot listen on {address}: {in_words(error)}") from error


def _raise_first(problems: Sequence[str]) -> None:
    for problem in problems:
        raise ConfigurationError(problem)


def _check_device_model(name: str) -> None:
    """Raises ConfigurationError for an unknown name; some methods do not build the model, because only devices run it.

    A path is not checked: its module may be only on the devices.
    """
    if name and ":" not in name:
        try:
            resolve(MODELS, "device model", name)
        except ConfigurationError as error:
            raise ConfigurationError(f"[model] device: {error}") from error


class _DryRunRollback(Exception):
    """Rolls back the transaction of the check."""


def _check_store(config: RunConfig) -> None:
    """Checks that the run can be registered in its store."""
    with _existing_store(config.server) as store:
        if store is not None:
            with contextlib.suppress(_DryRunRollback), store.transaction():
                register(store, config)
                raise _DryRunRollback


def _progress(config: RunConfig) -> str:
    with _existing_store(config.server) as store:
        run = store.runs.get(config.run.name) if store is not None else None
    if run is None:
        return "new"
    return f"{run.status}, {counted(run.completed_rounds, 'round')} completed"


def _check_database(server: ServerSection) -> None:
    """Reads the whole database, as a start does. Raises StoreError if it is damaged."""
    with _existing_store(server) as store:
        if store is not None:
            store.check()


@contextlib.contextmanager
def _existing_store(server: ServerSection) -> Iterator[Store | None]:
    directory, location = Path(server.store), Location.of(server)
    if has_store(directory):
        with open_for_trial(directory, location) as store:
            yield store
    elif location != Location():  # the database may have the store of other machines; nothing is written here
        with TemporaryDirectory() as place, open_for_trial(Path(place), location) as store:
            store.blobs.check()
            yield store
    else:
        yield None
