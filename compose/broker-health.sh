#!/usr/bin/env bash
# Whether the broker answers and has loaded its append-only file.
set -euo pipefail
exec 3<>/dev/tcp/127.0.0.1/6379
printf 'AUTH %s\r\nPING\r\n' "$(<"${BROKER_PASSWORD_FILE:-/run/secrets/broker_password}")" >&3
read -r -t 3 authorised <&3
read -r -t 3 answer <&3
[[ $authorised == +OK* && $answer == +PONG* ]] || { echo "broker: $authorised $answer" >&2; exit 1; }
