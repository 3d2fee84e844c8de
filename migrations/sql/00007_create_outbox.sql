-- +goose Up
CREATE TABLE outbox (
  order_id     BIGINT        NOT NULL COMMENT 'one row per order: its next timed message',
  deliver_at   DATETIME(3)   NOT NULL,
  state        VARCHAR(16)   CHARACTER SET ascii COLLATE ascii_bin NOT NULL,
  available_at DATETIME(3)   NOT NULL COMMENT 'pending: when it may be claimed; sent: when it may be purged',
  lease_token  CHAR(32)      CHARACTER SET ascii COLLATE ascii_bin NULL,
  attempts     INT           NOT NULL,
  message_id   VARCHAR(64)   CHARACTER SET ascii COLLATE ascii_bin NULL,
  sent_at      DATETIME(3)   NULL,
  last_error   VARCHAR(1024) CHARACTER SET utf8mb4 NULL,
  traceparent  VARCHAR(64)   CHARACTER SET ascii COLLATE ascii_bin NULL,
  PRIMARY KEY (order_id),
  KEY outbox_to_do (state, available_at, order_id),
  CONSTRAINT outbox_state_known CHECK (state IN ('pending', 'sent', 'parked'))
) ENGINE=InnoDB;

-- +goose Down
DROP TABLE outbox;
