#!/bin/sh
# Makes a CA and certificates for three etcd members and their clients, with openssl alone.
#   usage: certificates.sh DIRECTORY MEMBER_HOST...
# Copy ca.pem and <host>.pem, <host>-key.pem to each member; ca.pem, client.pem, client-key.pem to agents and operators.
# Keep ca-key.pem away from all of them.
set -eu
[ $# -ge 2 ] || { echo "usage: $0 DIRECTORY MEMBER_HOST..." >&2; exit 2; }
umask 077
directory=$1
shift
mkdir -p "$directory"
cd "$directory"
[ ! -e ca-key.pem ] || { echo "$0: $directory/ca-key.pem is there already: choose another directory" >&2; exit 1; }

openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 3650 -subj "/CN=elastic etcd CA" \
    -addext basicConstraints=critical,CA:TRUE -addext keyUsage=critical,keyCertSign,cRLSign \
    -keyout ca-key.pem -out ca.pem

# name, subject alternative names, extended key usage
certificate() {
    openssl req -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -subj "/CN=$1" -keyout "$1-key.pem" -out "$1.csr"
    printf 'extendedKeyUsage=%s\nsubjectAltName=%s\n' "$3" "$2" > "$1.ext"
    openssl x509 -req -in "$1.csr" -CA ca.pem -CAkey ca-key.pem -CAcreateserial -days 825 -extfile "$1.ext" -out "$1.pem"
    rm "$1.csr" "$1.ext"
}

for host in "$@"; do
    certificate "$host" "DNS:$host,DNS:localhost,IP:127.0.0.1" serverAuth,clientAuth
done
certificate client "DNS:client" clientAuth
chmod 644 ./*.pem
chmod 600 ./*-key.pem
ls -l
