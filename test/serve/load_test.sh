#!/bin/sh
# load_test.sh PROGRAM FOLDER: many streams at once, each equal to itself alone; idle connections
# beside them; clients that leave; and an orderly end. Short; bench/serve_load.py does it at length.
set -eu
. "$(dirname "$0")/start_server.sh"
# 10,000 connections, where the system lets a process have as many files.
idle=10000
most=$(ulimit -Hn)
[ "$most" = unlimited ] || [ "$most" -ge 10400 ] || idle=$((most - 400))
echo "$idle idle connections"
start_server "$2/load-server.log" "$1" --state int8 --max-num-seqs 512 --prefix-cache blocks \
  --max-connections 11000 --header-timeout 600

load() { python3 bench/serve_load.py --port "$port" "$@"; }
load --concurrency 512 --requests 512 --max-tokens 12 --idle "$idle"
load --aborts 10000 --concurrency 64 --max-tokens 200
load --soak 20 --pid "$server" --concurrency 64 --requests 256 --max-tokens 12
load --concurrency 16 --requests 16 --max-tokens 4  # it still answers

kill -TERM "$server"
code=0
wait "$server" || code=$?
trap - EXIT
[ "$code" -eq 0 ] || { echo "the server ended with $code"; tail -5 "$log"; exit 1; }
grep -q " stopped$" "$log"
