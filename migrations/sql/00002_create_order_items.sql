-- +goose Up
CREATE TABLE order_items (
  order_id BIGINT      NOT NULL,
  sku      VARCHAR(64) CHARACTER SET utf8mb4 COLLATE utf8mb4_bin NOT NULL,
  quantity BIGINT      NOT NULL,
  price    BIGINT      NOT NULL COMMENT 'minor units, of one piece',
  PRIMARY KEY (order_id, sku),
  CONSTRAINT order_items_quantity_positive CHECK (quantity > 0)
) ENGINE=InnoDB;

-- +goose Down
DROP TABLE order_items;
