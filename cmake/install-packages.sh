#!/bin/sh
# install-packages.sh STAGE...: installs the packages of debian-packages.txt that are missing. Silent
# when there are none; otherwise it says what it will do first.
set -eu

command -v dpkg-query >/dev/null || exit 0  # not Debian: CMake will name what it cannot find

list=$(dirname "$0")/debian-packages.txt
missing=""
for stage in "$@"; do
  for package in $(awk -v stage="$stage" '$2 == stage && $1 !~ /^#/ {print $1}' "$list"); do
    state=$(dpkg-query -W -f '${db:Status-Abbrev}' "$package" 2>/dev/null) || state=""
    case $state in
      ?i*) ;;
      *) missing="$missing $package" ;;
    esac
  done
done
[ -n "$missing" ] || exit 0

echo "Missing Debian packages:$missing"
as_root=""
if [ "$(id -u)" -ne 0 ]; then
  if command -v sudo >/dev/null && { [ -t 0 ] || sudo -n true 2>/dev/null; }; then
    as_root="sudo"
  else
    echo "They can only be installed by root. Run this as root, then try again:" >&2
    echo "  apt-get update && apt-get install -y --no-install-recommends$missing" >&2
    exit 1
  fi
fi
echo "Installing them with: ${as_root:+$as_root }apt-get install -y --no-install-recommends$missing"
$as_root apt-get update -qq
# shellcheck disable=SC2086 # one word for each package
$as_root env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends $missing
