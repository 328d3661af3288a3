"""Options of `simulate` for simulated time: when devices are available, and how fast they are."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from fleetdistill_lab.simulation.timing.behaviour import FleetBehaviour

FleetOption = Annotated[
    Path | None, typer.Option("--fleet", help="TOML file whose section [fleet] describes the fleet in simulated time.")
]
AvailabilityOption = Annotated[
    str | None,
    typer.Option(help="When devices are available: always, or diurnal:SHARE, once per day for that share of it."),
]
ComputeOption = Annotated[
    str | None,
    typer.Option(help="Devices' speeds: constant, or lognormal:SIGMA, the spread of the logarithm."),
]
ChurnOption = Annotated[
    float | None, typer.Option(help="Mean number of times per available day that a device loses contact.")
]
JoinLateOption = Annotated[float | None, typer.Option(help="Share of the devices that join during the first day.")]
TracesOption = Annotated[
    Path | None, typer.Option(help="CSV or JSON file of your own traces: device, start, end, and optionally speed.")
]
DeadlineOption = Annotated[
    float | None, typer.Option("--deadline", help="Simulated seconds until an ask's deadline; default: 600.")
]
OverSelectionOption = Annotated[
    float, typer.Option(help="Devices to ask for each of --per-round; the round ends with the fastest.")
]
MinDevicesOption = Annotated[
    int | None,
    typer.Option(
        help="Devices that must be present for a round to begin; default: all, in simulated time --per-round."
    ),
]
BEHAVIOUR = ("fleet", "availability", "compute", "churn", "join_late", "traces")
"""Names of the options that describe the fleet's behaviour."""


def behaviour_of(fleet: Path | None, traces: Path | None, **given: Any) -> FleetBehaviour | None:
    """Returns the behaviour that a file and options describe; an option replaces the file's setting.

    Args:
        fleet: TOML file with the section [fleet], or None.
        traces: File of traces, or None.
        given: Further options by name; None if not given.

    Returns:
        The behaviour; None if there is neither a file nor an option.

    Raises:
        ConfigurationError: A setting is unknown or out of range.
        DataError: The file of traces cannot be read.
    """
    from fleetdistill_lab.simulation.timing.behaviour import FleetBehaviour, read_behaviour
    from fleetdistill_lab.simulation.timing.traces import read_traces

    settings = {} if fleet is None else read_behaviour(fleet)
    settings |= {name: value for name, value in given.items() if value is not None}
    if traces is not None:
        settings["traces"] = read_traces(traces)
    return FleetBehaviour(**settings) if settings or fleet is not None else None
