-- +goose Up
CREATE TABLE reconcile_runs (
  id              BIGINT        NOT NULL AUTO_INCREMENT,
  state           VARCHAR(16)   CHARACTER SET ascii COLLATE ascii_bin NOT NULL,
  started_at      DATETIME(3)   NOT NULL,
  finished_at     DATETIME(3)   NULL,
  cutoff_at       DATETIME(3)   NOT NULL COMMENT 'of the primary, fixed at the start',
  cursor_deadline DATETIME(3)   NULL,
  cursor_order_id BIGINT        NULL,
  lease_token     CHAR(32)      CHARACTER SET ascii COLLATE ascii_bin NULL,
  lease_until     DATETIME(3)   NULL,
  scanned         BIGINT        NOT NULL,
  cancelled       BIGINT        NOT NULL,
  already_paid    BIGINT        NOT NULL,
  held            BIGINT        NOT NULL,
  parked          BIGINT        NOT NULL,
  last_error      VARCHAR(1024) CHARACTER SET utf8mb4 NULL,
  PRIMARY KEY (id),
  KEY reconcile_runs_by_state (state, lease_until),
  CONSTRAINT reconcile_runs_state_known CHECK (state IN ('running', 'done', 'failed'))
) ENGINE=InnoDB;

-- +goose Down
DROP TABLE reconcile_runs;
