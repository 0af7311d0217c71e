#!/usr/bin/env bash
# Fetches Prometheus and promtool for the tests of alerts and dashboards: the programs out of Debian's package
# `prometheus`, into target/prometheus/. Nothing is installed, and no service is started. A download of 19 MB. Does
# nothing if they are there already.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
dir=$(realpath -m "${CARGO_TARGET_DIR:-$root/target}/prometheus")
[[ ! -x $dir/prometheus || ! -x $dir/promtool ]] || exit 0
for tool in apt-get dpkg-deb; do
    command -v "$tool" >/dev/null || { echo "prometheus: $tool is missing: this needs Debian" >&2; exit 1; }
done
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
# apt's own user writes there.
chmod 755 "$scratch"
echo "prometheus: fetching it into ${dir#"$root"/} (from Debian's package prometheus, 19 MB)"
cd "$scratch"
download=(apt-get download --quiet --quiet -o APT::Sandbox::User=root prometheus)
# What is known of packages may be too old, or nothing; only root can ask again.
"${download[@]}" || { ((EUID == 0)) && apt-get update --quiet --quiet && "${download[@]}"; }
dpkg-deb --fsys-tarfile "$scratch"/prometheus_*.deb |
    tar --extract --directory "$scratch" ./usr/bin/prometheus ./usr/bin/promtool
mkdir -p "$dir"
mv "$scratch/usr/bin/prometheus" "$scratch/usr/bin/promtool" "$dir/"
