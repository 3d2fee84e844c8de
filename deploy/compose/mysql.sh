#!/usr/bin/env bash
# Runs in a container of the image mysql, once both servers answer: makes the database and the accounts on the primary, and lets the replica
# follow. Running it again sets the passwords and repairs what is missing.
set -euo pipefail

sql=/etc/lapse
passwords=(MIGRATE_PASSWORD API_PASSWORD RELAY_PASSWORD CONSUME_PASSWORD REFUND_PASSWORD RECONCILE_PASSWORD READ_PASSWORD REPLICATION_PASSWORD)

for name in "${passwords[@]}"; do
  if [[ ! ${!name} =~ ^[A-Za-z0-9._~-]+$ ]]; then
    echo "mysql.sh: $name has a character other than letters, digits and . _ ~ -, which would have to be escaped in SQL and in a DSN" >&2
    exit 2
  fi
done

# on HOST ARGUMENT…: root's client. The password comes in a file that nobody else can read and not in the command line.
on() {
  local host=$1
  shift
  mysql "--defaults-extra-file=$credentials" --host="$host" --batch --skip-column-names "$@"
}
credentials=$(mktemp)
trap 'rm -f "$credentials"' EXIT
printf '[client]\nuser=root\npassword="%s"\n' "$MYSQL_ROOT_PASSWORD" >"$credentials"

# fill_in FILE: prints it with the passwords in their places.
fill_in() {
  local text name
  text=$(<"$sql/$1")
  for name in "${passwords[@]}"; do
    text=${text//"@$name@"/"${!name}"}
  done
  printf '%s\n' "$text"
}

{ fill_in users.sql && fill_in replication.sql; } | on mysql
echo "mysql: the database and its accounts are there"

running="SELECT (SELECT COUNT(*) FROM performance_schema.replication_connection_status WHERE service_state = 'ON') = 1
  AND (SELECT COUNT(*) FROM performance_schema.replication_applier_status WHERE service_state = 'ON') = 1"
if [[ $(on mysql-replica -e "$running") != 1 ]]; then
  if [[ $(on mysql-replica -e "SELECT COUNT(*) FROM information_schema.schemata WHERE schema_name = 'lapse'") == 0 ]]; then
    # A replica that never followed: what its own initialisation wrote is no history of the primary.
    on mysql-replica -e "SET GLOBAL super_read_only = OFF; RESET BINARY LOGS AND GTIDS"
  fi
  on mysql-replica <<SQL
STOP REPLICA;
CHANGE REPLICATION SOURCE TO SOURCE_HOST = 'mysql', SOURCE_USER = 'lapse_replication', SOURCE_PASSWORD = '$REPLICATION_PASSWORD',
  SOURCE_AUTO_POSITION = 1, GET_SOURCE_PUBLIC_KEY = 1, SOURCE_CONNECT_RETRY = 1, SOURCE_RETRY_COUNT = 86400, SOURCE_HEARTBEAT_PERIOD = 1;
START REPLICA;
SET PERSIST super_read_only = ON;
SQL
fi

# The accounts come over replication, so that of the role read shows that it works.
arrived="SELECT COUNT(*) FROM mysql.user WHERE user = 'lapse_read'"
for ((i = 0; i < 60; i++)); do
  if [[ $(on mysql-replica -e "$running") == 1 && $(on mysql-replica -e "$arrived") == 1 ]]; then
    echo "mysql-replica: follows mysql, read-only"
    exit 0
  fi
  sleep 1
done
echo "mysql-replica: does not follow mysql after 60 s:" >&2
on mysql-replica -e "SHOW REPLICA STATUS\G" | grep -E 'Running|Error' >&2
exit 1
