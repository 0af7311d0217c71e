#!/usr/bin/env bash
# Fetches a Slurm for the test of examples/train.sbatch: the programs out of Debian's packages, with libraries that this
# machine lacks, into target/slurm/. Nothing is installed, and no service is started. A download of 4 MB. Does nothing if
# it is there already.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
dir=$(realpath -m "${CARGO_TARGET_DIR:-$root/target}/slurm")
[[ ! -d $dir ]] || exit 0
for tool in apt-get dpkg-deb; do
    command -v "$tool" >/dev/null || { echo "slurm: $tool is missing: this needs Debian" >&2; exit 1; }
done
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
# apt's own user writes there.
chmod 755 "$scratch"
echo "slurm: fetching it into ${dir#"$root"/} (from Debian's packages, 4 MB)"
cd "$scratch"
download() {
    local packages
    packages=$(apt-get --simulate --no-install-recommends --reinstall install slurmctld slurmd slurm-client munge |
        sed -n 's/^Inst \([^ ]*\).*/\1/p')
    # shellcheck disable=SC2086 # one word for each package
    [[ -n $packages ]] && apt-get download --quiet --quiet -o APT::Sandbox::User=root $packages
}
# What is known of packages may be too old, or nothing; only root can ask again.
download || { ((EUID == 0)) && apt-get update --quiet --quiet && download; }
for package in "$scratch"/*.deb; do
    dpkg-deb --extract "$package" "$scratch/root"
done
mkdir -p "$(dirname "$dir")"
mv "$scratch/root" "$dir"
