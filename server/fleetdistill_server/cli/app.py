"""The command line: `fleetdistill serve | simulate | methods | runs | devices | export | pki | enrol`.

Commands are thin: they read options, call one function, and print a table or JSON. Exit statuses: 0 done, 1 an error
of ours, printed as one sentence, 2 wrong usage.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from rich.console import Console

from fleetdistill.errors import ConfigurationError
from fleetdistill.knowledge import Weights
from fleetdistill.methods.outside import import_modules
from fleetdistill.version import VERSION
from fleetdistill_server.cli.options import (
    DEFAULT_STORE,
    IdentityOption,
    ImportOption,
    JsonOption,
    ServerOption,
    StoreOption,
    counted,
    one_sentence,
    open_store,
    seconds_of,
    show,
)
from fleetdistill_server.cli.pki import devices_revoke, enrol, pki_app
from fleetdistill_server.cli.remote import connect
from fleetdistill_server.cli.runs import runs_cancel, runs_delete
from fleetdistill_server.cli.serve import serve
from fleetdistill_server.methods.traffic import Sizes
from fleetdistill_server.service.heartbeat import served
from fleetdistill_server.service.serve_lock import served_run
from fleetdistill_server.start import INTERRUPTED
from fleetdistill_server.views import runs as views
from fleetdistill_server.views.units import readable_bytes

if TYPE_CHECKING:
    from fleetdistill_server.simulation.spec.settings import Simulation
    from fleetdistill_server.store.retention import Freed

app = typer.Typer(
    help="Federated knowledge distillation for fleets of edge devices.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # of every command: Rich would take [server] for markup and swallow it
)
runs_app = typer.Typer(help="What the runs of a store did.", no_args_is_help=True)
app.add_typer(runs_app, name="runs")

app.add_typer(pki_app, name="pki")
app.command("enrol")(enrol)
devices_app = typer.Typer(invoke_without_command=True)
app.add_typer(devices_app, name="devices")
devices_app.command("revoke")(devices_revoke)

_SIZES = Sizes()
_FIELDS = {
    "model": ("models",),
    "set_": ("settings",),
    "import_": ("modules",),
    "controls": ("with_alone", "with_fedavg"),
}
"""Options of `simulate` that have another name in `Simulation`."""


@app.callback(invoke_without_command=True)
def _version(version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False) -> None:
    if version:
        typer.echo(VERSION)
        raise typer.Exit


app.command("serve")(serve)


@app.command()
@one_sentence
def simulate(
    context: typer.Context,
    method: Annotated[str, typer.Option(help="Name of the method.")] = "feddkc",
    import_: ImportOption = None,
    link: Annotated[str, typer.Option(help="memory (one process) or grpc (a process each).")] = "memory",
    dataset: Annotated[
        str, typer.Option(help="digits, fashion-mnist, mnist, cifar10, cifar100, emnist-letters or femnist-digits.")
    ] = "digits",
    data_dir: Annotated[
        Path | None, typer.Option(envvar="FLEETDISTILL_DATA", help="Where data sets lie or are downloaded to.")
    ] = None,
    devices: Annotated[int, typer.Option(help="Number of devices.")] = 5,
    model: Annotated[
        list[str] | None, typer.Option(help="A device model, dealt out in turn; may be given several times.")
    ] = None,
    predictor: Annotated[
        list[str] | None,
        typer.Option(help="A device's own predictor, for classstats with predictor=trained; dealt out, repeatable."),
    ] = None,
    partition: Annotated[str, typer.Option(help="How data are split over devices.")] = "dirichlet_by_class",
    alpha: Annotated[float, typer.Option(help="Concentration of the Dirichlet partitions.")] = 0.5,
    classes_per_device: Annotated[int, typer.Option(help="Classes of a device, for classes_* and class_shards.")] = 2,
    validation_share: Annotated[
        float, typer.Option(help="Share of each device's samples that decide whether its model is replaced.")
    ] = 0.0,
    rounds: Annotated[
        int | None, typer.Option(help="Rounds to complete; by default 30, or 1 for a method of one exchange.")
    ] = None,
    control_rounds: Annotated[
        int | None, typer.Option(help="Rounds of the controls; by default the method's, or 30 beside one exchange.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Decides partition, models and batches.")] = 0,
    set_: Annotated[
        list[str] | None, typer.Option("--set", help="A setting of the method, such as refinement=kkr; repeatable.")
    ] = None,
    image_size: Annotated[int | None, typer.Option(help="Pixels a side that the images are averaged down to.")] = None,
    train_limit: Annotated[int | None, typer.Option(help="At most this many training images.")] = None,
    test_limit: Annotated[int | None, typer.Option(help="At most this many test images.")] = None,
    torch_device: Annotated[str, typer.Option(help="Where the server half computes: auto, cpu, cuda.")] = "auto",
    controls: Annotated[
        bool, typer.Option("--controls/--no-controls", help="Also train every device alone, and with FedAvg.")
    ] = True,
    out: Annotated[Path, typer.Option(help="Folder for report.json, fleet.png and the models.")] = Path(
        "out/simulation"
    ),
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on with the simulation in the folder, with its settings.")
    ] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the simulation in the folder.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Simulates a fleet. Example: fleetdistill simulate --link grpc --rounds 10 --set refinement=kkr

    Ctrl-C ends it with a report of the rounds so far; --resume goes on from there.
    """
    from fleetdistill_server.simulation.spec.settings import Simulation, not_begun

    if resume and overwrite:
        raise ConfigurationError("--resume and --overwrite exclude each other; give one of them")
    wanted = Simulation(
        method=method,
        modules=tuple(import_ or ()),
        settings=dict(_setting(one) for one in set_ or []),
        dataset=dataset,
        data_dir=data_dir,
        devices=devices,
        models=tuple(model or ()),
        predictors=tuple(predictor or ()),
        partition=partition,
        alpha=alpha,
        classes_per_device=classes_per_device,
        validation_share=validation_share,
        rounds=rounds,
        control_rounds=control_rounds,
        seed=seed,
        link=link,  # type: ignore[arg-type]  # checked by simulate, with a sentence
        image_size=image_size,
        train_limit=train_limit,
        test_limit=test_limit,
        torch_device=torch_device,
        with_alone=controls,
        with_fedavg=controls,
        out=out,
    )
    try:
        _simulate(context, wanted, "resume" if resume else "overwrite" if overwrite else "refuse", as_json)
    except KeyboardInterrupt:  # in the seconds in which torch is imported
        typer.echo(not_begun(out), err=True)
        raise typer.Exit(INTERRUPTED) from None


def _simulate(
    context: typer.Context, wanted: Simulation, if_there: Literal["refuse", "overwrite", "resume"], as_json: bool
) -> None:
    from fleetdistill_server.simulation.fleet import Interrupted
    from fleetdistill_server.simulation.folder import saved_simulation
    from fleetdistill_server.simulation.show import interrupted_line, simulate_and_show

    if if_there == "resume":
        wanted = _with_given(context, saved_simulation(wanted.out), wanted)
    try:
        simulate_and_show(wanted, if_there=if_there, as_json=as_json)
    except Interrupted as interrupted:
        typer.echo(interrupted_line(interrupted, wanted.out), err=True)
        raise typer.Exit(INTERRUPTED) from None


def _with_given(context: typer.Context, saved: Simulation, wanted: Simulation) -> Simulation:
    """A saved simulation with the options that stand on the command line; one that differs is refused later."""
    given = {
        name
        for option in context.params
        if (source := context.get_parameter_source(option)) is not None and source.name == "COMMANDLINE"
        for name in _FIELDS.get(option, (option,))
    }
    changes = {one.name: getattr(wanted, one.name) for one in dataclasses.fields(wanted) if one.name in given}
    return dataclasses.replace(saved, **changes)


@app.command()
@one_sentence
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
    extractor_parameters: Annotated[
        int, typer.Option(help="Trainable numbers of the extractor, where it travels alone.")
    ] = _SIZES.extractor.parameters,
    rounds: Annotated[int, typer.Option(help="Rounds of a run, for methods whose rounds differ.")] = 30,
    generator_parameters: Annotated[
        int, typer.Option(help="Trainable numbers of DaFKD's generator.")
    ] = _SIZES.generator.parameters,
    channels: Annotated[
        int | None, typer.Option(help="Channels of the features, which uint8 scales apart; none: each number is one.")
    ] = None,
    layer_features: Annotated[
        int | None, typer.Option(help="Numbers of FedD2S's features at its distillation layer; none: the last layer.")
    ] = None,
    layer_channels: Annotated[int | None, typer.Option(help="Channels at that layer; none: as above.")] = None,
    head_parameters: Annotated[int, typer.Option(help="Trainable numbers above that layer.")] = 0,
    knowledge_type: Annotated[
        str, typer.Option(help="float16, float32 or uint8, for features and logits.")
    ] = "float16",
    import_: ImportOption = None,
    as_json: JsonOption = False,
) -> None:
    """Lists the methods: what leaves, what they need, bytes. Example: fleetdistill methods --parameters 25000"""
    from fleetdistill_server.cli.method_table import methods as methods_view

    import_modules(import_ or (), "--import")

    sizes = Sizes(
        samples=samples,
        features=features,
        classes=classes,
        model=Weights(parameters, buffer_bytes),
        proxy_samples=proxy_samples,
        embedding=embedding,
        generator=Weights(generator_parameters),
        channels=channels,
        layer_features=layer_features,
        layer_channels=layer_channels,
        head=Weights(head_parameters),
        extractor=Weights(extractor_parameters),
    )
    show(methods_view(sizes, knowledge_type, rounds), as_json)


@runs_app.command("list")
@one_sentence
def runs_list(
    store: StoreOption = DEFAULT_STORE,
    server: ServerOption = None,
    identity: IdentityOption = None,
    as_json: JsonOption = False,
) -> None:
    """Lists the runs of a store, or of a server. Example: fleetdistill runs list --json"""
    if server is not None:
        with connect(server, identity) as remote:
            show(remote.runs(), as_json)
        return
    show(views.runs(open_store(store), served(store)), as_json)


@runs_app.command("show")
@one_sentence
def runs_show(
    run: str,
    store: StoreOption = DEFAULT_STORE,
    server: ServerOption = None,
    identity: IdentityOption = None,
    as_json: JsonOption = False,
) -> None:
    """Shows a run's rounds, figures and events. Example: fleetdistill runs show digits"""
    if server is not None:
        with connect(server, identity) as remote:
            show(remote.run(run), as_json)
        return
    show(views.run(open_store(store), run, served(store)), as_json)


@runs_app.command("prune")
@one_sentence
def runs_prune(
    run: str,
    store: StoreOption = DEFAULT_STORE,
    keep_rounds: Annotated[
        int | None, typer.Option(help="Closed rounds to keep, the newest first; by default [server] keep_rounds.")
    ] = None,
    older_than: Annotated[
        str | None, typer.Option(help="Only rounds that ended so long ago: a number and d, h or m, such as 30d.")
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what would go.")] = False,
) -> None:
    """Deletes old rounds' payloads, events and figures. Example: fleetdistill runs prune digits --keep-rounds 1"""
    from fleetdistill_server.store.retention import prune

    pruned = prune(
        open_store(store),
        run,
        keep_rounds=keep_rounds,
        older_than_seconds=None if older_than is None else seconds_of("--older-than", older_than),
        dry_run=dry_run,
        served=served_run(store),
    )
    what = f"{counted(pruned.rounds, 'round')} with {counted(pruned.events, 'event')}, "
    what += f"{counted(pruned.figures, 'figure')}, {_payloads(pruned.freed)}"
    typer.echo(f"would free {what}" if dry_run else f"freed {what}")
    if pruned.later.payloads:
        typer.echo(f"{_payloads(pruned.later)} written within the hour: left to the server, which deletes them later")


@runs_app.command("rollback")
@one_sentence
def runs_rollback(
    run: str,
    to: Annotated[int, typer.Option("--to", help="The round whose end the run goes back to; 0: before the first.")],
    store: StoreOption = DEFAULT_STORE,
) -> None:
    """Sets a run back to an earlier round's state. Example: fleetdistill runs rollback digits --to 12"""
    from fleetdistill_server.service import serve_lock
    from fleetdistill_server.store.rollback import roll_back

    opened = open_store(store)
    with serve_lock.take(store, run):  # no server may work on it meanwhile
        done = roll_back(opened, run, to)
    undone, completed = counted(done.undone, "round"), counted(done.completed_rounds, "completed round")
    typer.echo(f"run {run!r} is back after round {to}: {undone} undone, {completed} left; start it again to go on")


@app.command()
@one_sentence
def backup(
    out: Annotated[Path, typer.Argument(help="A directory that is not there yet, or empty.")],
    store: StoreOption = DEFAULT_STORE,
) -> None:
    """Copies a store, also while it is served. Example: fleetdistill backup /backups/today"""
    from fleetdistill_server.store.backup import backup as make_backup

    made = make_backup(store, out)
    for one in made.lost:
        typer.echo(f"warning: not in the backup: {one}", err=True)
    typer.echo(f"{out}: {counted(made.payloads, 'payload')} and the database, {readable_bytes(made.bytes)}")


@app.command()
@one_sentence
def restore(
    backup: Annotated[Path, typer.Argument(help="What `fleetdistill backup` made.")],
    store: StoreOption = DEFAULT_STORE,
) -> None:
    """Makes a store of a backup. Example: fleetdistill restore /backups/today --store fleetdistill-store"""
    from fleetdistill_server.store.backup import restore as make_store

    payloads = make_store(backup, store)
    typer.echo(f"{store}: {counted(payloads, 'payload')} and the database; `fleetdistill serve` goes on from there")


runs_app.command("cancel")(runs_cancel)
runs_app.command("delete")(runs_delete)


@runs_app.command("watch")
@one_sentence
def runs_watch(
    run: str,
    store: StoreOption = DEFAULT_STORE,
    server: ServerOption = None,
    identity: IdentityOption = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object a line.")] = False,
) -> None:
    """Follows a run until it is over; Ctrl-C ends it. Example: fleetdistill runs watch digits"""
    from fleetdistill_server.views.watch import show_changes, watch

    if server is not None:
        with connect(server, identity) as remote:
            show_changes(remote.follow(run), as_json=as_json, console=Console())
        return
    watch(open_store(store), run, as_json=as_json, console=Console())


@devices_app.callback()
@one_sentence
def devices(
    context: typer.Context,
    store: StoreOption = DEFAULT_STORE,
    run: Annotated[str | None, typer.Option(help="Only this run.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Lists the devices that checked in. Example: fleetdistill devices --run digits"""
    if context.invoked_subcommand is None:
        show(views.devices(open_store(store), run), as_json)


@devices_app.command("forget")
@one_sentence
def devices_forget(run: str, device: str, store: StoreOption = DEFAULT_STORE) -> None:
    """Deletes a device's part and payloads in a run. Example: fleetdistill devices forget digits camera-7"""
    from fleetdistill_server.engine.forgetting import ask_to_forget

    done = ask_to_forget(open_store(store), run, device, served=served_run(store))
    later = "are deleted before the run's next round; if the run is over, give this command again"
    when = "are deleted" if done else later
    typer.echo(
        f"{device} takes no part in run {run!r} any more; its part in the method's state and its payloads {when}. "
        "Its id, figures and byte counts stay in the run's history, and its share in what was averaged or learned of "
        "many devices, if the method does either; backups keep what they have"
    )


@app.command()
@one_sentence
def export(
    run: str,
    store: StoreOption = DEFAULT_STORE,
    out: Annotated[Path | None, typer.Option(help="File to write; RUN-server.onnx by default.")] = None,
) -> None:
    """Writes the server's model of a run as ONNX. Example: fleetdistill export digits --out teacher.onnx"""
    from fleetdistill_server.engine.export import export_server_model

    report = export_server_model(open_store(store), run, out or Path(f"{run}-server.onnx"))
    typer.echo(f"{report.path}: {report.bytes:,} bytes, agrees with PyTorch to {report.max_difference:.1e}")


def _payloads(freed: Freed) -> str:
    return f"{counted(freed.payloads, 'payload')} ({readable_bytes(freed.bytes)})"


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
