-- +goose Up
CREATE TABLE event_outbox (
  id           BIGINT        NOT NULL AUTO_INCREMENT,
  order_id     BIGINT        NOT NULL,
  sequence     BIGINT        NOT NULL COMMENT 'from 1, without gaps, per order',
  type         VARCHAR(32)   CHARACTER SET ascii COLLATE ascii_bin NOT NULL,
  at           DATETIME(3)   NOT NULL,
  data         JSON          NOT NULL,
  state        VARCHAR(16)   CHARACTER SET ascii COLLATE ascii_bin NOT NULL,
  available_at DATETIME(3)   NOT NULL COMMENT 'pending: when it may be claimed; sent and parked: when it may be purged',
  lease_token  CHAR(32)      CHARACTER SET ascii COLLATE ascii_bin NULL,
  attempts     INT           NOT NULL,
  message_id   VARCHAR(64)   CHARACTER SET ascii COLLATE ascii_bin NULL,
  sent_at      DATETIME(3)   NULL,
  last_error   VARCHAR(1024) CHARACTER SET utf8mb4 NULL,
  PRIMARY KEY (id),
  UNIQUE KEY event_outbox_by_order (order_id, sequence),
  KEY event_outbox_to_do (state, available_at, id),
  CONSTRAINT event_outbox_state_known CHECK (state IN ('pending', 'sent', 'parked'))
) ENGINE=InnoDB;

-- +goose Down
DROP TABLE event_outbox;
