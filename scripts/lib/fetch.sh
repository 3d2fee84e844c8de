# shellcheck shell=bash
# What the stack needs and does not find: installed where apt and root are there, otherwise unpacked into the cache or asked for.
#
# Everything in the cache is made beside its place and renamed when whole, under a lock, so that neither an interrupted download nor two
# stacks at once leave half of something behind.

# cached NAME COMMAND…: makes $CACHE/NAME, a directory, by `COMMAND… DIR` unless it is there.
cached() {
  local name=$1 lock
  shift
  [[ ! -d $CACHE/$name ]] || return 0
  mkdir -p "$CACHE"
  exec {lock}>"$CACHE/$name.lock"
  flock "$lock"
  if [[ ! -d $CACHE/$name ]]; then
    rm -rf "$CACHE/$name.part"
    mkdir -p "$CACHE/$name.part"
    if ! "$@" "$CACHE/$name.part"; then
      rm -rf "$CACHE/$name.part"
      exec {lock}>&-
      return 1
    fi
    mv -T "$CACHE/$name.part" "$CACHE/$name"
  fi
  exec {lock}>&-
}

can_install() { [[ $EUID == 0 ]] && command -v apt-get >/dev/null; }

# install PACKAGE…: apt-get install where that is possible, otherwise exit 3 naming the packages.
install() {
  can_install || missing "not on this machine: $* (Debian and Ubuntu names). Install it, then run this again"
  say "installing $* (apt-get)"
  mkdir -p "$CACHE"
  (
    flock 7
    export DEBIAN_FRONTEND=noninteractive
    apt-get install -y -qq --no-install-recommends "$@" >"$CACHE/apt.log" 2>&1 ||
      { apt-get update -qq && apt-get install -y -qq --no-install-recommends "$@"; } >"$CACHE/apt.log" 2>&1 ||
      { tail -n 15 "$CACHE/apt.log" >&2 && exit 1; }
  ) 7>"$CACHE/apt.lock" || missing "apt-get could not install: $*. Install it by hand, then run this again"
}

java_version() {
  local line
  line=$(java -version 2>&1 | grep -m1 version) || return 1
  [[ $line =~ \"(1\.)?([0-9]+) ]] && echo "${BASH_REMATCH[2]}"
}

need_java() {
  local v
  v=$(java_version) && ((v >= 11)) && return
  install default-jre-headless
  v=$(java_version) && ((v >= 11)) || missing "RocketMQ needs Java 11 or newer, and java is ${v:-not} there"
}

# distribution: debian, ubuntu, or whatever else this is.
distribution() { (. /etc/os-release 2>/dev/null && echo "${ID:-}"); }

codename() { (. /etc/os-release 2>/dev/null && echo "${VERSION_CODENAME:-}"); }

# own_repository: prints the options and address of this distribution's main archive as an apt source line needs them. Taken from what
# the machine is set up with, so that its mirror is used; the security archive has other packages.
own_repository() {
  local uri key
  # shellcheck disable=SC2016 # apt's fields, not ours
  uri=$(apt-get indextargets --format '$(REPO_URI) $(LABEL) $(COMPONENT)' 'Created-By: Packages' 2>/dev/null |
    awk '$3 == "main" && ($2 == "Debian" || $2 == "Ubuntu") && $1 !~ /security/ { print $1; exit }')
  [[ -n $uri ]] || return 1
  key=$(find /usr/share/keyrings /etc/apt/keyrings /etc/apt/trusted.gpg.d -name "$(distribution)-archive-keyring.*" 2>/dev/null | sort -r | head -n 1)
  echo "${key:+[signed-by=$key] }$uri"
}

# apt_unpack SUITE PACKAGES SKIP DIR: unpacks packages, and all that they depend on down to the C library, into DIR. apt resolves and
# verifies them in folders of its own, with an empty status file: the machine's packages and lists are neither asked nor changed, and no
# root is needed. What matches the pattern SKIP is left out.
apt_unpack() {
  local suite=$1 packages=$2 skip=$3 dir=$4 repo deb apt
  apt=$dir.apt
  rm -rf "$apt"
  mkdir -p "$apt"/{lists,cache/archives,empty}/partial
  : >"$apt/status"
  repo=$(own_repository) || { can_install && apt-get update -qq && repo=$(own_repository); } || return 1
  echo "deb $repo $suite main" >"$apt/sources.list"
  cat >"$apt/apt.conf" <<EOF
Dir::State::lists "$apt/lists";
Dir::State::status "$apt/status";
Dir::Cache "$apt/cache";
Dir::Etc::sourcelist "$apt/sources.list";
Dir::Etc::sourceparts "$apt/empty";
Dir::Etc::preferences "$apt/empty/none";
Dir::Etc::preferencesparts "$apt/empty";
Dir::Log "$apt";
Acquire::Languages "none";
Acquire::IndexTargets::deb::DEP-11::DefaultEnabled "false";
Acquire::IndexTargets::deb::Contents-deb::DefaultEnabled "false";
Acquire::Retries "3";
APT::Sandbox::User "";
APT::Install-Recommends "false";
Debug::NoLocking "true";
EOF
  # shellcheck disable=SC2086 # PACKAGES is a list
  if ! { APT_CONFIG=$apt/apt.conf apt-get -qq update && APT_CONFIG=$apt/apt.conf apt-get -qq -y --download-only install $packages; } >"$apt/log" 2>&1; then
    tail -n 10 "$apt/log" >&2
    rm -rf "$apt"
    return 1
  fi
  for deb in "$apt"/cache/archives/*.deb; do
    # shellcheck disable=SC2254 # SKIP is a pattern
    case ${deb##*/} in
      $skip) ;;
      *) dpkg-deb -x "$deb" "$dir" || return 1 ;;
    esac
  done
  rm -rf "$apt"
}

# unpacked_runner DIR: prints the command words that run a program of DIR with DIR's own C library, one a line.
# Packages of a release without the merged /usr (Debian 12) have it under /lib, newer ones under /usr/lib.
unpacked_runner() {
  local loader path
  loader=$(find "$1/usr/lib" "$1/usr/lib64" "$1/lib" -maxdepth 2 -name 'ld-linux*.so.*' -type f -print -quit 2>/dev/null) || true
  [[ -n $loader ]] || return 1
  path=$(find "$1/usr/lib" "$1/lib" -maxdepth 1 -name '*-linux-gnu*' -type d 2>/dev/null | paste -sd:) || true
  printf '%s\n' "$loader" --library-path "$path"
}

copy_jars() {
  [[ -n $(command -v mvn) ]] || install maven
  say "fetching RocketMQ's jars (Maven, about 100 MB)"
  if ! mvn -B -q -f "$ROOT/deploy/rocketmq/pom.xml" dependency:copy-dependencies -DoutputDirectory="$1" >"$CACHE/maven.log" 2>&1; then
    tail -n 15 "$CACHE/maven.log" >&2
    return 1
  fi
}

# need_jars: sets JARS. The directory is named after the pom, so that another version gets one of its own.
need_jars() {
  local name
  name=rocketmq-$(sha256sum "$ROOT/deploy/rocketmq/pom.xml" | cut -c1-12)
  cached "$name" copy_jars || fail "RocketMQ's jars could not be fetched. Check that Maven reaches its repository ($CACHE/maven.log), then run this again"
  JARS=$CACHE/$name
}

debian_mysql() {
  say "fetching MySQL (Debian sid's mysql-server-core, unpacked into the cache, about 70 MB)"
  apt_unpack sid mysql-server-core '*perl*' "$1"
}

ubuntu_mysql() {
  say "fetching MySQL (Ubuntu's mysql-server-core-8.0, unpacked into the cache)"
  apt_unpack "$(codename)" mysql-server-core-8.0 '*perl*' "$1"
}

debian_mariadb() {
  say "fetching MariaDB (mariadb-server-core, unpacked into the cache)"
  apt_unpack "$(codename)" "mariadb-server-core mariadb-server" '*perl*' "$1"
}

# need_mysqld: sets MYSQLD (command words), MYSQLD_FLAGS, MYSQL_SHARE and FLAVOR. Looks for MySQL 8.0 or newer on the PATH, then for the
# distribution's package, then for MariaDB; STACK_MYSQL=mysql or mariadb allows the one only.
need_mysqld() {
  local want=${1:-auto} id found
  if [[ $want != mariadb ]]; then
    if found=$(command -v mysqld || PATH=$PATH:/usr/sbin:/usr/local/mysql/bin command -v mysqld) && is_mysql8 "$found"; then
      MYSQLD=("$found") MYSQLD_FLAGS=() FLAVOR=mysql MYSQL_SHARE=
      return
    fi
    id=$(distribution)
    if command -v apt-get dpkg-deb >/dev/null && [[ $id == debian || $id == ubuntu ]] && cached "mysql-$id" "${id}_mysql"; then
      use_unpacked "$CACHE/mysql-$id" mysqld
      FLAVOR=mysql
      return
    fi
    [[ $want != mysql ]] || missing "MySQL 8.0 or newer: put its mysqld on the PATH, or let STACK_MYSQL=mariadb take MariaDB"
    warn "no MySQL 8.0 or newer to be had here; MariaDB takes its place"
  fi
  FLAVOR=mariadb
  if found=$(PATH=$PATH:/usr/sbin command -v mariadbd) && is_mariadb106 "$found" && [[ -r /usr/share/mysql/mysql_system_tables.sql ]]; then
    MYSQLD=("$found") MYSQLD_FLAGS=() MYSQL_SHARE=/usr/share/mysql
    return
  fi
  if command -v apt-get dpkg-deb >/dev/null && cached mariadb debian_mariadb; then
    use_unpacked "$CACHE/mariadb" mariadbd
    return
  fi
  missing "a database server: mysql-server 8.0 or newer, or mariadb-server 10.6 or newer"
}

# is_mysql8 PROGRAM: MySQL 8.0 or newer that may use our directories. Where AppArmor confines the packaged one to its own, the copy in the
# cache is taken instead.
is_mysql8() {
  local v
  [[ $1 != /usr/sbin/mysqld || ! -e /etc/apparmor.d/usr.sbin.mysqld ]] || return 1
  v=$("$1" --version 2>/dev/null) || return 1
  [[ $v != *MariaDB* && $v =~ Ver\ ([0-9]+)\. ]] && ((BASH_REMATCH[1] >= 8))
}

is_mariadb106() {
  local v
  v=$("$1" --version 2>/dev/null) || return 1
  [[ $v =~ ([0-9]+)\.([0-9]+)\.[0-9]+-MariaDB ]] && ((BASH_REMATCH[1] > 10 || BASH_REMATCH[1] == 10 && BASH_REMATCH[2] >= 6))
}

# use_unpacked DIR PROGRAM: a server that is not installed does not find its messages, character sets and plugins by itself.
use_unpacked() {
  local dir=$1 plugins
  mapfile -t MYSQLD < <(unpacked_runner "$dir")
  ((${#MYSQLD[@]} == 3)) || fail "$dir holds no C library: remove it and run this again"
  MYSQLD+=("$dir/usr/sbin/$2")
  MYSQL_SHARE=$dir/usr/share/mysql
  plugins=$(find "$dir/usr/lib" -maxdepth 3 -path '*mysql/plugin' -type d | head -n 1)
  MYSQLD_FLAGS=("--lc-messages-dir=$MYSQL_SHARE" "--character-sets-dir=$MYSQL_SHARE/charsets")
  [[ -z $plugins ]] || MYSQLD_FLAGS+=("--plugin-dir=$plugins")
}
