-- +goose Up
CREATE TABLE refunds (
  gateway           VARCHAR(64)   CHARACTER SET utf8mb4 COLLATE utf8mb4_bin NOT NULL,
  transaction_id    VARCHAR(64)   CHARACTER SET utf8mb4 COLLATE utf8mb4_bin NOT NULL COMMENT 'of the payment; one refund per payment',
  order_id          BIGINT        NOT NULL,
  amount            BIGINT        NOT NULL,
  currency          VARCHAR(16)   CHARACTER SET utf8mb4 COLLATE utf8mb4_bin NOT NULL,
  reason            VARCHAR(32)   CHARACTER SET ascii COLLATE ascii_bin NOT NULL,
  state             VARCHAR(16)   CHARACTER SET ascii COLLATE ascii_bin NOT NULL,
  attempts          INT           NOT NULL,
  created_at        DATETIME(3)   NOT NULL,
  available_at      DATETIME(3)   NOT NULL,
  lease_token       CHAR(32)      CHARACTER SET ascii COLLATE ascii_bin NULL,
  gateway_refund_id VARCHAR(64)   CHARACTER SET utf8mb4 COLLATE utf8mb4_bin NULL,
  last_error        VARCHAR(1024) CHARACTER SET utf8mb4 NULL,
  PRIMARY KEY (gateway, transaction_id),
  KEY refunds_by_order (order_id),
  KEY refunds_to_do (state, available_at),
  CONSTRAINT refunds_amount_positive CHECK (amount > 0),
  CONSTRAINT refunds_state_known CHECK (state IN ('pending', 'done', 'given_up'))
) ENGINE=InnoDB;

-- +goose Down
DROP TABLE refunds;
