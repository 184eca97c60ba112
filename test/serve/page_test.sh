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
expect '<b id="used">0 / 8</b>'
expect '<b id="running">0</b>'
expect 'class="slot free" title="slot 8: free, position 0"'
expect '<dt>scheme</dt><dd>int8</dd>'
expect '<path d="M17'
[ "$failed" -eq 0 ] || { cat "$folder/page.html" "$folder/page-chromium.log"; exit 1; }
