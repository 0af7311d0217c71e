#!/usr/bin/env bash
# Runs one step of a longer run: says which, and how long it took.
#
#   scripts/step.sh NAME COMMAND [ARGUMENT]...
set -euo pipefail
name=$1
shift
echo "== $name"
began=$SECONDS
code=0
"$@" || code=$?
took=$((SECONDS - began))
if ((code == 0)); then
    echo "== $name: $took s"
else
    echo "== $name: failed with $code after $took s" >&2
fi
exit "$code"
