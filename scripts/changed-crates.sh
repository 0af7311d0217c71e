#!/usr/bin/env bash
# Prints cargo's flags for the crates that have changes against the main branch: `--package NAME` for each of them, or
# `--workspace` if there are none, or if they concern all crates.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
base=$(git merge-base HEAD origin/main 2>/dev/null || git merge-base HEAD main 2>/dev/null) || { echo --workspace && exit; }
members=$(sed -n 's/^members = \[\(.*\)\]/\1/p' Cargo.toml | tr -d '",')
crates=()
while read -r file; do
    case $file in Cargo.toml | Cargo.lock | clippy.toml | rustfmt.toml) echo --workspace && exit ;; esac
    folder=$(dirname "$file")
    while [[ $folder != . && " $members " != *" $folder "* ]]; do folder=$(dirname "$folder"); done
    [[ $folder == . ]] || crates+=("--package $(sed -n 's/^name = "\(.*\)"/\1/p;T;q' "$folder/Cargo.toml")")
done < <(git diff --name-only "$base" && git ls-files --others --exclude-standard)
((${#crates[@]})) || crates=(--workspace)
printf '%s\n' "${crates[@]}" | sort -u | tr '\n' ' '
