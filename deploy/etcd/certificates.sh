#!/bin/sh
# A CA of your own for etcd, and certificates for its members and their clients. Needs openssl, nothing else.
set -eu

usage() {
    cat <<'TEXT'
usage: certificates.sh new DIRECTORY               makes the CA
       certificates.sh member DIRECTORY HOST...    a certificate for each etcd member, now or when one is added
       certificates.sh client DIRECTORY NAME...    a certificate for clients: agents, operators, dashboards
       certificates.sh renew DIRECTORY NAME...     signs these anew; --all: every one but the CA's
       certificates.sh expiry DIRECTORY [DAYS]     tells when each ends; exit code 1 if one does within DAYS (30)

DIRECTORY then holds ca.pem, and NAME.pem and NAME-key.pem for each name. HOST is the whole name by which clients and
other members reach the member; it must resolve to its address on all of them. Keep DIRECTORY on one machine that is
neither a member nor a node: who has ca-key.pem can make any certificate.

A client's certificate opens the connection. What it may read and write is decided by the etcd user: see users.sh.
Renewing leaves the key as it is, so that NAME.pem alone is to be copied. To change a key too, remove NAME-key.pem first.
ELASTIC_CERTIFICATE_DAYS says how long certificates are good for, 825 days unless it is set.
TEXT
}

fail() {
    echo "certificates.sh: $*" >&2
    exit 1
}

days=${ELASTIC_CERTIFICATE_DAYS:-825}

new_key() {
    openssl genpkey -algorithm EC -pkeyopt ec_paramgen_curve:P-256 -out "$1-key.pem" 2>/dev/null
}

# sign NAME KIND: a certificate for NAME's key, which is made if it is not there. It replaces an old one at once, or not
# at all.
sign() {
    [ -e "$1-key.pem" ] || new_key "$1"
    scratch=.$1.$$
    trap 'rm -f "$scratch".*' EXIT
    case $2 in
    member)
        subject=/CN=$1
        # A member is a client of the others.
        printf 'extendedKeyUsage=serverAuth,clientAuth\nsubjectAltName=DNS:%s,DNS:localhost,IP:127.0.0.1\n' "$1"
        ;;
    client)
        # etcd takes the common name for that of a user who has no password: with the blank in it, there is no such user.
        subject="/CN=client $1"
        # No other name: etcd would look it up, and compare it with the address that the client comes from.
        echo extendedKeyUsage=clientAuth
        ;;
    esac >"$scratch.ext"
    openssl req -new -key "$1-key.pem" -subj "$subject" -out "$scratch.csr"
    openssl x509 -req -in "$scratch.csr" -CA ca.pem -CAkey ca-key.pem -set_serial "0x$(openssl rand -hex 16)" \
        -days "$days" -sha256 -extfile "$scratch.ext" -out "$scratch.pem" 2>/dev/null ||
        fail "$1.pem could not be signed: is ca-key.pem the key of ca.pem?"
    chmod 644 "$scratch.pem"
    mv "$scratch.pem" "$1.pem"
    rm "$scratch.csr" "$scratch.ext"
    echo "$1.pem: good until $(ends "$1.pem")"
}

ends() {
    openssl x509 -in "$1" -noout -enddate | sed 's/^notAfter=//'
}

# Which kind a certificate is of.
kind() {
    case $(openssl x509 -in "$1.pem" -noout -ext extendedKeyUsage) in
    *"Web Server Authentication"*) echo member ;;
    *) echo client ;;
    esac
}

# The names of all certificates but the CA's.
all() {
    for file in *.pem; do
        case $file in
        ca.pem | *-key.pem) ;;
        *) echo "${file%.pem}" ;;
        esac
    done
}

named() {
    case $1 in
    ca | *-key | .* | *[!A-Za-z0-9._-]*) fail "$1 cannot be a certificate's name: letters, digits and ._- , not ca" ;;
    esac
}

case ${1:-} in
-h | --help) usage && exit ;;
new | member | client | renew | expiry) ;;
*) usage >&2 && exit 2 ;;
esac
[ $# -ge 2 ] || { usage >&2 && exit 2; }
verb=$1
directory=$2
shift 2
umask 077

if [ "$verb" = new ]; then
    [ $# -eq 0 ] || { usage >&2 && exit 2; }
    mkdir -p "$directory"
    cd "$directory"
    [ ! -e ca-key.pem ] || fail "$directory/ca-key.pem is there already: choose another directory"
    openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 3650 -subj "/CN=elastic etcd CA" \
        -addext basicConstraints=critical,CA:TRUE -addext keyUsage=critical,keyCertSign,cRLSign \
        -keyout ca-key.pem -out ca.pem 2>/dev/null
    chmod 644 ca.pem
    echo "ca.pem: good until $(ends ca.pem)"
    exit
fi

[ -e "$directory/ca.pem" ] || fail "$directory/ca.pem is missing: make the CA by \`certificates.sh new $directory\`"
cd "$directory"
case $verb in
member | client)
    [ $# -ge 1 ] || { usage >&2 && exit 2; }
    for name in "$@"; do
        named "$name"
        [ ! -e "$name.pem" ] || fail "$directory/$name.pem is there already: to sign it again, \`certificates.sh renew\`"
    done
    for name in "$@"; do
        sign "$name" "$verb"
    done
    ;;
renew)
    [ $# -ge 1 ] || { usage >&2 && exit 2; }
    if [ "$1" = --all ]; then
        # shellcheck disable=SC2046 # names have no blanks
        set -- $(all)
    fi
    for name in "$@"; do
        named "$name"
        [ -e "$name.pem" ] || fail "$directory/$name.pem is missing: nothing to renew"
    done
    for name in "$@"; do
        sign "$name" "$(kind "$name")"
    done
    ;;
expiry)
    within=${1:-30}
    soon=0
    for name in ca $(all); do
        if openssl x509 -in "$name.pem" -noout -checkend "$((within * 86400))" >/dev/null; then
            mark=
        else
            mark="   within $within days"
            soon=1
        fi
        echo "$name.pem: good until $(ends "$name.pem")$mark"
    done
    exit "$soon"
    ;;
esac
