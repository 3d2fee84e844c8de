-- +goose Up
ALTER TABLE parked
  ADD COLUMN handled_at     DATETIME(3)  NULL COMMENT 'of the last retry or discard',
  ADD COLUMN handled_by     VARCHAR(64)  CHARACTER SET utf8mb4 COLLATE utf8mb4_bin NULL,
  ADD COLUMN handled_reason VARCHAR(255) CHARACTER SET utf8mb4 NULL;

-- +goose Down
ALTER TABLE parked DROP COLUMN handled_at, DROP COLUMN handled_by, DROP COLUMN handled_reason;
