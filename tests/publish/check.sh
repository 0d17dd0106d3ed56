#!/usr/bin/env bash
# Installs a wheel into an empty environment and does what a user does in the first minutes.
# usage: check.sh WHEEL SYMBOLS   (PYTHON and MYPY name the programs)
set -euo pipefail
wheel=$(realpath "$1")
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
empty=$(mktemp -d)
trap 'rm -rf "$empty"' EXIT
"${PYTHON:-python3}" -m venv "$empty/venv"
"$empty/venv/bin/pip" install --quiet "$wheel"
library=$(echo "$empty"/venv/lib/python3*/site-packages/tutti/_native.so)
built() { readelf -n "$1" | grep 'Build ID'; }
[ "$(built "$library")" = "$(built "$2")" ] || { echo "$2 has not the symbols of $1"; exit 1; }
cd "$empty"
"$empty/venv/bin/python" -I -c 'import tutti, tutti.native; tutti.native.lib(); print("tutti", tutti.__version__)'
"$empty/venv/bin/python" -I "$here/program.py" "$empty/pool.tutti"
"$MYPY" --strict --python-executable "$empty/venv/bin/python" "$here/program.py"
"$empty/venv/bin/tutti" demo --quick --dir "$empty/demo"
