#!/usr/bin/env bash
# Runs the broker on /data. The password comes from a container secret and never stands on a command line.
set -euo pipefail
secret=${BROKER_PASSWORD_FILE:-/run/secrets/broker_password}
stop() { echo "broker: $*" >&2; exit 2; }

[[ -r $secret ]] || stop "there is no password: $secret cannot be read. Give this service the secret broker_password" \
  "(STREAMRL_BROKER_PASSWORD in .env, see docs/quickstarts.md)"
password=$(<"$secret")
[[ $password =~ ^[A-Za-z0-9_.~+/=-]{8,}$ ]] || stop "the password in $secret needs 8 or more of A-Z a-z 0-9 _ . ~ + / = -"
[[ -w /data ]] || stop "/data cannot be written by user $(id -u): give the volume to it (chown -R $(id -u) ...)"
# A server that cannot append refuses every write: better not to begin.
free_kib=$(df -Pk /data | awk 'NR == 2 {print $4}')
((free_kib >= ${BROKER_MIN_FREE_MIB:-256} * 1024)) ||
  stop "/data has $((free_kib / 1024)) MiB free, ${BROKER_MIN_FREE_MIB:-256} are needed: enlarge the volume, or clear it"

umask 077
cat >/tmp/broker.conf <<CONFIGURATION
requirepass $password
dir /data
appendonly yes
appendfsync ${BROKER_APPENDFSYNC:-everysec}
save ""
maxmemory-policy noeviction
protected-mode yes
tcp-keepalive 60
CONFIGURATION
# As transport/broker/embedded.py: nobody needs what changes the server itself.
for command in acl bgsave cluster config debug failover fcall fcall_ro flushall flushdb function migrate module pfdebug \
  psync replconf replicaof restore restore-asking save script shutdown slaveof swapdb sync; do
  echo "rename-command $command \"\""
done >>/tmp/broker.conf
exec valkey-server /tmp/broker.conf
