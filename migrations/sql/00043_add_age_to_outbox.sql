-- +goose Up
ALTER TABLE outbox
  ADD COLUMN pending_since DATETIME(3) NULL COMMENT 'pending: since when it waits to be sent, whatever was tried since; NULL: since available_at',
  DROP KEY outbox_to_do,
  ADD KEY outbox_to_do (state, available_at, order_id, pending_since);

-- +goose Down
ALTER TABLE outbox
  DROP KEY outbox_to_do,
  ADD KEY outbox_to_do (state, available_at, order_id),
  DROP COLUMN pending_since;
