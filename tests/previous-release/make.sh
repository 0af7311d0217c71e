#!/usr/bin/env bash
# Builds programs.tar.xz of a release's sources: tests/previous-release/make.sh COMMIT
# Needs what scripts/setup.sh dist installs, and xz. Writes nothing but that file, and builds in a folder of its own.
set -euo pipefail
commit=$(git rev-parse --short "${1:?usage: tests/previous-release/make.sh COMMIT}^{commit}")
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
tools=${CARGO_TARGET_DIR:-$root/target}/packaging/bin
[[ -x $tools/cargo-zigbuild ]] || { echo "make.sh: $tools/cargo-zigbuild is missing: run scripts/setup.sh dist" >&2; exit 1; }
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
sources=$scratch/sources target=$scratch/target tree=$scratch/tree
mkdir "$sources" "$tree"
git -C "$root" archive "$commit" | tar -x -C "$sources"
cd "$sources"
# As packaging/dist builds them: for glibc 2.28, without symbols and without names of this machine's folders.
flags="--remap-path-prefix=${CARGO_HOME:-$HOME/.cargo}=cargo --remap-path-prefix=$sources=elastic"
PATH=$tools:$PATH CARGO_TARGET_DIR=$target RUSTFLAGS="$flags --remap-path-prefix=$target=elastic/build/target" \
    cargo zigbuild --release --locked --target x86_64-unknown-linux-gnu.2.28 \
    --package elastic-agent --package elastic-coordinator --bins
for program in elastic-agent elasticctl elastic-coordinator; do
    strip -o "$tree/$program" "$target/x86_64-unknown-linux-gnu/release/$program"
    chmod 755 "$tree/$program"
done
cp LICENSE-MIT LICENSE-APACHE "$tree"
PYTHONPATH=packaging/dist python3 - "$tree/THIRD-PARTY-LICENCES" <<'PYTHON'
import json, pathlib, subprocess, sys, types
import licences
arguments = ["--format-version", "1", "--locked", "--filter-platform", "x86_64-unknown-linux-gnu"]
metadata = json.loads(subprocess.check_output(["cargo", "metadata", *arguments]))
licences.PROGRAMS = ["elastic-agent", "elastic-coordinator", "elasticctl"]
licences.write(types.SimpleNamespace(metadata=metadata), pathlib.Path(sys.argv[1]))
PYTHON
tar --sort=name --owner=0 --group=0 --numeric-owner --mtime="@$(git -C "$root" log -1 --format=%ct "$commit")" \
    -C "$tree" -cf - . | xz -9e >"$scratch/programs.tar.xz"
mv "$scratch/programs.tar.xz" "$root/tests/previous-release/programs.tar.xz"
echo "make.sh: made of $commit; write that into tests/previous-release/README.md"
