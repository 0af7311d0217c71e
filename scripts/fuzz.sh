#!/usr/bin/env bash
# Runs libFuzzer on the parsers (tests/fuzz), one after the other, for so many seconds each. What it finds new
# goes to target/fuzz/corpus; an input that a parser does not survive is kept in target/fuzz/artifacts, and ends this.
#
#   scripts/fuzz.sh SECONDS [TARGET ...]
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
version=0.13.2
tools=$PWD/target/tools
found=$PWD/target/fuzz

seconds=${1:?how many seconds for each target}
shift
if ! rustup run nightly rustc --version >/dev/null 2>&1; then
    echo "fuzz: libFuzzer needs the nightly compiler: rustup toolchain install nightly" >&2
    exit 1
fi
if ! "$tools/bin/cargo-fuzz" --version 2>/dev/null | grep -qF "$version"; then
    echo "fuzz: installing cargo-fuzz $version into target/tools (with cargo)"
    cargo install --quiet --locked --root "$tools" cargo-fuzz@"$version"
fi
fuzz() { env -C tests RUSTUP_TOOLCHAIN=nightly PATH="$tools/bin:$PATH" CARGO_TARGET_DIR="$found" cargo fuzz "$@"; }

if (($# == 0)); then
    mapfile -t targets < <(fuzz list)
else
    targets=("$@")
fi
for target in "${targets[@]}"; do
    mkdir -p "$found/corpus/$target" "$found/artifacts/$target"
    fuzz run "$target" "$found/corpus/$target" "fuzz/corpus/$target" -- -max_total_time="$seconds" -max_len=4096 \
        -timeout=60 -rss_limit_mb=4096 -artifact_prefix="$found/artifacts/$target/" -print_final_stats=1
done
