-- +goose Up
CREATE TABLE orders (
  id            BIGINT       NOT NULL,
  channel       VARCHAR(64)  CHARACTER SET utf8mb4 COLLATE utf8mb4_bin NOT NULL,
  user_id       VARCHAR(64)  CHARACTER SET utf8mb4 COLLATE utf8mb4_bin NOT NULL,
  currency      VARCHAR(16)  CHARACTER SET utf8mb4 COLLATE utf8mb4_bin NOT NULL,
  amount        BIGINT       NOT NULL COMMENT 'minor units',
  status        VARCHAR(16)  CHARACTER SET ascii COLLATE ascii_bin NOT NULL,
  deadline_at   DATETIME(3)  NULL COMMENT 'UTC; NULL: never cancelled by timeout',
  hold_until    DATETIME(3)  NULL,
  hold_reason   VARCHAR(255) CHARACTER SET utf8mb4 NULL,
  created_at    DATETIME(3)  NOT NULL,
  paid_at       DATETIME(3)  NULL,
  cancelled_at  DATETIME(3)  NULL,
  cancel_reason VARCHAR(255) CHARACTER SET utf8mb4 NULL,
  PRIMARY KEY (id),
  KEY orders_by_deadline (status, deadline_at, id),
  CONSTRAINT orders_id_positive CHECK (id > 0),
  CONSTRAINT orders_amount_not_negative CHECK (amount >= 0),
  CONSTRAINT orders_status_known CHECK (status IN ('unpaid', 'paid', 'cancelled'))
) ENGINE=InnoDB;

-- +goose Down
DROP TABLE orders;
