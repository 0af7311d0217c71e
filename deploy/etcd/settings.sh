#!/bin/sh
# Settings of one member of an etcd cluster for elastic: the file that Debian's and Ubuntu's etcd unit reads.
set -eu

usage() {
    cat <<'TEXT'
usage: settings.sh [--existing] HOST MEMBER=ADDRESS...    prints the settings of member HOST
       settings.sh --check [FILE]                         checks the settings of the machine that it runs on

Give the same list of members for each HOST, which is one of them. --existing: HOST joins a cluster that runs, and
`etcdctl member add` has been told of it. The output goes to /etc/default/etcd, which --check reads if no FILE is named.
TEXT
}

fail() {
    echo "settings.sh: $*" >&2
    exit 1
}

settings() {
    host=$1
    shift
    address=
    cluster=
    for member in "$@"; do
        case $member in
        *=*) ;;
        *) fail "$member: give each member as HOST=ADDRESS" ;;
        esac
        name=${member%%=*}
        cluster=$cluster${cluster:+,}$name=https://$name:2380
        [ "$name" != "$host" ] || address=${member#*=}
    done
    [ -n "$address" ] || fail "$host is not among the members: $*"
    case $address in
    *:*) address="[$address]" ;;
    esac
    cat <<TEXT
# Made by settings.sh for $host. Run settings.sh again when something changes: each member's file differs.
ETCD_NAME=$host
ETCD_LISTEN_PEER_URLS=https://$address:2380
ETCD_LISTEN_CLIENT_URLS=https://$address:2379,https://127.0.0.1:2379
ETCD_INITIAL_ADVERTISE_PEER_URLS=https://$host:2380
ETCD_ADVERTISE_CLIENT_URLS=https://$host:2379

# The same on all members.
ETCD_INITIAL_CLUSTER=$cluster
ETCD_INITIAL_CLUSTER_STATE=$state
ETCD_INITIAL_CLUSTER_TOKEN=elastic-1
ETCD_DATA_DIR=/var/lib/etcd/elastic

# TLS for clients and among members; see certificates.sh.
ETCD_CERT_FILE=/etc/etcd/server.pem
ETCD_KEY_FILE=/etc/etcd/server-key.pem
ETCD_TRUSTED_CA_FILE=/etc/etcd/ca.pem
ETCD_CLIENT_CERT_AUTH=true
ETCD_PEER_CERT_FILE=/etc/etcd/server.pem
ETCD_PEER_KEY_FILE=/etc/etcd/server-key.pem
ETCD_PEER_TRUSTED_CA_FILE=/etc/etcd/ca.pem
ETCD_PEER_CLIENT_CERT_AUTH=true

# A dead member is noticed after a second; leases can be as short as 1.5 times that.
ETCD_HEARTBEAT_INTERVAL=100
ETCD_ELECTION_TIMEOUT=1000
# Elastic's records are small and short-lived: an hour of history is plenty, and watches resume over any gap within it.
ETCD_AUTO_COMPACTION_MODE=periodic
ETCD_AUTO_COMPACTION_RETENTION=1h
ETCD_QUOTA_BACKEND_BYTES=2147483648
TEXT
}

# value NAME: what the file says.
value() {
    sed -n "s/^$1=//p" "$file" | tail -n 1
}

wrong() {
    echo "settings.sh: $file: $*" >&2
    errors=$((errors + 1))
}

check() {
    file=$1
    errors=0
    [ -r "$file" ] || fail "$file cannot be read"
    name=$(value ETCD_NAME)
    [ -n "$name" ] || fail "$file: ETCD_NAME is missing: make the file by settings.sh"
    [ "$(value ETCD_INITIAL_ADVERTISE_PEER_URLS)" = "https://$name:2380" ] ||
        wrong "ETCD_INITIAL_ADVERTISE_PEER_URLS is not that of $name"
    [ "$(value ETCD_ADVERTISE_CLIENT_URLS)" = "https://$name:2379" ] ||
        wrong "ETCD_ADVERTISE_CLIENT_URLS is not that of $name"
    case ,$(value ETCD_INITIAL_CLUSTER), in
    *",$name=https://$name:2380,"*) ;;
    *) wrong "ETCD_INITIAL_CLUSTER does not name $name" ;;
    esac
    # Another host's file has another host's address.
    own=" $(hostname -I 2>/dev/null) 127.0.0.1 "
    for url in $(value ETCD_LISTEN_PEER_URLS | tr , ' ') $(value ETCD_LISTEN_CLIENT_URLS | tr , ' '); do
        address=${url#https://}
        address=${address%:*}
        address=${address#\[}
        address=${address%\]}
        case $own in
        *" $address "*) ;;
        *) wrong "$address is no address of this machine, which has$own" ;;
        esac
    done
    certificate=$(value ETCD_CERT_FILE)
    key=$(value ETCD_KEY_FILE)
    if ! openssl x509 -in "$certificate" -noout 2>/dev/null; then
        wrong "$certificate is missing or no certificate"
    elif openssl x509 -in "$certificate" -noout -checkhost "$name" | grep -q 'NOT match'; then
        of=$(openssl x509 -in "$certificate" -noout -subject | sed 's/.*CN *= *//')
        wrong "$certificate is another host's: it is for $of, not $name"
    elif [ "$(openssl x509 -in "$certificate" -noout -pubkey)" != "$(openssl pkey -in "$key" -pubout 2>/dev/null)" ]; then
        wrong "$key is not the key of $certificate"
    elif ! openssl verify -CAfile "$(value ETCD_TRUSTED_CA_FILE)" "$certificate" >/dev/null 2>&1; then
        wrong "$certificate is not good, or not signed by $(value ETCD_TRUSTED_CA_FILE)"
    fi
    # As root everything can be read: etcd is not root.
    if [ "$(id -u)" = 0 ] && id etcd >/dev/null 2>&1; then
        for readable in "$certificate" "$key" "$(value ETCD_TRUSTED_CA_FILE)"; do
            setpriv --reuid=etcd --regid=etcd --init-groups test -r "$readable" ||
                wrong "etcd's user cannot read $readable"
        done
        if [ -e "$key" ]; then
            case $(stat -c %A "$key") in
            *---) ;;
            *) wrong "everybody can read $key: chmod 640" ;;
            esac
        fi
    fi
    [ "$errors" = 0 ] || exit 1
    echo "$file: good, for member $name"
}

state=new
case ${1:-} in
-h | --help) usage ;;
--check)
    [ $# -le 2 ] || { usage >&2 && exit 2; }
    check "${2:-/etc/default/etcd}"
    ;;
*)
    if [ "${1:-}" = --existing ]; then
        state=existing
        shift
    fi
    [ $# -ge 2 ] || { usage >&2 && exit 2; }
    settings "$@"
    ;;
esac
