#!/usr/bin/env bash
# health.sh orchestrator   whether it answers /health
# health.sh worker         whether it renewed its lease lately; of several ranks here the one that was silent longest
#                          counts. One that was silent for so long that it must hang is killed, with all beside it, so
#                          that the container's restart policy starts them again: nobody else here would. What ran in
#                          this container before it was started again leaves its files: they count from this start.
set -euo pipefail

up_s() { # seconds since the first process here was started
  local uptime_s stat
  read -r uptime_s _ </proc/uptime
  stat=$(</proc/1/stat)
  read -r -a stat <<<"${stat##*) }"
  echo $((${uptime_s%.*} - stat[19] / $(getconf CLK_TCK)))
}

case $1 in
  orchestrator)
    exec 3<>/dev/tcp/127.0.0.1/8000
    printf 'GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n\r\n' >&3
    read -r -t 4 answer <&3
    [[ $answer == *" 200 "* ]] ;;
  worker)
    oldest_s=$(stat -c %Y "$STREAMRL_HEARTBEAT"* | sort -rn | tail -n 1)
    age_s=$(($(date +%s) - oldest_s))
    if ((age_s > ${STREAMRL_SILENT_S:-120} && $(up_s) > ${STREAMRL_SILENT_S:-120})); then
      echo "silent for $age_s s: killed"
      kill -9 -1
    fi
    ((age_s <= 15)) ;;
esac
