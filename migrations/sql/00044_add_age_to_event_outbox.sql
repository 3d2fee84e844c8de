-- +goose Up
ALTER TABLE event_outbox
  ADD COLUMN pending_since DATETIME(3) NULL COMMENT 'pending: since when it waits to be sent, whatever was tried since; NULL: since available_at',
  DROP KEY event_outbox_to_do,
  ADD KEY event_outbox_to_do (state, available_at, id, pending_since);

-- +goose Down
ALTER TABLE event_outbox
  DROP KEY event_outbox_to_do,
  ADD KEY event_outbox_to_do (state, available_at, id),
  DROP COLUMN pending_since;
