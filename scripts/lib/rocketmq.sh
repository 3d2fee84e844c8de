# shellcheck shell=bash
# RocketMQ: the name server, and the broker with the gRPC proxy in one process.

TOPIC=order-timeout
GROUP=order-timeout-cg
# Of lapse doctor.
DOCTOR_TOPIC=lapse-doctor
DOCTOR_GROUP=lapse-doctor-cg
# Of the events of orders, for whoever sets events.topic to it.
EVENTS_TOPIC=order-events

# render_broker: broker.conf with this machine's addresses, paths and sizes behind it. Of a key that stands twice, RocketMQ takes the last.
render_broker() {
  cat "$ROOT/configs/rocketmq/broker.conf" "$ROOT/configs/rocketmq/small.conf"
  printf '%s\n' "namesrvAddr=127.0.0.1:$PORT_NAMESRV" "listenPort=$PORT_BROKER" brokerIP1=127.0.0.1 bindAddress=127.0.0.1 \
    "storePathRootDir=$STATE/broker/store" "storePathCommitLog=$STATE/broker/store/commitlog" \
    "timerPrecisionMs=$PRECISION" "metricsPromExporterPort=$PORT_METRICS" metricsPromExporterHost=127.0.0.1
  [[ -z ${STACK_FLUSH_DISK_TYPE:-} ]] || echo "flushDiskType=$STACK_FLUSH_DISK_TYPE"
}

start_namesrv() {
  local begun=$SECONDS
  if pid_of namesrv >/dev/null; then
    say "namesrv: already up on port $PORT_NAMESRV"
    return
  fi
  claim_ports namesrv "$PORT_NAMESRV"
  mkdir -p "$STATE/namesrv"
  {
    cat "$ROOT/configs/rocketmq/namesrv.conf"
    printf '%s\n' "listenPort=$PORT_NAMESRV" bindAddress=127.0.0.1
  } >"$STATE/namesrv/namesrv.conf"
  # The class path keeps its star: Java expands it.
  launch namesrv java "-Dlapse.stack=$STATE/namesrv" "-Drocketmq.home.dir=$STATE/namesrv" "-Duser.home=$STATE/namesrv" \
    -Xms128m -Xmx256m -XX:+UseSerialGC -cp "$JARS/*" -Drmq.logback.configurationFile=rmq.namesrv.logback.xml \
    org.apache.rocketmq.namesrv.NamesrvStartup -c "$STATE/namesrv/namesrv.conf"
  await namesrv "$START_TIMEOUT" "\"boot success\" in its log" grep -q "Name Server boot success" "$STATE/logs/namesrv.log" || exit 1
  say "namesrv: up on port $PORT_NAMESRV ($((SECONDS - begun)) s)"
}

start_broker() {
  local begun=$SECONDS store=$STATE/broker/store used heap=${STACK_BROKER_HEAP:-1g}
  if pid_of broker >/dev/null; then
    say "broker: already up on port $PORT_PROXY"
    return
  fi
  claim_ports broker "$PORT_BROKER" "$((PORT_BROKER - 2))" "$((PORT_BROKER + 1))" "$PORT_PROXY" "$PORT_PROXY_REMOTING" "$PORT_METRICS"
  mkdir -p "$store/config"
  used=$(df -P "$store" | awk 'NR == 2 { sub("%", "", $5); print $5 }')
  ((used < 85)) || warn "the disk under $store is $used % full; at 90 % the broker refuses writes"
  # Before the first start, so that nobody can look the topic up too early: the proxy keeps "not found" for 20 s.
  if [[ ! -e $store/config/topics.json ]]; then
    cp "$ROOT/configs/rocketmq/topics.json" "$ROOT/configs/rocketmq/subscriptionGroup.json" "$store/config/"
  fi
  render_broker >"$STATE/broker/broker.conf"
  sed -e "s/\"grpcServerPort\": *[0-9]*/\"grpcServerPort\": $PORT_PROXY/" \
    -e "s/\"remotingListenPort\": *[0-9]*/\"remotingListenPort\": $PORT_PROXY_REMOTING/" \
    "$ROOT/configs/rocketmq/rmq-proxy.json" >"$STATE/broker/rmq-proxy.json"
  launch broker java "-Dlapse.stack=$STATE/broker" "-Drocketmq.home.dir=$STATE/broker" "-Duser.home=$STATE/broker" \
    "-Xms$heap" "-Xmx$heap" -XX:MaxDirectMemorySize=512m -cp "$JARS/*" -Drmq.logback.configurationFile=rmq.proxy.logback.xml \
    org.apache.rocketmq.proxy.ProxyStartup -n "127.0.0.1:$PORT_NAMESRV" -pm local -bc "$STATE/broker/broker.conf" -pc "$STATE/broker/rmq-proxy.json"
  await broker "$START_TIMEOUT" "\"startup successfully\" in its log" grep -q "rocketmq-proxy startup successfully" "$STATE/logs/broker.log" || exit 1
  "$STACKCTL" broker --endpoints "127.0.0.1:$PORT_PROXY" --broker "127.0.0.1:$PORT_BROKER" --topic "$TOPIC" --group "$GROUP" \
    --doctor-topic "$DOCTOR_TOPIC" --doctor-group "$DOCTOR_GROUP" --events-topic "$EVENTS_TOPIC" --precision "$PRECISION" ||
    fail "broker: up, but topic $TOPIC and group $GROUP are not usable. 'scripts/stack logs broker' and $STATE/broker/logs/rocketmqlogs say more"
  say "broker: up on port $PORT_PROXY, topic $TOPIC (DELAY), group $GROUP ($((SECONDS - begun)) s)"
}
