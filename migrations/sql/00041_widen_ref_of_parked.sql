-- +goose Up
ALTER TABLE parked MODIFY COLUMN ref VARCHAR(136) CHARACTER SET utf8mb4 COLLATE utf8mb4_bin NOT NULL COMMENT 'the id of the order or message; of a payment its gateway and transaction';

-- +goose Down
ALTER TABLE parked MODIFY COLUMN ref VARCHAR(128) CHARACTER SET utf8mb4 COLLATE utf8mb4_bin NOT NULL COMMENT 'the id of the order or message';
