-- +goose Up
CREATE TABLE parked (
  id       BIGINT        NOT NULL AUTO_INCREMENT,
  what     VARCHAR(16)   CHARACTER SET ascii COLLATE ascii_bin NOT NULL,
  ref      VARCHAR(128)  CHARACTER SET utf8mb4 COLLATE utf8mb4_bin NOT NULL COMMENT 'the id of the order or message',
  reason   VARCHAR(1024) CHARACTER SET utf8mb4 NOT NULL,
  body     MEDIUMBLOB    NULL COMMENT 'at most 64 KiB',
  times    INT           NOT NULL,
  first_at DATETIME(3)   NOT NULL,
  last_at  DATETIME(3)   NOT NULL,
  state    VARCHAR(16)   CHARACTER SET ascii COLLATE ascii_bin NOT NULL,
  PRIMARY KEY (id),
  UNIQUE KEY parked_by_ref (what, ref),
  KEY parked_by_state (state, last_at),
  CONSTRAINT parked_what_known CHECK (what IN ('message', 'order', 'payment')),
  CONSTRAINT parked_state_known CHECK (state IN ('parked', 'retried', 'discarded'))
) ENGINE=InnoDB;

-- +goose Down
DROP TABLE parked;
