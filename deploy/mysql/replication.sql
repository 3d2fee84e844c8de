-- On the primary: the account that a replica connects with. Run as root; @REPLICATION_PASSWORD@ is replaced by whoever runs it.
CREATE USER IF NOT EXISTS 'lapse_replication'@'%' IDENTIFIED BY '@REPLICATION_PASSWORD@';
ALTER USER 'lapse_replication'@'%' IDENTIFIED BY '@REPLICATION_PASSWORD@';
GRANT REPLICATION SLAVE ON *.* TO 'lapse_replication'@'%';
