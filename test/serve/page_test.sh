#!/bin/sh
# page_test.sh PROGRAM FOLDER: opens the status page of a running server in headless Chromium and looks
# at what its script has drawn. Exit code 77 (skipped) where there is no Chromium.
set -eu
folder=$2
chromium=$(command -v chromium || command -v chromium-browser) || {
  echo "Skipped: there is no chromium here (Debian's package of that name)"
  exit 77
}
. "$(dirname "$0")/start_server.sh"
start_server "$folder/page-server.log" "$1" --state int8 --state-pool-slots 8

# A prefix in the cache, and replies that go on while the page is looked at.
complete() {  # BODY: asks for a completion
  python3 -c 'import sys, urllib.request as u
print(u.urlopen(u.Request(f"http://127.0.0.1:{sys.argv[1]}/v1/completions", sys.argv[2].encode(),
      {"Content-Type": "application/json"})).status)' "$port" "$1"
}
complete '{"prompt": "Compute 12 + 30.", "max_tokens": 4, "temperature": 0, "ignore_eos": true}' \
  >"$folder/page-reply.log"
complete '{"prompt": "Once upon a time", "n": 6, "max_tokens": 8000, "ignore_eos": true}' \
  >"$folder/page-reply.log" 2>&1 &
client=$!
trap 'kill "$client" 2>/dev/null || true; kill -9 "$server" 2>/dev/null || true' EXIT
for _ in $(seq 100); do
  python3 -c 'import sys, urllib.request as u
print(u.urlopen(f"http://127.0.0.1:{sys.argv[1]}/status").read().decode())' "$port" |
    grep -q '"running":6' && break
  sleep 0.1
done

# A few polls in the 5 s that its scripts see pass; sandboxes are not to be had in containers.
profile=$(mktemp -d)
"$chromium" --headless --no-sandbox --disable-gpu --disable-dev-shm-usage --user-data-dir="$profile" \
  --virtual-time-budget=5000 --dump-dom "http://127.0.0.1:$port/" \
  >"$folder/page.html" 2>"$folder/page-chromium.log"
rm -rf "$profile"

failed=0
expect() {  # TEXT: is in the page
  grep -qF -- "$1" "$folder/page.html" || { echo "The page does not show: $1"; failed=1; }
}
expect 'statepack-gdn, state int8, up'
expect '<b id="used">6 / 8</b>'
expect '<b id="running">6</b>'
expect 'class="slot reply" title="slot '
expect 'class="slot free" title="slot '
expect '<td>reply</td>'
expect ' tokens (+'
expect ', state of '
expect '<dt>scheme</dt><dd>int8</dd>'
expect '<path d="M17'
[ "$failed" -eq 0 ] || { cat "$folder/page.html" "$folder/page-chromium.log"; exit 1; }
