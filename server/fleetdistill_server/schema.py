"""Tables of the store, as migrations that are never changed once released; a new version adds one at the end."""

from __future__ import annotations

from sqlite_utils import Database, Migrations

migrations = Migrations("fleetdistill")


@migrations()
def m001_runs_devices_rounds(db: Database) -> None:
    db.table("runs").create(
        {
            "name": str,
            "config": str,  # JSON of the run's settings; starting the run again with others is refused
            "contract": bytes,  # serialized Contract; NULL until the engine has prepared the run
            "status": str,  # preparing, running, finished, stopped
            "reason": str,
            "completed_rounds": int,
            "next_round": int,
            "checkpoint": bytes,  # SHA-256 of the state after the last closed round
            "engine": str,  # fencing token of the engine that owns the run
            "created_at": float,
        },
        pk="name",
        not_null={"config", "status", "completed_rounds", "next_round"},
    )
    db.table("devices").create(
        {
            "run": str,
            "device": str,
            "secret_hash": bytes,
            "profile": bytes,  # serialized DeviceProfile
            "present": int,
            "first_seen": float,
            "last_seen": float,
        },
        pk=("run", "device"),
        not_null={"secret_hash", "present"},
    )
    db.table("rounds").create(
        {
            "run": str,
            "round": int,
            "status": str,  # open, closed, short
            "reason": str,
            "cohort": str,  # JSON list of device ids
            "figures": str,  # JSON of what the method reports about the round
            "started_at": float,
            "ended_at": float,
        },
        pk=("run", "round"),
        not_null={"status", "cohort"},
    )


@migrations()
def m002_asks_uploads(db: Database) -> None:
    asks = db.table("asks")
    asks.create(
        {
            "id": int,
            "run": str,
            "round": int,
            "step_number": int,
            "device": str,
            "step": str,
            "expects": str,  # JSON: part name to kind, what an answer must consist of
            "payload": bytes,  # SHA-256; NULL where the ask has no payload
            "payload_bytes": int,
            "seed": int,
            "deadline_at": float,
            "status": str,  # open, answered, out
            "reason": str,
        },
        pk="id",
        not_null={"step", "expects", "status"},
    )
    asks.create_index(["run", "round", "step_number", "device"], unique=True)
    asks.create_index(["run", "device", "status"])
    asks.create_index(["payload"])
    uploads = db.table("uploads")
    uploads.create(
        {
            "receipt": str,
            "ask": int,
            "attempt": int,
            "sha256": bytes,
            "data_bytes": int,
            "samples": int,
            "received_at": float,
            "status": str,  # acknowledged, used, reported
            "reason": str,
        },
        pk="receipt",
        not_null={"ask", "attempt", "sha256", "status"},
        foreign_keys=[("ask", "asks", "id")],
    )
    uploads.create_index(["ask"], unique=True)  # one accepted answer for each ask
    uploads.create_index(["sha256"])
    db.create_view(
        "spoken",  # which round speaks of which payload
        "SELECT payload AS sha256, run, round FROM asks WHERE payload IS NOT NULL UNION ALL "
        "SELECT u.sha256, a.run, a.round FROM uploads u JOIN asks a ON u.ask = a.id",
    )


@migrations()
def m003_what_happened(db: Database) -> None:
    events = db.table("events")
    events.create(
        {"id": int, "run": str, "round": int, "device": str, "kind": str, "code": str, "text": str, "at": float},
        pk="id",
        not_null={"run", "kind", "text"},
    )
    events.create_index(["run", "kind"])
    db.table("figures").create(
        {
            "run": str,
            "round": int,
            "device": str,
            "name": str,
            "split": str,
            "sum": float,
            "count": int,
            "by_class": str,  # JSON: label to [sum, count]
        },
        pk=("run", "round", "device", "name", "split"),
    )
    db.table("traffic").create(
        {
            "run": str,
            "round": int,  # 0: before the first round
            "device": str,
            "direction": str,  # up, down
            "payloads": int,
            "tensor_bytes": int,
            "envelope_bytes": int,  # headers of payloads; gRPC's own framing is not counted
        },
        pk=("run", "round", "device", "direction"),
    )
