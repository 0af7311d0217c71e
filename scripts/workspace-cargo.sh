#!/usr/bin/env bash
# Replaces cargo under maturin, so that the tests' wheel holds the program that the tests run. Cargo by itself would
# build that program, and all libraries under it, a second time: for one crate alone they get other features than for the
# workspace. Of what cargo says, maturin gets only the path of that program.
set -euo pipefail
cargo build --locked --workspace --bins --tests --message-format=json-render-diagnostics |
    grep '"executable":"[^"]*/elastic-agent"'
