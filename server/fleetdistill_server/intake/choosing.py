"""Chooses the run of a device that says what it can do, instead of naming a run."""

from __future__ import annotations

from collections.abc import Callable

from fleetdistill.errors import RefusedError
from fleetdistill.link.abilities import differences
from fleetdistill.wire.codes import Code
from fleetdistill.wire.v1 import contract_pb2, service_pb2
from fleetdistill_server.store.records import Run
from fleetdistill_server.store.states import JOINABLE
from fleetdistill_server.store.store import Store

_NAMED = 5
_LONGEST = 900


def fitting_run(
    store: Store, abilities: service_pb2.Abilities, contract_of: Callable[[str], contract_pb2.Contract]
) -> str:
    """Returns the name of the only open run that fits a device.

    Args:
        store: Store that contains the runs.
        abilities: What the device can do.
        contract_of: Returns the contract of a prepared run.

    Raises:
        RefusedError: No open run fits, or several do; or none fits yet while runs are being prepared.
    """
    runs = [run for run in store.runs.all() if run.status in JOINABLE]
    prepared = [run for run in runs if run.contract]
    wrong = {run.name: _differences(contract_of(run.name), run, abilities) for run in prepared}
    fitting = [name for name, found in wrong.items() if not found]
    if len(fitting) == 1:
        return fitting[0]
    if len(fitting) > 1:
        raise RefusedError(
            Code.UNKNOWN_RUN,
            f"{len(fitting)} open runs fit the device: {_list_names(fitting)}; set Server(run=...) to one of them",
        )
    if len(prepared) < len(runs) or not runs:
        text = "the server has no open run" if not runs else "runs are being prepared"
        raise RefusedError(Code.NOT_READY, f"no run fits the device yet: {text}")
    listed = "; ".join(f"{name!r}: {', '.join(found)}" for name, found in list(wrong.items())[:_NAMED])
    more = f"; and {len(wrong) - _NAMED} more runs" if len(wrong) > _NAMED else ""
    raise RefusedError(Code.UNKNOWN_RUN, f"no open run fits the device: {listed[:_LONGEST]}{more}")


def _differences(contract: contract_pb2.Contract, run: Run, abilities: service_pb2.Abilities) -> list[str]:
    result = differences(contract, abilities)
    needs = contract.requirements
    if abilities.model and (needs.same_architecture or needs.same_extractor):
        models = run.config.get("model", {})
        wanted = [models[name] for name in ("device", "extractor") if models.get(name)]
        if wanted and abilities.model not in wanted:
            result.append(f"the device has model {abilities.model[:64]!r}, the run {' or '.join(map(repr, wanted))}")
    return result


def _list_names(names: list[str]) -> str:
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return f"{', '.join(names[:_NAMED])}{more}"
