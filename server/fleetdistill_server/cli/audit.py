"""`fleetdistill audit`: what a curious server learns from what a run's method sends."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fleetdistill_server.cli.options import JsonOption, report_errors, show


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
    out: Annotated[Path, typer.Option(help="Output directory for audit.json.")] = Path("out/audit"),
    as_json: JsonOption = False,
) -> None:
    """Attacks what a run's devices send. Example: fleetdistill audit run.toml --data digits

    The run's method and models run in memory on a public set, and every part that a device sends is attacked with
    everything that the server knows. No private row is needed or read.
    """
    from fleetdistill_server.audit.audit import Audit
    from fleetdistill_server.audit.audit import audit as run_audit
    from fleetdistill_server.audit.public_set import read_public
    from fleetdistill_server.audit.table import view, write_json
    from fleetdistill_server.config.run_config import load_run_config

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
    shown = view(run_audit(wanted))
    file = write_json(shown, out)
    show(shown, as_json)
    if not as_json:
        typer.echo(str(file))
