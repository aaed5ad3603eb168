"""The tables of lab.db and the steps from each schema version to the next (what the columns mean: FORMAT.md section 2)."""

from __future__ import annotations

VERSION = 3

TABLES = """
CREATE TABLE meta(key TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE settings(key TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE daemon(one INTEGER PRIMARY KEY CHECK(one = 1), pid INTEGER NOT NULL, boot_id TEXT NOT NULL, started_at REAL NOT NULL,
  beat_at REAL NOT NULL, version TEXT NOT NULL, note TEXT);
CREATE TABLE sources(sha TEXT PRIMARY KEY, bytes INTEGER NOT NULL, name TEXT NOT NULL, effective_sha TEXT NOT NULL, created_at REAL NOT NULL) WITHOUT ROWID;
CREATE TABLE waves(id TEXT PRIMARY KEY, seq INTEGER UNIQUE NOT NULL, created_at REAL NOT NULL, kind TEXT NOT NULL, title TEXT, hypothesis TEXT,
  base_sha TEXT NOT NULL, base_run TEXT, factors TEXT NOT NULL, repeats INTEGER NOT NULL, budget_s REAL NOT NULL, agent TEXT NOT NULL);
CREATE TABLE runs(
  id TEXT PRIMARY KEY, seq INTEGER UNIQUE NOT NULL, created_at REAL NOT NULL, purpose TEXT NOT NULL, source_sha TEXT NOT NULL, effective_sha TEXT NOT NULL,
  overrides TEXT NOT NULL DEFAULT '{}', constants TEXT NOT NULL DEFAULT '{}', base_run TEXT, parent TEXT, hypothesis TEXT, wave_id TEXT, cell TEXT,
  retry_of TEXT, repeat_of TEXT, promoted_from TEXT, budget_s REAL NOT NULL, seed INTEGER, priority REAL NOT NULL DEFAULT 0, gpu_type TEXT, want_host TEXT,
  agent TEXT NOT NULL, wanted TEXT NOT NULL DEFAULT 'run', wanted_force INTEGER NOT NULL DEFAULT 0, approval TEXT NOT NULL DEFAULT 'none', approval_why TEXT,
  verdict TEXT, verdict_by TEXT, verdict_why TEXT, verdict_at REAL,
  phase TEXT NOT NULL, stage TEXT, outcome TEXT, cause TEXT, cause_text TEXT, last_lines TEXT, host TEXT, engine TEXT, gpu_uuid TEXT, gpu_name TEXT,
  class_key TEXT, attributes TEXT, model_config TEXT, placed_at REAL, started_at REAL, first_step_at REAL, ended_at REAL, unreachable_since REAL, last_output_at REAL,
  exit_code INTEGER, exit_signal INTEGER, step INTEGER, share REAL, loss REAL, tok_s REAL, dt_ms REAL, epoch REAL, remaining_s REAL, val_bpb REAL,
  training_s REAL, total_s REAL, wall_s REAL, peak_vram_mb REAL, mfu_reported REAL, flops_per_token REAL, tokens_m REAL, num_steps INTEGER, params_m REAL,
  depth INTEGER, torch TEXT, driver TEXT, evaluator TEXT, data_hash TEXT, trust TEXT, verified_bpb REAL, trust_why TEXT,
  log_offset INTEGER NOT NULL DEFAULT 0, events_offset INTEGER NOT NULL DEFAULT 0, log_bytes INTEGER, log_dropped INTEGER);
CREATE INDEX runs_phase ON runs(phase, priority DESC, seq) WHERE phase != 'ended';
CREATE INDEX runs_rank ON runs(class_key, budget_s, val_bpb, seq, id, effective_sha, purpose, trust, verified_bpb, trust_why, outcome)
  WHERE outcome = 'completed' AND purpose != 'verify';
CREATE INDEX runs_state ON runs(phase, outcome, wall_s);
CREATE INDEX runs_effective ON runs(effective_sha, budget_s);
CREATE INDEX runs_wave ON runs(wave_id) WHERE wave_id IS NOT NULL;
CREATE INDEX runs_agent ON runs(agent);
CREATE INDEX runs_ended ON runs(ended_at) WHERE ended_at IS NOT NULL;
CREATE TABLE points(run_id TEXT NOT NULL, step INTEGER NOT NULL, t REAL, share REAL, loss REAL, tok_s REAL, dt_ms REAL, mfu REAL, PRIMARY KEY(run_id, step)) WITHOUT ROWID;
CREATE TABLE hosts(name TEXT PRIMARY KEY, kind TEXT NOT NULL, paused INTEGER NOT NULL DEFAULT 0, drain INTEGER NOT NULL DEFAULT 0, state TEXT NOT NULL,
  since REAL NOT NULL, error TEXT, boot_id TEXT, info TEXT, checked_at REAL, disk_free_mib INTEGER) WITHOUT ROWID;
CREATE TABLE gpus(uuid TEXT PRIMARY KEY, host TEXT NOT NULL, idx INTEGER, name TEXT NOT NULL, mem_total_mib INTEGER, state TEXT NOT NULL, reason TEXT, since REAL NOT NULL,
  run_id TEXT, standby_run_id TEXT, holder TEXT, telemetry TEXT) WITHOUT ROWID;
CREATE TABLE samples(gpu_uuid TEXT NOT NULL, at INTEGER NOT NULL, run_id TEXT, util_pct REAL, mem_used_mib INTEGER, power_w REAL, power_limit_w REAL, temp_c REAL,
  sm_mhz INTEGER, sm_max_mhz INTEGER, throttle INTEGER, tok_s REAL, PRIMARY KEY(gpu_uuid, at)) WITHOUT ROWID;
CREATE INDEX samples_run ON samples(run_id, at) WHERE run_id IS NOT NULL;
CREATE TABLE flags(subject TEXT NOT NULL, kind TEXT NOT NULL, severity TEXT NOT NULL, evidence TEXT NOT NULL, raised_at REAL NOT NULL, cleared_at REAL,
  PRIMARY KEY(subject, kind)) WITHOUT ROWID;
CREATE TABLE events(id INTEGER PRIMARY KEY AUTOINCREMENT, at REAL NOT NULL, who TEXT NOT NULL, verb TEXT NOT NULL, subject TEXT, why TEXT, detail TEXT);
CREATE INDEX events_subject ON events(subject);
CREATE TABLE requests(id INTEGER PRIMARY KEY AUTOINCREMENT, verb TEXT NOT NULL, args TEXT NOT NULL, who TEXT NOT NULL, state TEXT NOT NULL, progress TEXT,
  result TEXT, error TEXT, created_at REAL NOT NULL, updated_at REAL NOT NULL);
CREATE INDEX requests_open ON requests(state) WHERE state IN ('asked', 'working');
CREATE TABLE replays(request_id TEXT PRIMARY KEY, verb TEXT NOT NULL, result TEXT NOT NULL, at REAL NOT NULL) WITHOUT ROWID;
"""

# MIGRATIONS[n] takes a database from version n to n + 1; each is a script run in one transaction.
# A new database takes all of them, so that each step is written once.
_RANKED = "outcome, purpose, class_key, budget_s, effective_sha, val_bpb, verified_bpb, trust, trust_why, verdict"
_COUNT = "BEGIN UPDATE counters SET n = n + 1 WHERE name = '{}'; END"
COUNTERS = {"ranking": 2, "ended": 3}  # the version that brought each
MIGRATIONS: dict[int, str] = {
    # ranking: goes up whenever anything that ranking reads has changed, so that ten thousand runs are not looked at to find out
    1: f"""
CREATE TABLE counters(name TEXT PRIMARY KEY, n INTEGER NOT NULL) WITHOUT ROWID;
INSERT INTO counters VALUES ('ranking', 0);
CREATE TRIGGER ranking_new AFTER INSERT ON runs WHEN new.outcome IS 'completed' {_COUNT.format("ranking")};
CREATE TRIGGER ranking_set AFTER UPDATE OF {_RANKED} ON runs WHEN new.outcome IS 'completed' OR old.outcome IS 'completed' {_COUNT.format("ranking")};
CREATE TRIGGER ranking_gone AFTER DELETE ON runs WHEN old.outcome IS 'completed' {_COUNT.format("ranking")};
CREATE INDEX runs_words ON runs(seq, id, hypothesis, overrides, phase, outcome, wave_id, agent);
CREATE INDEX runs_verdict ON runs(verdict, effective_sha) WHERE verdict IS NOT NULL;
""",
    # ended: goes up when a run ends, or what an ended one came to or cost has changed
    2: f"""
INSERT INTO counters VALUES ('ended', 0);
CREATE INDEX runs_speed ON runs(gpu_name, effective_sha, tok_s) WHERE outcome = 'completed' AND purpose != 'verify';
CREATE TRIGGER ended_new AFTER INSERT ON runs WHEN new.phase = 'ended' {_COUNT.format("ended")};
CREATE TRIGGER ended_set AFTER UPDATE OF phase, outcome, wall_s ON runs WHEN new.phase = 'ended' OR old.phase = 'ended' {_COUNT.format("ended")};
CREATE TRIGGER ended_gone AFTER DELETE ON runs WHEN old.phase = 'ended' {_COUNT.format("ended")};
""",
}

JSON_COLUMNS = {
    "overrides",
    "constants",
    "cell",
    "attributes",
    "model_config",
    "factors",
    "info",
    "holder",
    "telemetry",
    "detail",
    "args",
    "result",
}
