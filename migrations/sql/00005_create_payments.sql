-- +goose Up
CREATE TABLE payments (
  gateway        VARCHAR(64) CHARACTER SET utf8mb4 COLLATE utf8mb4_bin NOT NULL,
  transaction_id VARCHAR(64) CHARACTER SET utf8mb4 COLLATE utf8mb4_bin NOT NULL,
  order_id       BIGINT      NOT NULL,
  currency       VARCHAR(16) CHARACTER SET utf8mb4 COLLATE utf8mb4_bin NOT NULL,
  amount         BIGINT      NOT NULL COMMENT 'minor units',
  paid_at        DATETIME(3) NULL COMMENT 'as the gateway says',
  received_at    DATETIME(3) NOT NULL,
  outcome        VARCHAR(16) CHARACTER SET ascii COLLATE ascii_bin NOT NULL,
  PRIMARY KEY (gateway, transaction_id),
  KEY payments_by_order (order_id),
  CONSTRAINT payments_amount_positive CHECK (amount > 0),
  CONSTRAINT payments_outcome_known CHECK (outcome IN ('accepted', 'duplicate', 'late', 'mismatch'))
) ENGINE=InnoDB;

-- +goose Down
DROP TABLE payments;
