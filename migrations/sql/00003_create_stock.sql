-- +goose Up
CREATE TABLE stock (
  sku       VARCHAR(64) CHARACTER SET utf8mb4 COLLATE utf8mb4_bin NOT NULL,
  available BIGINT      NULL COMMENT 'NULL: unlimited',
  reserved  BIGINT      NOT NULL,
  sold      BIGINT      NOT NULL,
  PRIMARY KEY (sku),
  CONSTRAINT stock_available_not_negative CHECK (available >= 0),
  CONSTRAINT stock_reserved_not_negative CHECK (reserved >= 0),
  CONSTRAINT stock_sold_not_negative CHECK (sold >= 0)
) ENGINE=InnoDB;

-- +goose Down
DROP TABLE stock;
