"""`fleetdistill audit`: what a curious server learns from what a run's method sends."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fleetdistill.errors import ConfigurationError
from fleetdistill_console.tables import show
from fleetdistill_server.cli.options import JsonOption, report_errors


@report_errors
def audit(
    config: Annotated[Path, typer.Argument(help="Path of the run.toml whose method and models are audited.")],
    data: Annotated[
        str,
        typer.Option(help="Public set in place of the devices' data: an .npz file, or a data set such as digits."),
    ],
    rounds: Annotated[int | None, typer.Option(help="Rounds to run; default: 5, or what the method needs.")] = None,
    devices: Annotated[int, typer.Option(help="Number of devices.")] = 5,
    model: Annotated[
        list[str] | None,
        typer.Option(help="Device model: a name, or package.module:factory. Repeat to assign several in turn."),
    ] = None,
    rows: Annotated[
        int, typer.Option(help="Rows that the devices train on together, at most half of the public set.")
    ] = 1500,
    alpha: Annotated[float, typer.Option(help="Concentration of the Dirichlet partition by class.")] = 0.5,
    seed: Annotated[int, typer.Option(help="Seed of the partition, the models and the batches.")] = 0,
    pictures: Annotated[
        bool, typer.Option("--pictures", help="Also reconstruct images from the messages, to pictures.png.")
    ] = False,
    other: Annotated[
        str, typer.Option(help="With --pictures: public images of another kind, for a second decoder; like --data.")
    ] = "",
    out: Annotated[Path, typer.Option(help="Output directory for audit.json and pictures.png.")] = Path("out/audit"),
    as_json: JsonOption = False,
) -> None:
    """Attacks what a run's devices send. Example: fleetdistill audit run.toml --data digits

    The run's method and models run in memory on a public set, and every part that a device sends is attacked with
    everything that the server knows. No private row is needed or read. `fleetdistill operators` lists operators' calls.
    """
    from fleetdistill_lab.audit.audit import Audit, record_run, report
    from fleetdistill_lab.audit.output import draw, tables, view, write_json
    from fleetdistill_lab.audit.pictures import reconstruct
    from fleetdistill_lab.audit.public_set import kinds_of_images, read_public, split_public
    from fleetdistill_server.config.run_config import load_run_config

    if other and not pictures:
        raise ConfigurationError("--other has no effect without --pictures; add it, or remove --other")
    loaded = load_run_config(config)
    wanted = Audit(
        config=loaded,
        data=read_public(data, loaded.contract),
        rounds=rounds,
        devices=devices,
        models=tuple(model or ()),
        rows=rows,
        alpha=alpha,
        seed=seed,
    )
    public = split_public(wanted.data, rows, seed)
    kinds = kinds_of_images(public, other, loaded.contract)
    recorded = record_run(wanted, public)
    made = reconstruct(recorded, public, kinds) if pictures else None
    result = report(wanted, public, recorded)
    shown = view(result, made)
    files = [write_json(shown, out), *([draw(made, out / "pictures.png")] if made else [])]
    show(shown, as_json, tables)
    if not as_json:
        typer.echo(", ".join(map(str, files)))
    result.check_bound()
