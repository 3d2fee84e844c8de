# shellcheck shell=bash
# MySQL (or MariaDB): the primary and its read replica.

# server_flags PART: prints the part's command line behind the program, one word a line. What has to do with durability and replication is
# in configs/mysql/lapse.cnf; here are the places, ports and sizes of this machine.
server_flags() {
  local part=$1 port=$PORT_MYSQL id=1
  [[ $part != replica ]] || port=$PORT_REPLICA id=2
  printf '%s\n' "--defaults-file=$STATE/$part/lapse.cnf" "--datadir=$STATE/$part/data" "${MYSQLD_FLAGS[@]}" \
    --bind-address=127.0.0.1 "--port=$port" "--server-id=$id" "--pid-file=$STATE/$part/server.pid" \
    "--innodb-buffer-pool-size=${STACK_MYSQL_BUFFER_POOL:-256M}"
  # Relative to the data directory: the path of a socket must be shorter than 108 bytes, and a state directory can be anywhere.
  printf '%s\n' --socket=mysql.sock
  # Started by root only in containers and CI, where everything belongs to root.
  [[ $EUID != 0 ]] || echo --user=root
  if [[ $FLAVOR == mysql ]]; then
    echo --secure-file-priv=NULL
  fi
  if [[ $part == replica ]]; then
    echo --skip-replica-start | sed "s/replica/$([[ $FLAVOR == mysql ]] && echo replica || echo slave)/"
  fi
}

# The account for tests exists from the first moment, on both servers: it is written at initialisation and kept out of the binlog, since
# the replica could not create it a second time. MariaDB's own system tables come with that account, without a password.
root_sql() {
  cat <<EOF
SET SESSION sql_log_bin = 0;
CREATE USER IF NOT EXISTS 'root'@'127.0.0.1';
ALTER USER 'root'@'127.0.0.1' IDENTIFIED BY '$ROOT_PASSWORD';
GRANT ALL PRIVILEGES ON *.* TO 'root'@'127.0.0.1' WITH GRANT OPTION;
EOF
}

init_mysql() {
  local part=$1
  root_sql >"$STATE/$part/init.sql"
  "${MYSQLD[@]}" "--defaults-file=$STATE/$part/lapse.cnf" --initialize-insecure "--init-file=$STATE/$part/init.sql" \
    "--datadir=$STATE/$part/data" "${MYSQLD_FLAGS[@]}" --secure-file-priv=NULL --user="$(id -un)" >"$STATE/logs/$part.init.log" 2>&1
}

init_mariadb() {
  local part=$1
  mkdir -p "$STATE/$part/data/mysql"
  # What mariadb-install-db does; that script cannot run a server that lies elsewhere.
  {
    echo "USE mysql;"
    cat "$MYSQL_SHARE"/{mysql_system_tables,mysql_performance_tables,mysql_system_tables_data,fill_help_tables}.sql
    echo "FLUSH PRIVILEGES;"
    root_sql
  } | "${MYSQLD[@]}" --no-defaults --bootstrap "--datadir=$STATE/$part/data" "${MYSQLD_FLAGS[@]}" --user="$(id -un)" \
    --default-storage-engine=InnoDB --skip-log-bin >"$STATE/logs/$part.init.log" 2>&1
}

# start_mysql PART: initialises an empty part, starts it and waits until it answers.
start_mysql() {
  local part=$1 port=$PORT_MYSQL begun=$SECONDS flags
  [[ $part != replica ]] || port=$PORT_REPLICA
  if pid_of "$part" >/dev/null; then
    say "$part: already up on port $port"
    return
  fi
  claim_ports "$part" "$port"
  mkdir -p "$STATE/$part"
  cp "$ROOT/configs/mysql/lapse.cnf" "$STATE/$part/lapse.cnf"
  # A data directory counts only once it was initialised to the end.
  if [[ ! -e $STATE/$part/ready ]]; then
    rm -rf "$STATE/$part/data"
    mkdir -p "$STATE/$part/data"
    if ! "init_$FLAVOR" "$part"; then
      tail -n 15 "$STATE/logs/$part.init.log" | sed 's/^/    /' >&2
      fail "$part: a new data directory could not be initialised; the lines above are the end of $STATE/logs/$part.init.log"
    fi
    rm -f "$STATE/$part/init.sql"
    : >"$STATE/$part/ready"
  fi
  # Left by a server that was killed. The next one refuses to start while its pid is taken, if only by a zombie or somebody else.
  rm -f "$STATE/$part/data/mysql.sock" "$STATE/$part/data/mysql.sock.lock" "$STATE/$part/server.pid"
  mapfile -t flags < <(server_flags "$part")
  launch "$part" "${MYSQLD[@]}" "${flags[@]}"
  await "$part" "$START_TIMEOUT" "an answer to a connection" sql "$(root_dsn "$port")" -e 'SELECT 1' || exit 1
  say "$part: up on port $port ($((SECONDS - begun)) s)"
}

root_dsn() { echo "root:$ROOT_PASSWORD@tcp(127.0.0.1:$1)/"; }

# sql DSN ARGUMENT…: the DSN holds a password, so it travels in the environment and not in the command line.
sql() {
  STACKCTL_DSN=$1 "$STACKCTL" sql "${@:2}"
}

# fill_in FILE: prints a file of deploy/mysql with the passwords in their places.
fill_in() {
  sed -e "s/@MIGRATE_PASSWORD@/$MIGRATE_PASSWORD/g" -e "s/@API_PASSWORD@/$API_PASSWORD/g" -e "s/@RELAY_PASSWORD@/$RELAY_PASSWORD/g" \
    -e "s/@CONSUME_PASSWORD@/$CONSUME_PASSWORD/g" -e "s/@REFUND_PASSWORD@/$REFUND_PASSWORD/g" -e "s/@RECONCILE_PASSWORD@/$RECONCILE_PASSWORD/g" -e "s/@READ_PASSWORD@/$READ_PASSWORD/g" \
    -e "s/@REPLICATION_PASSWORD@/$REPLICATION_PASSWORD/g" "$ROOT/deploy/mysql/$1"
}

# set_up_primary: accounts and the empty database; and a look at whether the shipped settings are in force, since a typo in one that is
# marked "loose" would go unnoticed.
set_up_primary() {
  local dsn
  dsn=$(root_dsn "$PORT_MYSQL")
  { fill_in users.sql && fill_in replication.sql; } | sql "$dsn" || fail "mysql: the accounts could not be created"
  sql "$dsn" -e "SELECT @@global.sync_binlog = 1 AND @@global.innodb_flush_log_at_trx_commit = 1 AND @@global.binlog_format = 'ROW' AND @@global.log_bin = 1" --expect 1 ||
    fail "mysql: the settings of configs/mysql/lapse.cnf are not in force"
  if [[ $FLAVOR == mysql ]]; then
    sql "$dsn" -e "SELECT @@global.gtid_mode = 'ON' AND @@global.enforce_gtid_consistency = 'ON'" --expect 1 ||
      fail "mysql: GTIDs are not on, though configs/mysql/lapse.cnf says so"
  fi
}

# set_up_replica: points the replica at the primary by GTID, makes it read-only for everybody, and waits until it follows. One that follows
# already is left alone: somebody may be measuring its lag.
set_up_replica() {
  local dsn running
  dsn=$(root_dsn "$PORT_REPLICA")
  if [[ $FLAVOR == mysql ]]; then
    running="SELECT (SELECT COUNT(*) FROM performance_schema.replication_connection_status WHERE service_state = 'ON') = 1
      AND (SELECT COUNT(*) FROM performance_schema.replication_applier_status WHERE service_state = 'ON') = 1"
    # One that never followed: what an image's first start wrote (an account, say) is no history of the primary, and `lapse doctor` would
    # rightly complain of it.
    if sql "$dsn" -e "SELECT @@global.gtid_executed <> '' AND NOT EXISTS (SELECT 1 FROM information_schema.schemata WHERE schema_name = 'lapse')" --expect 1 2>/dev/null; then
      sql "$dsn" -e "RESET BINARY LOGS AND GTIDS" || fail "replica: its own history could not be forgotten"
    fi
    sql "$dsn" -e "$running" --expect 1 2>/dev/null || sql "$dsn" <<EOF || fail "replica: replication could not be set up"
STOP REPLICA;
CHANGE REPLICATION SOURCE TO SOURCE_HOST = '${SOURCE_AT[0]}', SOURCE_PORT = ${SOURCE_AT[1]}, SOURCE_USER = 'lapse_replication',
  SOURCE_PASSWORD = '$REPLICATION_PASSWORD', SOURCE_AUTO_POSITION = 1, GET_SOURCE_PUBLIC_KEY = 1, SOURCE_CONNECT_RETRY = 1,
  SOURCE_RETRY_COUNT = 86400, SOURCE_HEARTBEAT_PERIOD = 1;
START REPLICA;
SET PERSIST super_read_only = ON;
EOF
  else
    running="SELECT COUNT(*) FROM information_schema.global_status WHERE variable_name = 'SLAVE_RUNNING' AND variable_value = 'ON'"
    sql "$dsn" -e "$running" --expect 1 2>/dev/null || sql "$dsn" <<EOF || fail "replica: replication could not be set up"
STOP SLAVE;
CHANGE MASTER TO MASTER_HOST = '127.0.0.1', MASTER_PORT = $PORT_MYSQL, MASTER_USER = 'lapse_replication',
  MASTER_PASSWORD = '$REPLICATION_PASSWORD', MASTER_USE_GTID = slave_pos, MASTER_CONNECT_RETRY = 1;
START SLAVE;
EOF
    # Not kept over a restart, unlike MySQL's.
    sql "$dsn" -e "SET GLOBAL read_only = ON" || fail "replica: it could not be made read-only"
  fi
  await replica "$START_TIMEOUT" "a running replication" sql "$dsn" -e "$running" --expect 1 || exit 1
  # The accounts came over replication, so this also shows that it works.
  await replica "$START_TIMEOUT" "the account of role read, by replication" \
    sql "lapse_read:$READ_PASSWORD@tcp(127.0.0.1:$PORT_REPLICA)/lapse" -e 'SELECT 1' || exit 1
  say "replica: follows mysql, read-only"
}
