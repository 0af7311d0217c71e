#!/usr/bin/env bash
# Unpacks out of Debian's packages what this machine needs for programs of another architecture, into target/packaging/.
# Nothing is installed, and the machine's own apt is left unchanged. Run again, it does nothing.
#
# It is for machines whose toolchain lacks the standard library of that architecture, and cannot download it. The library
# must be of the compiler's very build, so both come from Debian: rustc-web, with which Debian builds its browsers, and
# which is new enough even in Debian 12. The release workflow builds on a machine of each architecture instead.
#
#   scripts/debian-foreign.sh rust aarch64      into rust-aarch64/: Debian's newest Rust, with the standard libraries of
#                                               this machine and of that one; bin/rustc runs it
#   scripts/debian-foreign.sh emulator aarch64  into emulator-aarch64/: bin/emulator runs a program of such a machine, by
#                                               qemu with that machine's glibc
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
what=${1:-}
machine=${2:-}
dir=$(realpath -m "${CARGO_TARGET_DIR:-$root/target}/packaging/$what-$machine")

say() { echo "debian-foreign: $*"; }
fail() {
    say "$*" >&2
    exit 1
}

case $machine in
aarch64) foreign=arm64 ;;
x86_64) foreign=amd64 ;;
*) fail "usage: scripts/debian-foreign.sh rust|emulator aarch64|x86_64" ;;
esac
[[ ! -d $dir ]] || exit 0
for tool in apt-get dpkg dpkg-deb; do
    command -v "$tool" >/dev/null || fail "$tool is missing: this needs Debian"
done
grep --quiet '^ID=debian$' /etc/os-release || fail "this is not Debian; only Debian has packages of other architectures"
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
mkdir -p "$scratch"/{state/lists/partial,cache/archives/partial,packages,root}
# apt's own user writes there.
chmod 755 "$scratch"
chmod -R a+rwX "$scratch"/{state,cache,packages}

# An apt with lists of its own: of both architectures, of one moment, from Debian's mirrors alone.
export APT_CONFIG=$scratch/apt.conf
sources=/etc/apt/sources.list.d/debian.sources
[[ -s $sources ]] || sources=/etc/apt/sources.list
cat >"$APT_CONFIG" <<CONF
APT::Architectures { "$(dpkg --print-architecture)"; "$foreign"; };
Dir::State "$scratch/state";
Dir::State::status "/var/lib/dpkg/status";
Dir::Cache "$scratch/cache";
Dir::Etc::sourcelist "$sources";
Dir::Etc::sourceparts "-";
Debug::NoLocking "1";
CONF
say "reading Debian's lists of packages, a download of 25 MB"
apt-get update --quiet --quiet || fail "apt-get says why above (no network?)"

# unpack PACKAGE ...: these, by apt's names for them.
unpack() {
    local megabytes
    (cd "$scratch/packages" && apt-get download --quiet --quiet "$@") || fail "apt-get says why above (no network?)"
    megabytes=$(du --summarize --block-size=MB "$scratch/packages" | cut -f 1)
    for package in "$scratch"/packages/*.deb; do
        dpkg-deb --extract "$package" "$scratch/root"
    done
    say "unpacked $# packages, $megabytes, into ${dir#"$root"/}"
}

# wrapper NAME: what bin/NAME does, from standard input. It finds its folder itself.
wrapper() {
    mkdir -p "$scratch/root/bin"
    { printf '#!/bin/sh\nhere=$(dirname "$(dirname "$(realpath "$0")")")\n' && cat; } >"$scratch/root/bin/$1"
    chmod +x "$scratch/root/bin/$1"
}

case $what in
rust)
    # Debian's own rustc is as old as the release; this one follows what Firefox and Chromium need.
    version=$(apt-cache policy rustc-web | sed -n 's/^  Candidate: //p')
    needed=$(sed -n 's/^rust-version = "\(.*\)"/\1/p' "$root/Cargo.toml")
    dpkg --compare-versions "${version:-0}" ge "$needed" ||
        fail "this Debian's rustc-web is ${version:-unknown}, and $needed or newer is needed"
    say "Debian's Rust ${version%%+*}, for $machine too, a download of 130 MB"
    packages=$(apt-get install --simulate --no-install-recommends --reinstall \
        "rustc-web=$version" "libstd-rust-web-dev=$version" |
        sed -n 's/^Inst \([^ ]*\).*/\1/p')
    # shellcheck disable=SC2086 # one word for each package
    unpack $packages "libstd-rust-web-dev:$foreign=$version"
    rm -rf "$scratch/root/usr/share"
    wrapper rustc <<WRAPPER
export LD_LIBRARY_PATH="\$here/usr/lib/$(gcc -print-multiarch)\${LD_LIBRARY_PATH:+:\$LD_LIBRARY_PATH}"
exec "\$here/usr/bin/rustc" "\$@"
WRAPPER
    "$scratch/root/bin/rustc" --version >/dev/null || fail "rustc does not work here: the lines above say why"
    ;;
emulator)
    say "Debian's qemu, and glibc for $machine, a download of 40 MB"
    unpack qemu-user-static "libc6:$foreign"
    rm -rf "$scratch/root/usr/share"
    wrapper emulator <<WRAPPER
exec "\$here/usr/bin/qemu-$machine-static" -L "\$here" "\$@"
WRAPPER
    ;;
*) fail "usage: scripts/debian-foreign.sh rust|emulator aarch64|x86_64" ;;
esac
mkdir -p "$(dirname "$dir")"
mv "$scratch/root" "$dir"
