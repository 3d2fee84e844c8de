-- +goose Up
CREATE TABLE idempotency_keys (
  idempotency_key VARCHAR(128) CHARACTER SET utf8mb4 COLLATE utf8mb4_bin NOT NULL,
  request_hash    BINARY(32)   NOT NULL,
  order_id        BIGINT       NOT NULL,
  created_at      DATETIME(3)  NOT NULL,
  PRIMARY KEY (idempotency_key),
  KEY idempotency_keys_by_age (created_at)
) ENGINE=InnoDB;

-- +goose Down
DROP TABLE idempotency_keys;
