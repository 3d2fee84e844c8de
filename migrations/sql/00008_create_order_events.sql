-- +goose Up
CREATE TABLE order_events (
  id       BIGINT       NOT NULL AUTO_INCREMENT,
  order_id BIGINT       NOT NULL,
  at       DATETIME(3)  NOT NULL,
  kind     VARCHAR(32)  CHARACTER SET ascii COLLATE ascii_bin NOT NULL,
  actor    VARCHAR(64)  CHARACTER SET utf8mb4 COLLATE utf8mb4_bin NOT NULL,
  detail   JSON         NULL,
  PRIMARY KEY (id),
  KEY order_events_by_order (order_id, id)
) ENGINE=InnoDB;

-- +goose Down
DROP TABLE order_events;
