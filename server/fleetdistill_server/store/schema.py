"""Tables of the store, as migrations. Released migrations never change; a new version appends one.

PostgreSQL starts with the tables of `BASELINE` (`postgres_schema.py`). Later migrations run on both databases and
therefore only call `db.execute`, with SQL that both accept.
"""

from __future__ import annotations

from sqlite_utils import Database, Migrations

migrations = Migrations("fleetdistill")


@migrations()
def m001_runs_devices_rounds(db: Database) -> None:
    db.table("runs").create(
        {
            "name": str,
            "config": str,  # JSON of the run's settings; the run does not start with other settings
            "contract": bytes,  # serialized Contract; NULL until the engine has prepared the run
            "status": str,  # preparing, running, finished, stopped, cancelled
            "reason": str,
            "completed_rounds": int,
            "next_round": int,
            "checkpoint": bytes,  # SHA-256 of the checkpoint after the last closed round
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
            "figures": str,  # JSON of the figures that the method reports for the round
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
            "expects": str,  # JSON: the parts of a valid answer, kind by part name
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
    uploads.create_index(["ask"], unique=True)  # at most one accepted answer per ask
    uploads.create_index(["sha256"])
    db.create_view(
        "spoken",  # payloads that each round refers to
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


@migrations()
def m004_traffic_by_kind(db: Database) -> None:
    # kind: kind of a part, such as sample_knowledge; "envelope" for payload headers, which also count the payloads; ""
    # in older rows. sent_bytes: bytes on the link, compressed if both ends support it.
    db.execute("ALTER TABLE traffic RENAME TO traffic_before")
    db.execute(
        "CREATE TABLE traffic (run TEXT, round INTEGER, device TEXT, direction TEXT, kind TEXT NOT NULL, "
        "payloads INTEGER NOT NULL, tensor_bytes INTEGER NOT NULL, envelope_bytes INTEGER NOT NULL, "
        "sent_bytes INTEGER NOT NULL, PRIMARY KEY (run, round, device, direction, kind))"
    )
    db.execute(
        "INSERT INTO traffic SELECT run, round, device, direction, '', payloads, tensor_bytes, envelope_bytes, "
        "tensor_bytes + envelope_bytes FROM traffic_before"
    )
    db.execute("DROP TABLE traffic_before")


@migrations()
def m006_quarantine_and_retention(db: Database) -> None:
    # Time at which the answer's payload was found missing or damaged; NULL for a valid answer. The receipt is kept.
    db.execute("ALTER TABLE uploads ADD COLUMN quarantined_at FLOAT")
    db.execute("DROP INDEX idx_uploads_ask")
    db.execute("CREATE UNIQUE INDEX one_answer_for_each_ask ON uploads (ask) WHERE quarantined_at IS NULL")
    db.execute("CREATE INDEX idx_uploads_ask ON uploads (ask)")
    # keep_rounds: number of newest closed rounds whose payloads are kept. kept_from: first round kept by `runs prune`.
    db.execute("ALTER TABLE runs ADD COLUMN keep_rounds INTEGER NOT NULL DEFAULT 1")
    db.execute("ALTER TABLE runs ADD COLUMN kept_from INTEGER NOT NULL DEFAULT 0")
    db.execute("DROP VIEW spoken")
    db.create_view(
        "spoken",
        "SELECT payload AS sha256, run, round FROM asks WHERE payload IS NOT NULL UNION ALL "
        "SELECT u.sha256, a.run, a.round FROM uploads u JOIN asks a ON u.ask = a.id WHERE u.quarantined_at IS NULL",
    )


@migrations()
def m005_security(db: Database) -> None:
    db.table("tokens").create(
        {
            "hash": bytes,  # SHA-256 of the secret; the secret is not stored
            "run": str,  # run to which the device is restricted, empty for all
            "created_at": float,
            "expires_at": float,
            "revoked": int,
            "device": str,  # device that used the token, NULL if unused
            "serial": str,  # certificate issued for the token
        },
        pk="hash",
        not_null={"run", "expires_at", "revoked"},
    )
    certificates = db.table("certificates")
    certificates.create(
        {
            "serial": str,  # hex
            "device": str,
            "run": str,
            "public_key": bytes,  # SHA-256 of the SubjectPublicKeyInfo
            "pem": bytes,
            "issued_at": float,
            "expires_at": float,
        },
        pk="serial",
        not_null={"device", "public_key", "pem", "expires_at"},
    )
    certificates.create_index(["device"])
    db.table("revocations").create(
        {
            "subject": str,  # device:ID, operator:NAME, viewer:NAME or serial:HEX
            "reason": str,
            "at": float,
        },
        pk="subject",
        not_null={"at"},
    )


@migrations()
def m007_forgetting(db: Database) -> None:
    # Time of the request to forget the device, and time at which the run had forgotten it.
    db.execute("ALTER TABLE devices ADD COLUMN forget_asked_at FLOAT")
    db.execute("ALTER TABLE devices ADD COLUMN forgotten_at FLOAT")


@migrations()
def m008_payloads_given_up(db: Database) -> None:
    # 1: the ask's payload is not kept even if its round is, because it can contain data of a forgotten device. The
    # digest stays, because answers refer to it.
    db.execute("ALTER TABLE asks ADD COLUMN given_up INTEGER NOT NULL DEFAULT 0")
    db.execute("DROP VIEW spoken")
    db.create_view(
        "spoken",
        "SELECT payload AS sha256, run, round FROM asks WHERE payload IS NOT NULL AND NOT given_up UNION ALL "
        "SELECT u.sha256, a.run, a.round FROM uploads u JOIN asks a ON u.ask = a.id WHERE u.quarantined_at IS NULL",
    )


@migrations()
def m009_data_versions(db: Database) -> None:
    # JSON: data version (hex) in each device's profile at the start of the round, by device id; NULL if no profile had
    # one, and after the round has ended.
    db.execute("ALTER TABLE rounds ADD COLUMN data_versions TEXT")


@migrations()
def m010_checkpoints(db: Database) -> None:
    # Checkpoints that a run can be rolled back to; the run's keep_checkpoints limits their number.
    db.table("checkpoints").create(
        {
            "run": str,
            "round": int,  # the checkpoint is the state after this round; 0: before the first round
            "completed_rounds": int,
            "sha256": bytes,
            "at": float,
        },
        pk=("run", "round"),
        not_null={"completed_rounds", "sha256"},
    )
    db.execute("ALTER TABLE runs ADD COLUMN keep_checkpoints INTEGER NOT NULL DEFAULT 1")
    db.execute(
        "INSERT INTO checkpoints SELECT name, (SELECT coalesce(max(round), 0) FROM rounds WHERE run = name AND "
        "status = 'closed'), completed_rounds, checkpoint, NULL FROM runs WHERE checkpoint IS NOT NULL"
    )


@migrations()
def m011_late_devices(db: Database) -> None:
    # Number of consecutive rounds in which the device missed a deadline, and the last round that it is left out of.
    db.execute("ALTER TABLE devices ADD COLUMN late_rounds INTEGER NOT NULL DEFAULT 0")
    db.execute("ALTER TABLE devices ADD COLUMN left_out_until INTEGER NOT NULL DEFAULT 0")


@migrations()
def m012_short_texts(db: Database) -> None:
    # Texts were unlimited, and devices could store megabytes in them; 1,000 characters suffice.
    for table, column in (
        ("events", "text"),
        ("runs", "reason"),
        ("rounds", "reason"),
        ("asks", "reason"),
        ("uploads", "reason"),
        ("revocations", "reason"),
    ):
        db.execute(f"UPDATE {table} SET {column} = substr({column}, 1, 1000) WHERE length({column}) > 1000")


@migrations()
def m013_tokens_of_devices(db: Database) -> None:
    # Device id for which the token is valid; empty for any device.
    db.execute("ALTER TABLE tokens ADD COLUMN for_device TEXT NOT NULL DEFAULT ''")


@migrations()
def m014_portable_view(db: Database) -> None:
    # The same view in SQL that PostgreSQL accepts too.
    db.execute("DROP VIEW spoken")
    db.execute(
        "CREATE VIEW spoken AS "
        "SELECT payload AS sha256, run, round FROM asks WHERE payload IS NOT NULL AND given_up = 0 UNION ALL "
        "SELECT u.sha256, a.run, a.round FROM uploads u JOIN asks a ON u.ask = a.id WHERE u.quarantined_at IS NULL"
    )


@migrations()
def m015_deletions(db: Database) -> None:
    # Count of deletions; see deletions.py.
    db.execute("CREATE TABLE deletions (count BIGINT NOT NULL)")
    db.execute("INSERT INTO deletions (count) VALUES (0)")


@migrations()
def m016_asks_in_progress(db: Database) -> None:
    # Every answer looks for asks that are late or answered early; without these indexes it reads all asks of the run.
    db.execute("CREATE INDEX open_asks ON asks (run, deadline_at) WHERE status = 'open'")
    db.execute("CREATE INDEX answered_asks ON asks (run, round, step_number, device) WHERE status = 'answered'")


@migrations()
def m017_led_runs(db: Database) -> None:
    # JSON of the complete run.toml, from which the engine starts; NULL for a run that only an earlier version served.
    # Status has two more values: created (not started yet) and paused.
    db.execute("ALTER TABLE runs ADD COLUMN setup TEXT")
    # Time of the last start or resumption, the order in which runs are given an engine.
    db.execute("ALTER TABLE runs ADD COLUMN queued_at FLOAT")
    # Time of the pause until an engine continues the run; deadlines of open asks are then extended by the time between.
    db.execute("ALTER TABLE runs ADD COLUMN paused_at FLOAT")


@migrations()
def m020_operator_calls(db: Database) -> None:
    db.execute(
        "CREATE TABLE operator_calls (id BIGINT PRIMARY KEY, at FLOAT NOT NULL, role TEXT NOT NULL, "
        "name TEXT NOT NULL, call TEXT NOT NULL, arguments TEXT NOT NULL, address TEXT NOT NULL, "
        "result TEXT NOT NULL, refused INTEGER NOT NULL)"
    )
    db.execute("CREATE INDEX operator_calls_kept ON operator_calls (refused, id)")


@migrations()
def m021_times_of_asks(db: Database) -> None:
    # When the ask was written and sent to the device, when the download of its payload began and ended, and when the
    # upload of its answer began; NULL if not known. The front writes them within seconds, see `intake/ask_times.py`.
    for column in ("asked_at", "sent_at", "download_at", "downloaded_at", "upload_at"):
        db.execute(f"ALTER TABLE asks ADD COLUMN {column} FLOAT")
    # Counts of a device's asks and answers read only this index.
    db.execute("CREATE INDEX asks_by_device ON asks (run, device, round, status)")


@migrations()
def m022_sums(db: Database) -> None:
    # Sums over answers, see sums.py. The first three tables contain every round but open ones.
    ended = (
        "t WHERE NOT EXISTS (SELECT 1 FROM rounds r WHERE r.run = t.run AND r.round = t.round AND r.status = 'open')"
    )
    counts = {f"{one} BIGINT NOT NULL": f"sum({one})" for one in ("tensor_bytes", "envelope_bytes", "sent_bytes")}
    signs = {
        "positive BIGINT NOT NULL": "count(*) FILTER (WHERE t.sum > 0)",
        "others BIGINT NOT NULL": "count(*) FILTER (WHERE t.sum <= 0)",
    }
    _add_sums(db, "round_bytes", "run TEXT, round BIGINT, direction TEXT, kind TEXT", counts, f"traffic {ended}")
    _add_sums(db, "device_bytes", "run TEXT, device TEXT, direction TEXT", counts, f"traffic {ended}")
    newest = {"newest BIGINT NOT NULL": "max(t.round)", **signs}
    _add_sums(db, "device_figures", "run TEXT, device TEXT, name TEXT, split TEXT", newest, f"figures {ended}")
    # The others contain the rounds that have ended without open asks and unused answers.
    answers = {
        "answers BIGINT NOT NULL": "count(u.receipt)",
        "used BIGINT NOT NULL": "count(*) FILTER (WHERE u.status = 'used')",
        "reported BIGINT NOT NULL": "count(*) FILTER (WHERE u.status = 'reported')",
    }
    asked = "rounds t LEFT JOIN asks a ON a.run = t.run AND a.round = t.round LEFT JOIN uploads u ON u.ask = a.id"
    ended = f"{asked} WHERE t.status <> 'open'"
    settled = "HAVING count(*) FILTER (WHERE a.status = 'open' OR u.status = 'acknowledged') = 0"
    _add_sums(db, "round_answers", "run TEXT, round BIGINT", answers, ended, settled)
    means = {
        "mean FLOAT": "avg(t.sum / t.count) FILTER (WHERE t.count > 0)",
        "devices BIGINT NOT NULL": "count(*) FILTER (WHERE t.count > 0)",
        **signs,
    }
    settled = "figures t JOIN round_answers s ON s.run = t.run AND s.round = t.round"
    _add_sums(db, "round_figures", "run TEXT, round BIGINT, name TEXT, split TEXT", means, settled)
    # Answers that are in no result are few among many.
    db.execute("CREATE INDEX reported_uploads ON uploads (ask) WHERE status = 'reported'")


@migrations()
def m023_waiting_runs(db: Database) -> None:
    # Since when a run has waited for devices, and how many must be present; 0 for any change of its devices. NULL for a
    # run that does not wait. A run that waits gives up its engine if another needs it.
    db.execute("ALTER TABLE runs ADD COLUMN waits_since FLOAT")
    db.execute("ALTER TABLE runs ADD COLUMN waits_for BIGINT")


def _add_sums(db: Database, table: str, key: str, values: dict[str, str], source: str, having: str = "") -> None:
    names = [column.split()[0] for column in key.split(", ")]
    db.execute(f"CREATE TABLE {table} ({key}, {', '.join(values)}, PRIMARY KEY ({', '.join(names)}))")
    of_source = ", ".join(f"t.{name}" for name in names)
    db.execute(
        f"INSERT INTO {table} SELECT {of_source}, {', '.join(values.values())} FROM {source} "
        f"GROUP BY {of_source} {having}"
    )


NAMES = [one.name for one in migrations.pending(Database(memory=True))]
"""Names of all migrations, in order."""
BASELINE = "m014_portable_view"
"""Last migration that PostgreSQL takes over as a whole instead of running it."""
