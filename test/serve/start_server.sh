# For the scripts beside it: start_server LOG PROGRAM OPTION... starts a server on a free port and waits
# until it is ready. Sets $server (its process) and $port; the server dies with the script.
start_server() {
  log=$1
  program=$2
  shift 2
  mkdir -p "$(dirname "$log")"
  "$program" serve --model models/statepack-gdn --port 0 "$@" 2>"$log" &
  server=$!
  trap 'kill -9 "$server" 2>/dev/null || true' EXIT
  for _ in $(seq 300); do
    grep -q "ready after" "$log" && break
    kill -0 "$server" || { cat "$log"; exit 1; }
    sleep 0.1
  done
  port=$(sed -n 's/.*http:[^ ]*:\([0-9]*\)\/ answers.*/\1/p' "$log")
}
