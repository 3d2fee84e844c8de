-- +goose Up
CREATE TABLE gateway_tasks (
  order_id     BIGINT        NOT NULL,
  kind         VARCHAR(16)   CHARACTER SET ascii COLLATE ascii_bin NOT NULL,
  attempts     INT           NOT NULL,
  created_at   DATETIME(3)   NOT NULL,
  available_at DATETIME(3)   NOT NULL COMMENT 'when it may be claimed',
  lease_token  CHAR(32)      CHARACTER SET ascii COLLATE ascii_bin NULL,
  last_error   VARCHAR(1024) CHARACTER SET utf8mb4 NULL,
  PRIMARY KEY (order_id, kind),
  KEY gateway_tasks_to_do (available_at, order_id),
  CONSTRAINT gateway_tasks_kind_known CHECK (kind IN ('close'))
) ENGINE=InnoDB;

-- +goose Down
DROP TABLE gateway_tasks;
