-- +goose Up
CREATE TABLE stock_ledger (
  order_id BIGINT      NOT NULL COMMENT 'for adjust: the reference of the adjustment',
  sku      VARCHAR(64) CHARACTER SET utf8mb4 COLLATE utf8mb4_bin NOT NULL,
  kind     VARCHAR(16) CHARACTER SET ascii COLLATE ascii_bin NOT NULL,
  quantity BIGINT      NOT NULL,
  at       DATETIME(3) NOT NULL,
  PRIMARY KEY (order_id, sku, kind),
  CONSTRAINT stock_ledger_kind_known CHECK (kind IN ('reserve', 'release', 'sell', 'adjust'))
) ENGINE=InnoDB;

-- +goose Down
DROP TABLE stock_ledger;
