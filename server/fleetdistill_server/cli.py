"""The command line: `fleetdistill serve | simulate | methods | runs | devices | export`.

Commands are thin: they read options, call one function, and print a table or JSON. Exit statuses: 0 done, 1 an error
of ours, printed as one sentence, 2 wrong usage.
"""

from __future__ import annotations

import logging
import signal
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Annotated, Any, ParamSpec, TypeVar

import typer
from rich.console import Console

from fleetdistill.errors import ConfigurationError, FleetDistillError
from fleetdistill.version import VERSION
from fleetdistill_server import views
from fleetdistill_server.store import Store
from fleetdistill_server.traffic import Sizes, Weights

P = ParamSpec("P")
R = TypeVar("R")

app = typer.Typer(
    help="Federated knowledge distillation for fleets of edge devices.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
runs_app = typer.Typer(help="What the runs of a store did.", no_args_is_help=True)
app.add_typer(runs_app, name="runs")

StoreOption = Annotated[Path, typer.Option("--store", help="Directory of the store, [server] store in run.toml.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]
_PIPED_WIDTH = 240
DEFAULT_STORE = Path("fleetdistill-store")
_SIZES = Sizes()


def _one_sentence(command: Callable[P, R]) -> Callable[P, R]:
    """Turns an error of ours into one sentence on standard error and exit status 1."""

    @wraps(command)
    def wrapped(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return command(*args, **kwargs)
        except FleetDistillError as error:
            typer.echo(f"error: {error}", err=True)
            raise typer.Exit(1) from error

    return wrapped


@app.callback(invoke_without_command=True)
def _version(version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False) -> None:
    if version:
        typer.echo(VERSION)
        raise typer.Exit


@app.command()
@_one_sentence
def serve(
    config: Annotated[Path, typer.Argument(help="The run.toml.")],
    until_finished: Annotated[
        bool, typer.Option("--until-finished", help="End once the run is over and every device knows it.")
    ] = False,
    insecure: Annotated[
        bool, typer.Option("--insecure", help="Allow plain text on an address that is not the loopback.")
    ] = False,
) -> None:
    """Serves a run: front and engine, restarted when they die. Example: fleetdistill serve examples/run.toml

    Ctrl-C ends it cleanly; starting it again goes on where it was.
    """
    from fleetdistill_server.run_config import load_run_config
    from fleetdistill_server.supervisor import Supervisor

    logging.basicConfig(level=logging.INFO, format="serve: %(message)s")
    loaded = load_run_config(config)
    host = loaded.server.listen.rpartition(":")[0]
    _check_listen(loaded.server.listen, insecure)
    supervisor = Supervisor(
        config,
        loaded,
        on_listening=lambda port: typer.echo(f"run {loaded.run.name!r} is served on {host}:{port}; Ctrl-C ends it"),
    )
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda signum, frame: supervisor.stop())
    finished = supervisor.serve(
        until_finished=until_finished,
        on_finished=lambda: typer.echo(f"run {loaded.run.name!r} is finished; devices are still told so"),
    )
    typer.echo(
        "stopped; the run is finished" if finished else f"stopped; `fleetdistill serve {config}` goes on from here"
    )


@app.command()
@_one_sentence
def simulate(
    method: Annotated[str, typer.Option(help="Name of the method.")] = "feddkc",
    link: Annotated[str, typer.Option(help="memory (one process) or grpc (a process each).")] = "memory",
    dataset: Annotated[str, typer.Option(help="digits, fashion-mnist, mnist or cifar10.")] = "digits",
    data_dir: Annotated[
        Path | None, typer.Option(envvar="FLEETDISTILL_DATA", help="Where data sets lie or are downloaded to.")
    ] = None,
    devices: Annotated[int, typer.Option(help="Number of devices.")] = 5,
    model: Annotated[
        list[str] | None, typer.Option(help="A device model, dealt out in turn; may be given several times.")
    ] = None,
    partition: Annotated[str, typer.Option(help="How data are split over devices.")] = "dirichlet_by_class",
    alpha: Annotated[float, typer.Option(help="Concentration of the Dirichlet partitions.")] = 0.5,
    classes_per_device: Annotated[int, typer.Option(help="Classes of a device, for classes_* and class_shards.")] = 2,
    validation_share: Annotated[
        float, typer.Option(help="Share of each device's samples that decide whether its model is replaced.")
    ] = 0.0,
    rounds: Annotated[int, typer.Option(help="Rounds to complete.")] = 30,
    seed: Annotated[int, typer.Option(help="Decides partition, models and batches.")] = 0,
    set_: Annotated[
        list[str] | None, typer.Option("--set", help="A setting of the method, such as refinement=kkr; repeatable.")
    ] = None,
    train_limit: Annotated[int | None, typer.Option(help="At most this many training images.")] = None,
    test_limit: Annotated[int | None, typer.Option(help="At most this many test images.")] = None,
    torch_device: Annotated[str, typer.Option(help="Where the server half computes: auto, cpu, cuda.")] = "auto",
    controls: Annotated[
        bool, typer.Option("--controls/--no-controls", help="Also train every device alone, and with FedAvg.")
    ] = True,
    out: Annotated[Path, typer.Option(help="Folder for report.json, fleet.png and the models.")] = Path(
        "out/simulation"
    ),
    as_json: JsonOption = False,
) -> None:
    """Simulates a fleet. Example: fleetdistill simulate --link grpc --rounds 10 --set refinement=kkr"""
    from fleetdistill_server.simulation.settings import Simulation
    from fleetdistill_server.simulation.show import simulate_and_show

    wanted = Simulation(
        method=method,
        settings=dict(_setting(one) for one in set_ or []),
        dataset=dataset,
        data_dir=data_dir,
        devices=devices,
        models=tuple(model or ()),
        partition=partition,
        alpha=alpha,
        classes_per_device=classes_per_device,
        validation_share=validation_share,
        rounds=rounds,
        seed=seed,
        link=link,  # type: ignore[arg-type]  # checked by simulate, with a sentence
        train_limit=train_limit,
        test_limit=test_limit,
        torch_device=torch_device,
        with_alone=controls,
        with_fedavg=controls,
        out=out,
    )
    simulate_and_show(wanted, as_json=as_json)


@app.command()
@_one_sentence
def methods(
    samples: Annotated[int, typer.Option(help="Samples of one device.")] = _SIZES.samples,
    features: Annotated[
        int, typer.Option(help="Numbers in one sample's features: at the extractor's end, or FedD2S's first layer.")
    ] = _SIZES.features,
    classes: Annotated[int, typer.Option(help="Number of classes.")] = _SIZES.classes,
    parameters: Annotated[int, typer.Option(help="Trainable numbers of the model.")] = _SIZES.model.parameters,
    buffer_bytes: Annotated[int, typer.Option(help="Bytes of the model's batch-norm statistics.")] = 0,
    proxy_samples: Annotated[int, typer.Option(help="Samples of the proxy set.")] = _SIZES.proxy_samples,
    embedding: Annotated[int, typer.Option(help="Numbers that enter the model's last layer.")] = _SIZES.embedding,
    generator_parameters: Annotated[
        int, typer.Option(help="Trainable numbers of DaFKD's generator.")
    ] = _SIZES.generator.parameters,
    layer_features: Annotated[
        int | None, typer.Option(help="Numbers of FedD2S's features at its distillation layer; none: the last layer.")
    ] = None,
    head_parameters: Annotated[int, typer.Option(help="Trainable numbers above that layer.")] = 0,
    knowledge_type: Annotated[str, typer.Option(help="float16 or float32, for features and logits.")] = "float16",
    as_json: JsonOption = False,
) -> None:
    """Lists the methods: what leaves, what they need, bytes. Example: fleetdistill methods --parameters 25000"""
    from fleetdistill_server.method_table import methods as methods_view

    sizes = Sizes(
        samples=samples,
        features=features,
        classes=classes,
        model=Weights(parameters, buffer_bytes),
        proxy_samples=proxy_samples,
        embedding=embedding,
        generator=Weights(generator_parameters),
        layer_features=layer_features,
        head=Weights(head_parameters),
    )
    _show(methods_view(sizes, knowledge_type), as_json)


@runs_app.command("list")
@_one_sentence
def runs_list(store: StoreOption = DEFAULT_STORE, as_json: JsonOption = False) -> None:
    """Lists the runs of a store. Example: fleetdistill runs list --json"""
    _show(views.runs(_open(store)), as_json)


@runs_app.command("show")
@_one_sentence
def runs_show(run: str, store: StoreOption = DEFAULT_STORE, as_json: JsonOption = False) -> None:
    """Shows a run's rounds, figures and events. Example: fleetdistill runs show digits"""
    _show(views.run(_open(store), run), as_json)


@app.command()
@_one_sentence
def devices(
    store: StoreOption = DEFAULT_STORE,
    run: Annotated[str | None, typer.Option(help="Only this run.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Lists the devices that checked in. Example: fleetdistill devices --run digits"""
    _show(views.devices(_open(store), run), as_json)


@app.command()
@_one_sentence
def export(
    run: str,
    store: StoreOption = DEFAULT_STORE,
    out: Annotated[Path | None, typer.Option(help="File to write; RUN-server.onnx by default.")] = None,
) -> None:
    """Writes the server's model of a run as ONNX. Example: fleetdistill export digits --out teacher.onnx"""
    from fleetdistill_server.export import export_server_model

    report = export_server_model(_open(store), run, out or Path(f"{run}-server.onnx"))
    typer.echo(f"{report.path}: {report.bytes:,} bytes, agrees with PyTorch to {report.max_difference:.1e}")


def _check_listen(listen: str, insecure: bool) -> None:
    from fleetdistill.grpc_link import is_loopback

    if is_loopback(listen):
        return
    if not insecure:
        raise ConfigurationError(
            f"[server] listen = {listen!r} is not the loopback and there is no TLS yet: listen on 127.0.0.1 behind a "
            "tunnel, or accept plain text with --insecure"
        )
    typer.echo(f"warning: serving in plain text on {listen}; anyone on the way can read and change it", err=True)


def _setting(text: str) -> tuple[str, Any]:
    """Reads `name=value` with TOML's values; a bare word is a string."""
    import tomllib

    name, equals, value = text.partition("=")
    if not equals:
        raise ConfigurationError(f"--set {text!r}: give name=value, such as refinement=kkr")
    try:
        return name.strip(), tomllib.loads(f"value = {value}")["value"]
    except tomllib.TOMLDecodeError:
        return name.strip(), value


def _open(directory: Path) -> Store:
    if not (directory / "store.sqlite").exists():
        raise ConfigurationError(f"there is no store in {directory}; name the one of your run.toml with --store")
    return Store.open(directory)


def _show(view: views.View, as_json: bool) -> None:
    console = Console()
    if not console.is_terminal:
        console.width = _PIPED_WIDTH
    if as_json:
        typer.echo(view.json())
    else:
        console.print(*view.tables(), sep="\n\n")
