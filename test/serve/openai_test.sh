#!/bin/sh
# openai_test.sh PROGRAM FOLDER: runs openai_test.py with OpenAI's client, which is installed from PyPI
# into a virtual environment in FOLDER once. Exit code 77 (skipped) where that is not possible.
set -eu
here=$(dirname "$0")
environment=$2/openai-client

if ! cmp -s "$here/openai-requirements.txt" "$environment/installed.txt"; then
  rm -rf "$environment"
  if ! { python3 -m venv "$environment" &&
         "$environment/bin/pip" install --quiet --disable-pip-version-check --retries 1 \
           --only-binary :all: -r "$here/openai-requirements.txt"; }; then
    echo "Skipped: OpenAI's client could not be installed from PyPI (see above)"
    exit 77
  fi
  cp "$here/openai-requirements.txt" "$environment/installed.txt"
fi
exec "$environment/bin/python" "$here/openai_test.py" "$1"
