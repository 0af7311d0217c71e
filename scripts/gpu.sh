#!/usr/bin/env bash
# Runs the kernels' tests on this machine's GPU, times snapshots of GPT-2 124M there, and then the trainer's steps beside
# PyTorch's.
#
#   scripts/gpu.sh
#
# ELASTIC_TORCH_PYTHON is an absolute path of a Python whose torch computes on the GPU; without it there is no comparison.
#
# Where there is no cargo and no network, it runs what `make gpu-kit` has built elsewhere, in two parts of less than nine
# minutes each, on a GPU or dry (see docs/gpu.md):
#
#   scripts/gpu.sh --prebuilt DIR --part 1|2 [--python PYTHON] [--out FOLDER] [--only STEP,…] [--seconds N] [--dry-run]
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
if (($# > 0)); then
    python=python3
    passed=()
    while (($# > 0)); do
        case $1 in
        --python)
            python=${2:?--python names none}
            shift
            ;;
        --python=*) python=${1#*=} ;;
        *) passed+=("$1") ;;
        esac
        shift
    done
    exec "$python" "$here/gpu/run.py" "${passed[@]}"
fi

root=$(cd "$here/.." && pwd)
cd "$root"
say() { echo "gpu: $*"; }
fail() {
    say "$*" >&2
    exit 1
}

[[ -e /dev/nvidiactl ]] || fail "there is no NVIDIA GPU here (no /dev/nvidiactl); make test runs the kernels on the CPU"
scripts/setup.sh test
nvidia-smi --query-gpu=name,driver_version,memory.total --format=csv,noheader
nextest=$(command -v cargo-nextest || echo .venv/bin/cargo-nextest)
# The trainer finds NVRTC and cuBLASLt there, or in the environment of the Python below.
export VIRTUAL_ENV=${VIRTUAL_ENV:-$root/.venv}
ELASTIC_TEST_GPU=1 "$nextest" nextest run --locked --workspace --no-capture \
    -E 'package(elastic-cuda) & binary(cuda) & test(/^(kernels|products|state)::/)
        | package(elastic-program) & binary(gpu) & test(/^(models|graphs|snapshots::timed)::/)'

python=${ELASTIC_TORCH_PYTHON:-}
[[ -n $python ]] || fail "the kernels' tests have passed; to compare with PyTorch, set ELASTIC_TORCH_PYTHON to a \
Python whose torch computes on the GPU"
cargo build --release --locked --package elastic-program
target=$(cargo metadata --no-deps --format-version 1 | sed -n 's/.*"target_directory":"\([^"]*\)".*/\1/p')
# The same libraries for both, where torch came with some.
VIRTUAL_ENV=$("$python" -c 'import sys; print(sys.prefix)') || fail "$python does not run"
"$python" tests/pytorch/bench_gpu.py "$target/release/elastic-trainer"
