"""Tables of the store, as migrations. Released migrations never change; a new version appends one.

Until the tag of 0.1.0, `m001_tables` is changed in place.

Migrations run on both databases and only call `db.execute`, with SQL that both accept and SQLite's types, which
`postgres_database.py` translates.
"""

from __future__ import annotations

from sqlite_utils import Database, Migrations

migrations = Migrations("fleetdistill")

_TABLES = """
CREATE TABLE runs (
    name TEXT PRIMARY KEY,
    config TEXT NOT NULL,  -- JSON of the run's settings; the run does not start with other settings
    contract BLOB,  -- serialized Contract; NULL until the engine has prepared the run
    figures TEXT,  -- JSON of the figures that the method declares, by name; NULL until the engine has prepared the run
    status TEXT NOT NULL,  -- created, preparing, running, paused, finished, stopped, cancelled
    reason TEXT,
    completed_rounds INTEGER NOT NULL,
    next_round INTEGER NOT NULL,
    checkpoint BLOB,  -- SHA-256 of the checkpoint after the last closed round
    engine TEXT,  -- fencing token of the engine that owns the run
    created_at REAL,
    keep_rounds INTEGER NOT NULL DEFAULT 1,  -- number of newest closed rounds whose payloads are kept
    kept_from INTEGER NOT NULL DEFAULT 0,  -- first round kept by `runs prune`
    keep_checkpoints INTEGER NOT NULL DEFAULT 1,
    setup TEXT,  -- JSON of the complete run.toml, from which the engine starts
    queued_at REAL,  -- time of the last start or resumption, the order in which runs are given an engine
    paused_at REAL,  -- time of the pause, until an engine continues the run; it extends the deadlines of open asks
    waits_since REAL,  -- since when the run waits; NULL if it does not. It gives up its engine if asked to
    waits_for INTEGER,  -- how many devices must be present; 0 for any change of the run's devices
    waits_until REAL  -- time before which min_round_seconds allows no round; NULL if the run does not wait for it
);
CREATE TABLE devices (
    run TEXT,
    device TEXT,
    secret_hash BLOB NOT NULL,
    profile BLOB,  -- serialized DeviceProfile
    present INTEGER NOT NULL,
    first_seen REAL,
    last_seen REAL,
    forget_asked_at REAL,  -- time of the request to forget the device
    forgotten_at REAL,  -- time at which the run had forgotten it
    late_rounds INTEGER NOT NULL DEFAULT 0,  -- number of consecutive rounds in which the device missed a deadline
    left_out_until INTEGER NOT NULL DEFAULT 0,  -- last round that it is left out of
    PRIMARY KEY (run, device)
);
-- Each round looks for these devices, which are few in a fleet.
CREATE INDEX devices_left_out ON devices (run, left_out_until) WHERE left_out_until > 0;
CREATE INDEX devices_to_forget ON devices (run, device) WHERE forget_asked_at IS NOT NULL;
CREATE TABLE rounds (
    run TEXT,
    round INTEGER,
    status TEXT NOT NULL,  -- open, closed, short
    reason TEXT,
    cohort TEXT NOT NULL,  -- JSON list of device ids
    figures TEXT,  -- JSON of the figures that the method reports for the round
    started_at REAL,
    ended_at REAL,
    data_versions TEXT,  -- JSON: each device's data version (hex), by device id; NULL without any, and after the end
    PRIMARY KEY (run, round)
);
CREATE TABLE asks (
    id INTEGER PRIMARY KEY,
    run TEXT,
    round INTEGER,
    step_number INTEGER,
    device TEXT,
    step TEXT NOT NULL,
    expects TEXT NOT NULL,  -- JSON: the parts of a valid answer, kind by part name
    payload BLOB,  -- SHA-256; NULL where the ask has no payload
    payload_bytes INTEGER,
    seed INTEGER,
    deadline_at REAL,
    status TEXT NOT NULL,  -- open, answered, out
    reason TEXT,
    -- 1: the payload is not kept even if its round is, because it can contain data of a forgotten device. 2: neither is
    -- the answer's, because the ask is of a secure sum whose round has ended. The digests stay, because rows refer to
    -- them.
    given_up INTEGER NOT NULL DEFAULT 0,
    -- When the ask was written and sent to the device, when the download of its payload began and ended, and when the
    -- upload of its answer began; NULL if not known. The front writes them within seconds, see `intake/sessions.py`.
    asked_at REAL,
    sent_at REAL,
    download_at REAL,
    downloaded_at REAL,
    upload_at REAL
);
CREATE UNIQUE INDEX idx_asks_run_round_step_number_device ON asks (run, round, step_number, device);
CREATE INDEX idx_asks_run_device_status ON asks (run, device, status);
CREATE INDEX idx_asks_payload ON asks (payload);
-- Every answer looks for asks that are late or answered early; without these indexes it reads all asks of the run.
CREATE INDEX open_asks ON asks (run, deadline_at) WHERE status = 'open';
CREATE INDEX answered_asks ON asks (run, round, step_number, device) WHERE status = 'answered';
-- Counts of a device's asks and answers read only this index.
CREATE INDEX asks_by_device ON asks (run, device, round, status);
CREATE TABLE uploads (
    receipt TEXT PRIMARY KEY,
    ask INTEGER NOT NULL REFERENCES asks (id),
    attempt INTEGER NOT NULL,
    sha256 BLOB NOT NULL,
    data_bytes INTEGER,
    samples INTEGER,
    received_at REAL,
    status TEXT NOT NULL,  -- acknowledged, used, reported
    reason TEXT,
    quarantined_at REAL  -- when the payload was found missing or damaged; NULL for a valid answer. The receipt is kept
);
CREATE UNIQUE INDEX one_answer_for_each_ask ON uploads (ask) WHERE quarantined_at IS NULL;
CREATE INDEX idx_uploads_ask ON uploads (ask);
CREATE INDEX idx_uploads_sha256 ON uploads (sha256);
-- Answers that are in no result are few among many.
CREATE INDEX reported_uploads ON uploads (ask) WHERE status = 'reported';
-- Payloads that each round refers to.
CREATE VIEW spoken AS
    SELECT payload AS sha256, run, round FROM asks WHERE payload IS NOT NULL AND given_up = 0 UNION ALL
    SELECT u.sha256, a.run, a.round FROM uploads u JOIN asks a ON u.ask = a.id
    WHERE u.quarantined_at IS NULL AND a.given_up < 2;
CREATE TABLE events (
    id INTEGER PRIMARY KEY,
    run TEXT NOT NULL,
    round INTEGER,
    device TEXT,
    kind TEXT NOT NULL,
    code TEXT,
    text TEXT NOT NULL,
    at REAL
);
CREATE INDEX idx_events_run_kind ON events (run, kind);
CREATE TABLE figures (
    run TEXT,
    round INTEGER,
    device TEXT,
    name TEXT,
    split TEXT,
    sum REAL,
    count INTEGER,
    by_class TEXT,  -- JSON: label to [sum, count]
    PRIMARY KEY (run, round, device, name, split)
);
CREATE TABLE traffic (
    run TEXT,
    round INTEGER,  -- 0: before the first round
    device TEXT,
    direction TEXT,  -- up, down
    kind TEXT NOT NULL,  -- of a part, such as sample_knowledge; envelope for the headers, which also count the payloads
    payloads INTEGER NOT NULL,
    tensor_bytes INTEGER NOT NULL,
    envelope_bytes INTEGER NOT NULL,  -- headers of payloads; gRPC's own framing is not counted
    sent_bytes INTEGER NOT NULL,  -- bytes on the link, compressed if both ends support it
    PRIMARY KEY (run, round, device, direction, kind)
);
CREATE TABLE tokens (
    hash BLOB PRIMARY KEY,  -- SHA-256 of the secret; the secret is not stored
    run TEXT NOT NULL,  -- run to which the device is restricted, empty for all
    created_at REAL,
    expires_at REAL NOT NULL,
    revoked INTEGER NOT NULL,
    device TEXT,  -- device that used the token, NULL if unused
    serial TEXT,  -- certificate issued for the token
    for_device TEXT NOT NULL DEFAULT ''  -- device id for which the token is valid; empty for any device
);
CREATE TABLE certificates (
    serial TEXT PRIMARY KEY,  -- hex
    device TEXT NOT NULL,
    run TEXT,
    public_key BLOB NOT NULL,  -- SHA-256 of the SubjectPublicKeyInfo
    pem BLOB NOT NULL,
    issued_at REAL,
    expires_at REAL NOT NULL
);
CREATE INDEX idx_certificates_device ON certificates (device);
CREATE TABLE revocations (
    subject TEXT PRIMARY KEY,  -- device:ID, operator:NAME, viewer:NAME or serial:HEX
    reason TEXT,
    at REAL NOT NULL
);
-- Checkpoints that a run can be rolled back to; the run's keep_checkpoints limits their number.
CREATE TABLE checkpoints (
    run TEXT,
    round INTEGER,  -- the checkpoint is the state after this round; 0: before the first round
    completed_rounds INTEGER NOT NULL,
    sha256 BLOB NOT NULL,
    at REAL,
    PRIMARY KEY (run, round)
);
-- Count of deletions; see `Deletions` in `asks.py`.
CREATE TABLE deletions (count INTEGER NOT NULL);
INSERT INTO deletions (count) VALUES (0);
CREATE TABLE operator_calls (
    id BIGINT PRIMARY KEY,
    at REAL NOT NULL,
    role TEXT NOT NULL,
    name TEXT NOT NULL,
    call TEXT NOT NULL,
    arguments TEXT NOT NULL,
    address TEXT NOT NULL,
    result TEXT NOT NULL,
    refused INTEGER NOT NULL
);
CREATE INDEX operator_calls_kept ON operator_calls (refused, id);
-- Sums over answers, see `sums.py`. These three tables contain every round but open ones.
CREATE TABLE round_bytes (
    run TEXT,
    round INTEGER,
    direction TEXT,
    kind TEXT,
    tensor_bytes INTEGER NOT NULL,
    envelope_bytes INTEGER NOT NULL,
    sent_bytes INTEGER NOT NULL,
    PRIMARY KEY (run, round, direction, kind)
);
CREATE TABLE device_bytes (
    run TEXT,
    device TEXT,
    direction TEXT,
    tensor_bytes INTEGER NOT NULL,
    envelope_bytes INTEGER NOT NULL,
    sent_bytes INTEGER NOT NULL,
    PRIMARY KEY (run, device, direction)
);
CREATE TABLE device_figures (
    run TEXT,
    device TEXT,
    name TEXT,
    split TEXT,
    newest INTEGER NOT NULL,  -- last round
    positive INTEGER NOT NULL,  -- number of rounds with a sum above 0
    others INTEGER NOT NULL,
    PRIMARY KEY (run, device, name, split)
);
-- These two contain the rounds that have ended without open asks and unused answers.
CREATE TABLE round_answers (
    run TEXT,
    round INTEGER,
    answers INTEGER NOT NULL,
    used INTEGER NOT NULL,
    reported INTEGER NOT NULL,
    PRIMARY KEY (run, round)
);
CREATE TABLE round_figures (
    run TEXT,
    round INTEGER,
    name TEXT,
    split TEXT,
    mean REAL,  -- of the devices with a count above 0
    devices INTEGER NOT NULL,  -- number of these
    positive INTEGER NOT NULL,  -- number of devices with a sum above 0
    others INTEGER NOT NULL,
    PRIMARY KEY (run, round, name, split)
)
"""


@migrations()
def m001_tables(db: Database) -> None:
    """Creates the tables of version 0.1.0."""
    for statement in _TABLES.split(";\n"):
        db.execute(statement)


NAMES = [item.name for item in migrations.pending(Database(memory=True))]
"""Names of all migrations, in order."""
