# shellcheck shell=bash
# shellcheck disable=SC2034,SC2317 # scripts/stack reads the variables and calls the functions
# STACK=docker: the same servers as containers of docker-compose.yml, with deploy/compose/stack.yml over it.
#
# What the containers do not bring with them (accounts, replication, topic, groups) is set up from outside, as for native servers.

# why_not_docker: says what is missing to run the servers as containers, nothing if it is all there. Quick, since `make test` asks it on
# every machine: an engine that hangs counts as none.
why_not_docker() {
  local image
  command -v docker >/dev/null || { echo "there is no docker here"; return; }
  timeout 2 docker info >/dev/null 2>&1 || { echo "no Docker engine answers"; return; }
  timeout 5 docker compose version >/dev/null 2>&1 || { echo "docker compose is missing"; return; }
  while read -r image; do
    docker image inspect "$image" >/dev/null 2>&1 || timeout 10 docker manifest inspect "$image" >/dev/null 2>&1 ||
      { echo "the image $image is not here and cannot be pulled"; return; }
  done < <(sed -nE 's/^ *image: ((mysql|apache\/rocketmq):.*)/\1/p' "$ROOT/docker-compose.yml" | sort -u)
}

# choose_kind: sets KIND, native or docker, and KIND_REASON. What the stack was once brought up with, it stays: its data is there.
choose_kind() {
  local want=${STACK:-auto} why
  if [[ -e $STATE/settings ]]; then
    KIND=${KIND:-native}
    [[ $want == auto || $want == "$KIND" ]] ||
      wrong "this stack was brought up with STACK=$KIND. 'STACK=$KIND scripts/stack reset' deletes it; or give the other stack a STACK_STATE and a STACK_PORT_OFFSET of its own"
    KIND_REASON="as this stack was brought up"
    return
  fi
  KIND=native
  [[ $want != docker || ${STACK_MYSQL:-auto} != mariadb ]] || wrong "STACK=docker has MySQL only; STACK_MYSQL=mariadb goes with STACK=native"
  if [[ $want != auto ]]; then
    KIND=$want KIND_REASON="STACK=$want"
  elif [[ -n ${STACK_STATE:-} || ${STACK_MYSQL:-auto} == mariadb ]]; then
    # A test that kills servers expects processes; and there is no MariaDB in the Compose file.
    KIND_REASON="STACK_STATE or STACK_MYSQL is given and STACK is not"
  elif why=$(why_not_docker) && [[ -n $why ]]; then
    KIND_REASON=$why
  else
    KIND=docker KIND_REASON="a Docker engine answers and the images are to be had"
  fi
  if [[ $want == docker ]]; then
    why=$(why_not_docker)
    [[ -z $why ]] || missing "STACK=docker: $why"
  fi
}

# use_docker: puts the container's ways in the place of the processes'.
use_docker() {
  FLAVOR=mysql SOURCE_AT=(mysql 3306) WANT_MYSQL=mysql
  pid_of() { container_of "$1"; }
  give_up() {
    {
      echo "stack: $2"
      echo "--- the last lines of its log"
      compose logs --no-color --tail 15 "$(services "$1" | tail -n 1)" 2>&1 | sed 's/^/    /'
      echo "---"
      echo "What to do: 'scripts/stack logs $1' has more; 'scripts/stack up' tries again; 'scripts/stack reset' starts from an empty store."
    } >&2
  }
  end() {
    container_of "$1" >/dev/null || return 1
    # shellcheck disable=SC2046 # a list
    if [[ ${2:-TERM} == KILL ]]; then compose kill $(services "$1"); else compose stop $(services "$1"); fi >/dev/null 2>&1
  }
}

# services PART: the services of the Compose file, one a line.
services() {
  case $1 in
    replica) echo mysql-replica ;;
    broker) printf '%s\n' broker proxy ;;
    *) echo "$1" ;;
  esac
}

# compose ARGUMENT…: of this stack; its name is that of its state directory.
compose() {
  local v
  for v in MYSQL REPLICA NAMESRV BROKER PROXY METRICS; do
    local port=PORT_$v
    export "LAPSE_STACK_${v}_PORT=${!port}"
  done
  for v in ROOT MIGRATE API RELAY CONSUME REFUND RECONCILE READ REPLICATION; do
    local name=${v}_PASSWORD
    export "$name=${!name:-none}"
  done
  # The file asks for them; no service that needs them is started here.
  TIMER_PRECISION_MS=$PRECISION API_TOKEN=none PAYMENT_SECRET=none \
    docker compose -p "lapse-stack-$(cksum <<<"$STATE" | cut -d ' ' -f 1)" \
    -f "$ROOT/docker-compose.yml" -f "$ROOT/deploy/compose/stack.yml" "$@" 9>&-
}

# container_of PART: the short id of the part's last container, if all of them run.
container_of() {
  local s id=''
  for s in $(services "$1"); do
    id=$(compose ps -q --status running "$s" 2>/dev/null) && [[ -n $id ]] || return 1
  done
  echo "${id:0:8}"
}

# start_containers PART…: and what they need from outside.
start_containers() {
  local part wanted=() log=$STATE/logs/compose.log
  for part in "$@"; do mapfile -t -O "${#wanted[@]}" wanted < <(services "$part"); done
  if ! compose up -d --wait --wait-timeout "$START_TIMEOUT" "${wanted[@]}" >"$log" 2>&1; then
    tail -n 15 "$log" | sed 's/^/    /' >&2
    fail "docker compose could not start ${wanted[*]}; the lines above are the end of $log. 'scripts/stack logs' has the servers' own. A port that is taken: STACK_PORT_OFFSET=1000"
  fi
  for part in "$@"; do
    case $part in
      mysql) set_up_primary ;;
      replica) set_up_replica ;;
      broker)
        "$STACKCTL" broker --endpoints "127.0.0.1:$PORT_PROXY" --broker "127.0.0.1:$PORT_BROKER" --namesrv "127.0.0.1:$PORT_NAMESRV" \
          --topic "$TOPIC" --group "$GROUP" --doctor-topic "$DOCTOR_TOPIC" --doctor-group "$DOCTOR_GROUP" --events-topic "$EVENTS_TOPIC" --precision "$PRECISION" || fail "broker: up, but topic $TOPIC and group $GROUP are not usable. 'scripts/stack logs broker' says more"
        ;;
    esac
    say "$part: up, $(endpoint "$part")"
  done
}
