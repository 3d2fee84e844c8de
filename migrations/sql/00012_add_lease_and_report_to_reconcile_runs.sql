-- +goose Up
ALTER TABLE reconcile_runs
  ADD COLUMN alone             TINYINT      NULL COMMENT '1 while it runs or waits to be resumed; unique, so that there is one such run' AFTER state,
  ADD COLUMN kind              VARCHAR(16)  CHARACTER SET ascii COLLATE ascii_bin NOT NULL DEFAULT 'full' COMMENT 'only a full one counts as the run of a night' AFTER alone,
  ADD COLUMN owner             VARCHAR(128) CHARACTER SET utf8mb4 NULL COMMENT 'host and process' AFTER kind,
  ADD COLUMN scheduled_at      DATETIME(3)  NULL COMMENT 'the instant of the schedule that it serves' AFTER owner,
  ADD COLUMN beat_at           DATETIME(3)  NULL COMMENT 'of the primary; read on the replica, it tells the lag' AFTER lease_until,
  ADD COLUMN lease_beats       BIGINT       NOT NULL DEFAULT 0 AFTER beat_at,
  ADD COLUMN others            BIGINT       NOT NULL DEFAULT 0 COMMENT 'already cancelled, not due, exempt, gone' AFTER parked,
  ADD COLUMN never_sent        BIGINT       NOT NULL DEFAULT 0 AFTER others,
  ADD COLUMN sent_not_received BIGINT       NOT NULL DEFAULT 0 AFTER never_sent,
  ADD COLUMN was_parked        BIGINT       NOT NULL DEFAULT 0 AFTER sent_not_received,
  ADD UNIQUE KEY reconcile_runs_alone (alone),
  ADD KEY reconcile_runs_by_kind (kind, state, cutoff_at);

-- +goose Down
ALTER TABLE reconcile_runs
  DROP KEY reconcile_runs_by_kind, DROP KEY reconcile_runs_alone,
  DROP COLUMN alone, DROP COLUMN kind, DROP COLUMN owner, DROP COLUMN scheduled_at, DROP COLUMN beat_at, DROP COLUMN lease_beats,
  DROP COLUMN others, DROP COLUMN never_sent, DROP COLUMN sent_not_received, DROP COLUMN was_parked;
