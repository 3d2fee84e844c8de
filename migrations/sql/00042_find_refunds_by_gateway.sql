-- +goose Up
ALTER TABLE refunds DROP KEY refunds_to_do,
  ADD KEY refunds_to_do (state, gateway, available_at);

-- +goose Down
ALTER TABLE refunds DROP KEY refunds_to_do,
  ADD KEY refunds_to_do (state, available_at);
