# shellcheck shell=bash
# Servers as processes: start detached, find again, stop.
#
# A part is known by its pid together with the time that the kernel started that pid, written to $STATE/run/PART.pid, and by a mark in its
# command line that contains the state directory. The mark finds a server whose pid file is gone (the stack was killed between fork and
# write) and keeps a reused pid from being taken for ours. Nothing else is ever signalled.

# mark PART: the one argument of the part's command line that no other process has.
mark() {
  case $1 in
    mysql | replica) echo "--datadir=$STATE/$1/data" ;;
    namesrv | broker) echo "-Dlapse.stack=$STATE/$1" ;;
  esac
}

# started_at PID: the kernel's start time of a process that runs; fails for one that is gone or a zombie. The command name, field 2 of
# stat, may hold blanks and parentheses, so it is cut off first.
started_at() {
  local stat="" fields
  # Not $(<file): bash ends the whole shell when the process goes between the opening of its file and the reading. At the end of the file read fails.
  { read -rd "" stat <"/proc/$1/stat" || [[ -n $stat ]]; } 2>/dev/null || return 1
  read -ra fields <<<"${stat##*) }"
  [[ ${fields[0]} != [ZX] ]] || return 1
  echo "${fields[19]}"
}

# has_mark PID MARK: is MARK one whole argument of the process's command line?
has_mark() {
  grep -qzxF -e "$2" "/proc/$1/cmdline" 2>/dev/null
}

# pid_of PART: prints the pid of the part's server, or fails if it does not run.
pid_of() {
  local part=$1 pid start m f
  m=$(mark "$part")
  if read -r pid start 2>/dev/null <"$STATE/run/$part.pid" &&
    [[ -n $pid && $(started_at "$pid") == "$start" ]] && has_mark "$pid" "$m"; then
    echo "$pid"
    return 0
  fi
  [[ -d $STATE ]] || return 1
  for f in $(grep -lszxF -e "$m" /proc/[0-9]*/cmdline 2>/dev/null); do
    pid=${f//[!0-9]/}
    if started_at "$pid" >/dev/null; then
      echo "$pid"
      return 0
    fi
  done
  return 1
}

# launch PART COMMAND…: starts the server in a session of its own, with its log as the only thing that it shares with us. A descriptor that
# it inherited would keep a pipe behind `make` open, or our lock taken, for as long as the server lives.
launch() {
  local part=$1 log=$STATE/logs/$1.log pid
  shift
  [[ ! -s $log ]] || mv -f "$log" "$log.1"
  (
    for fd in /proc/self/fd/*; do
      fd=${fd##*/}
      ((fd <= 2)) || eval "exec $fd>&-" 2>/dev/null
    done
    cd "$STATE"
    exec setsid "$@" </dev/null >"$log" 2>&1
  ) &
  pid=$!
  disown "$pid"
  echo "$pid $(started_at "$pid")" >"$STATE/run/$part.pid"
  # Until the fork has become the server it bears no mark: whoever looked for the part in that moment would take it for dead.
  until has_mark "$pid" "$(mark "$part")" || ! started_at "$pid" >/dev/null; do
    sleep 0.01
  done
}

# await PART SECONDS WHAT COMMAND…: runs COMMAND until it succeeds. Fails with its last words and the end of the part's log when the server
# dies or the time is up.
await() {
  local part=$1 limit=$2 what=$3 begun=$SECONDS last
  shift 3
  until last=$("$@" 2>&1); do
    if ! pid_of "$part" >/dev/null; then
      give_up "$part" "$part ended before there was $what"
      return 1
    fi
    if ((SECONDS - begun > limit)); then
      give_up "$part" "$part did not come up: waited $limit s for $what${last:+: $last}"
      return 1
    fi
    sleep 0.1
  done
}

give_up() {
  local part=$1 log=$STATE/logs/$1.log
  {
    echo "stack: $2"
    echo "--- the last lines of $log"
    tail -n 15 "$log" 2>/dev/null | sed 's/^/    /'
    echo "---"
    echo "What to do: read the log ('scripts/stack logs $part'); 'scripts/stack up' tries again; 'scripts/stack reset' starts from an empty store."
    echo "On a slow machine STACK_START_TIMEOUT (now $START_TIMEOUT s) gives it longer."
  } >&2
}

# end PART [SIGNAL]: ends a server and waits until it is gone, so that nobody touches a store that is still written. TERM gets STOP_TIMEOUT
# seconds (a broker after load takes up to 35), then KILL.
end() {
  local part=$1 signal=${2:-TERM} pid begun=$SECONDS start
  if ! pid=$(pid_of "$part"); then
    rm -f "$STATE/run/$part.pid"
    return 1
  fi
  start=$(started_at "$pid") || return 0
  kill -s "$signal" "$pid" 2>/dev/null || true
  while [[ $(started_at "$pid") == "$start" ]]; do
    if [[ $signal == TERM ]] && ((SECONDS - begun > STOP_TIMEOUT)); then
      warn "$part (pid $pid) did not stop within $STOP_TIMEOUT s and is killed; its store recovers at the next start"
      signal=KILL begun=$SECONDS
      kill -s KILL "$pid" 2>/dev/null || true
    elif [[ $signal == KILL ]] && ((SECONDS - begun > 20)); then
      fail "$part (pid $pid) is still there 20 s after SIGKILL; its store must not be touched before it is gone"
    fi
    sleep 0.1
  done
  rm -f "$STATE/run/$part.pid"
}

# listener PORT: who listens on a TCP port, as "pid (command)", or "another user's process"; fails if nobody does. Read from /proc, which is
# everywhere where native servers run.
listener() {
  local hex inode fd pid
  hex=$(printf '%04X' "$1")
  inode=$(cat /proc/net/tcp /proc/net/tcp6 2>/dev/null | awk -v p=":$hex" '$4 == "0A" && substr($2, length($2) - 4) == p { print $10; exit }')
  [[ -n $inode ]] || return 1
  for fd in /proc/[0-9]*/fd; do
    if find "$fd" -lname "socket:\[$inode\]" -print -quit 2>/dev/null | grep -q .; then
      pid=${fd#/proc/} pid=${pid%/fd}
      echo "pid $pid ($(tr '\0' ' ' <"/proc/$pid/cmdline" 2>/dev/null | cut -c1-80))"
      return 0
    fi
  done
  echo "a process of another user"
}

# claim_ports PART PORT…: refuses to start a server on a port that somebody else has.
claim_ports() {
  local part=$1 port who
  shift
  for port in "$@"; do
    if who=$(listener "$port"); then
      fail "port $port, which $part needs, is taken by $who. End that process, or move the stack: STACK_PORT_OFFSET=1000 scripts/stack up (or STACK_${part^^}_PORT; see --help)"
    fi
  done
}
