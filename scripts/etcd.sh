#!/usr/bin/env bash
# Gets an etcd of a release, and prints the folder that has it, as `etcd`: scripts/etcd.sh 3.5|3.6|3.7
#
# It is fetched or built once, into elastic-etcd/ of the user's cache. 3.5 is the package of a later Debian, unpacked and
# not installed. 3.6 and 3.7 are built by Go from the module that etcd's project publishes (tests/etcd/): minutes on one
# core. The etcd that is installed, 3.4 in Debian 12, is on the PATH.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
release=${1:-}
# Its folder has this name, so that a later one is built. Debian's is whichever it has.
case $release in
3.5) exact=3.5 ;;
3.6 | 3.7) exact=$(sed -n 's|.*go.etcd.io/etcd/server/v3 v\([0-9.]*\).*|\1|p' "$root/tests/etcd/$release/go.mod") ;;
*)
    echo "usage: scripts/etcd.sh 3.5|3.6|3.7" >&2
    exit 2
    ;;
esac
dir=${XDG_CACHE_HOME:-${HOME:?}/.cache}/elastic-etcd/$exact

fail() {
    echo "etcd: no etcd $exact: $*" >&2
    exit 1
}

of_debian() {
    local sources=/etc/apt/sources.list.d/debian.sources list=$scratch/forky.list mirror
    command -v apt-get >/dev/null || fail "apt-get is missing: this needs Debian"
    [[ -s $sources ]] || fail "$sources is missing: it names the mirror"
    mirror=$(sed -n 's/^URIs: //p' "$sources" | head -n 1)
    mkdir -p "$scratch"/{state/lists/partial,cache/archives/partial,packages}
    # apt's own user writes there.
    chmod 755 "$scratch"
    chmod -R a+rwX "$scratch"/{state,cache,packages}
    echo "deb [signed-by=/usr/share/keyrings/debian-archive-keyring.gpg] $mirror forky main" >"$list"
    cat >"$scratch/apt.conf" <<CONF
Dir::State "$scratch/state";
Dir::State::status "/var/lib/dpkg/status";
Dir::Cache "$scratch/cache";
Dir::Etc::sourcelist "$list";
Dir::Etc::sourceparts "-";
Debug::NoLocking "1";
CONF
    export APT_CONFIG=$scratch/apt.conf
    apt-get update --quiet --quiet >&2 || fail "apt-get says why above (no network?)"
    (cd "$scratch/packages" && apt-get download --quiet --quiet etcd-server >&2) || fail "apt-get says why above"
    dpkg-deb --extract "$scratch"/packages/*.deb "$scratch/root"
    mv "$scratch/root/usr/bin/etcd" "$scratch/etcd"
}

of_go() {
    command -v go >/dev/null || fail "go is missing; Go 1.26 builds it"
    cp "$root/tests/etcd/main.go" "$root/tests/etcd/$release"/go.{mod,sum} "$scratch"
    echo "etcd: building etcd $exact, minutes on one core" >&2
    (cd "$scratch" && go build -trimpath -ldflags="-s -w" -o etcd .) >&2 || fail "go says why above (no network?)"
}

if [[ ! -x $dir/etcd ]]; then
    mkdir -p "$dir"
    scratch=$(mktemp -d)
    trap 'rm -rf "$scratch"' EXIT
    if [[ $release == 3.5 ]]; then of_debian; else of_go; fi
    found=$("$scratch/etcd" --version | sed -n 's/^etcd Version: //p')
    [[ $found == "$exact"* ]] || fail "what came is $found"
    # Two steps, so that it comes there whole.
    mv "$scratch/etcd" "$dir/etcd.$$"
    mv "$dir/etcd.$$" "$dir/etcd"
fi
echo "$dir"
