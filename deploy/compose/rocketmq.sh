#!/usr/bin/env bash
# Starts one RocketMQ server in a container of the image apache/rocketmq: rocketmq.sh namesrv|broker|proxy.
#
# Java itself becomes the container's process. The image's launchers leave it behind a shell that passes no signal on, so that a broker would
# be killed at the end of each grace period, in the middle of its store; and one of them goes into the background, where the container ends.
set -euo pipefail

config=/etc/lapse
home=${HOME_OF_ROCKETMQ:-/home/rocketmq}

# JAVA_SIZES is heap and direct memory; the images' defaults are made for servers.
start() {
  local class=$1
  shift
  # shellcheck disable=SC2086 # JAVA_SIZES is a list
  exec java $JAVA_SIZES -XX:+ExitOnOutOfMemoryError "-Drocketmq.home.dir=$ROCKETMQ_HOME" "-Duser.home=$home" \
    "-Drmq.logback.configurationFile=rmq.$logback.logback.xml" -cp "$ROCKETMQ_HOME/conf:$ROCKETMQ_HOME/lib/*" "$class" "$@"
}

case ${1:-} in
  namesrv)
    logback=namesrv
    start org.apache.rocketmq.namesrv.NamesrvStartup -c "$config/namesrv.conf"
    ;;
  broker)
    logback=broker
    store=$home/store
    # Before the first start, so that the topic is there before anybody can look it up: the proxy keeps "not found" for 20 s. The group's
    # first offsets are those of an empty topic that way.
    if [[ ! -e $store/config/topics.json ]]; then
      mkdir -p "$store/config"
      cp "$config/topics.json" "$config/subscriptionGroup.json" "$store/config/"
    fi
    # Of a key that stands twice, the broker takes the last. Its address is its name: that of the container changes with every new one.
    {
      cat "$config/broker.conf" "$config/small.conf"
      printf '%s\n' namesrvAddr=namesrv:9876 brokerIP1=broker "storePathRootDir=$store" "storePathCommitLog=$store/commitlog"
      [[ -z ${TIMER_PRECISION_MS:-} ]] || echo "timerPrecisionMs=$TIMER_PRECISION_MS"
      [[ -z ${FLUSH_DISK_TYPE:-} ]] || echo "flushDiskType=$FLUSH_DISK_TYPE"
    } >"$home/broker.conf"
    start org.apache.rocketmq.broker.BrokerStartup -c "$home/broker.conf"
    ;;
  proxy)
    logback=proxy
    start org.apache.rocketmq.proxy.ProxyStartup -n namesrv:9876 -pm cluster -pc "$config/rmq-proxy.json"
    ;;
  *)
    echo "rocketmq.sh: say namesrv, broker or proxy" >&2
    exit 2
    ;;
esac
