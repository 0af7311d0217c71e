#!/usr/bin/env bash
# Runs what meets etcd on each release, and prints a table: scripts/test-etcd.sh [RELEASE...]
# A release that cannot be had is left out, and says why. What is built already is not built here.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
nextest=$(command -v cargo-nextest || echo .venv/bin/cargo-nextest)
columns=(contract faults "users, TLS" "end to end" commands between)
tests=(
    'test(/^store_contract::on_etcd_RELEASE::/)'
    'test(/^(etcd_faults|linearizable|protocol)::/) - test(/^etcd_faults::access::/)'
    'test(/^(deploy::(users|rights)|etcd_faults::access)::/)'
    'test(/^agents::/) - test(/^agents::in_between::/)'
    'test(/^(operator|operator_doctor)::/)'
    'test(/^agents::in_between::/)'
)
# The jobs of the campaign's sample: minutes.
SAMPLE=12
failed=0
table=$(printf '%-8s' etcd)
for column in "${columns[@]}" campaign; do table+=$(printf '%14s' "$column"); done

# Runs tests on a release; prints how many passed, by the last lines of the run.
run() {
    local ignored=default out code=0
    # The tests of these two that take a minute are for here.
    [[ $3 != "users, TLS" && $3 != between ]] || ignored=all
    out=$(ELASTIC_ETCD=$1 scripts/step.sh "etcd $1: $3" "$nextest" nextest run --locked --package elastic-tests \
        --no-fail-fast --test-threads $((2 * $(nproc))) --run-ignored "$ignored" -E "${2//RELEASE/${1/./_}}" 2>&1 |
        tee >(cat >&2)) || code=$?
    sed -n 's/.*Summary.* tests\{0,1\} run: \([0-9]*\) passed.*/\1/p' <<<"$out" | tail -n 1
    return "$code"
}

# Runs some jobs of the campaign on a release, the same on each; prints how many were judged.
campaign() {
    local setting=etcd-$1 out code=0
    [[ $1 != 3.4 ]] || setting=plain
    out=$(scripts/step.sh "etcd $1: campaign" "${CARGO_TARGET_DIR:-target}/debug/elastic-campaign" --setting "$setting" \
        --sample "$SAMPLE" --seed 50 2>&1 | tee >(cat >&2)) || code=$?
    grep -c ' s without a step' <<<"$out" || true
    return "$code"
}

[[ $# -gt 0 ]] || set -- 3.4 3.5 3.6 3.7
for release; do
    row=$(printf '%-8s' "$release")
    if [[ $release != 3.4 ]] && ! scripts/etcd.sh "$release" >/dev/null; then
        table+=$'\n'"$row  cannot be had: see above"
        continue
    fi
    for at in "${!columns[@]}"; do
        passed=$(run "$release" "${tests[at]}" "${columns[at]}") && told="$passed pass" ||
            told="$passed, NOT ALL" failed=1
        row+=$(printf '%14s' "$told")
    done
    passed=$(campaign "$release") && told="$passed jobs" || told="$passed, NOT ALL" failed=1
    row+=$(printf '%14s' "$told")
    table+=$'\n'$row
done
echo "$table"
exit "$failed"
