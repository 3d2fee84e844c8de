-- +goose Up
ALTER TABLE orders
  ADD COLUMN payment_method VARCHAR(64) CHARACTER SET utf8mb4 COLLATE utf8mb4_bin NOT NULL DEFAULT '',
  ADD COLUMN grace_ms       BIGINT NOT NULL DEFAULT 0 COMMENT 'how long before the deadline the customer is told to have paid',
  ADD COLUMN event_sequence BIGINT NOT NULL DEFAULT 0 COMMENT 'of the last row of event_outbox';

-- +goose Down
ALTER TABLE orders
  DROP COLUMN payment_method,
  DROP COLUMN grace_ms,
  DROP COLUMN event_sequence;
