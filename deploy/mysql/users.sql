-- The database and one account per role, each with just the rights that the role needs.
--
-- Run as root, once; running it again sets the passwords and changes nothing else. The words in @...@ are replaced by whoever runs it
-- (scripts/lib/mysql.sh does); a password must not contain a quote or a backslash.
--
-- `lapse` is the product's database; names with the prefix `lapse_` are for tests and trials beside it.

CREATE DATABASE IF NOT EXISTS `lapse`;

-- Migrations: the schema, and everything in it.
CREATE USER IF NOT EXISTS 'lapse_migrate'@'%' IDENTIFIED BY '@MIGRATE_PASSWORD@';
ALTER USER 'lapse_migrate'@'%' IDENTIFIED BY '@MIGRATE_PASSWORD@';
GRANT ALL PRIVILEGES ON `lapse`.* TO 'lapse_migrate'@'%';
GRANT ALL PRIVILEGES ON `lapse\_%`.* TO 'lapse_migrate'@'%';

-- Checkout and the API: orders are placed, paid and cancelled, never deleted.
CREATE USER IF NOT EXISTS 'lapse_api'@'%' IDENTIFIED BY '@API_PASSWORD@';
ALTER USER 'lapse_api'@'%' IDENTIFIED BY '@API_PASSWORD@';
GRANT SELECT, INSERT, UPDATE ON `lapse`.* TO 'lapse_api'@'%';
GRANT SELECT, INSERT, UPDATE ON `lapse\_%`.* TO 'lapse_api'@'%';

-- The relay: it also purges whatever is past its retention, and reads the length of the history list (PROCESS) for its metrics.
CREATE USER IF NOT EXISTS 'lapse_relay'@'%' IDENTIFIED BY '@RELAY_PASSWORD@';
ALTER USER 'lapse_relay'@'%' IDENTIFIED BY '@RELAY_PASSWORD@';
GRANT PROCESS ON *.* TO 'lapse_relay'@'%';
GRANT SELECT, INSERT, UPDATE, DELETE ON `lapse`.* TO 'lapse_relay'@'%';
GRANT SELECT, INSERT, UPDATE, DELETE ON `lapse\_%`.* TO 'lapse_relay'@'%';

-- The consumer: cancels, releases stock, parks.
CREATE USER IF NOT EXISTS 'lapse_consume'@'%' IDENTIFIED BY '@CONSUME_PASSWORD@';
ALTER USER 'lapse_consume'@'%' IDENTIFIED BY '@CONSUME_PASSWORD@';
GRANT SELECT, INSERT, UPDATE ON `lapse`.* TO 'lapse_consume'@'%';
GRANT SELECT, INSERT, UPDATE ON `lapse\_%`.* TO 'lapse_consume'@'%';

-- Refunds: marks them, ends tasks for the gateway (they are deleted), records what the gateway reports, parks.
CREATE USER IF NOT EXISTS 'lapse_refund'@'%' IDENTIFIED BY '@REFUND_PASSWORD@';
ALTER USER 'lapse_refund'@'%' IDENTIFIED BY '@REFUND_PASSWORD@';
GRANT SELECT, INSERT, UPDATE, DELETE ON `lapse`.* TO 'lapse_refund'@'%';
GRANT SELECT, INSERT, UPDATE, DELETE ON `lapse\_%`.* TO 'lapse_refund'@'%';

-- Reconcile on the primary: cancels, releases stock, parks, and keeps its runs.
CREATE USER IF NOT EXISTS 'lapse_reconcile'@'%' IDENTIFIED BY '@RECONCILE_PASSWORD@';
ALTER USER 'lapse_reconcile'@'%' IDENTIFIED BY '@RECONCILE_PASSWORD@';
GRANT SELECT, INSERT, UPDATE ON `lapse`.* TO 'lapse_reconcile'@'%';
GRANT SELECT, INSERT, UPDATE ON `lapse\_%`.* TO 'lapse_reconcile'@'%';

-- Reconcile on the replica, and whoever looks.
CREATE USER IF NOT EXISTS 'lapse_read'@'%' IDENTIFIED BY '@READ_PASSWORD@';
ALTER USER 'lapse_read'@'%' IDENTIFIED BY '@READ_PASSWORD@';
GRANT SELECT ON `lapse`.* TO 'lapse_read'@'%';
GRANT SELECT ON `lapse\_%`.* TO 'lapse_read'@'%';
