#!/bin/sh
# Gives elastic a user of its own that may touch nothing but its prefix, and switches etcd's authentication on.
#   usage: ETCDCTL_ENDPOINTS=... users.sh [PREFIX]        (further ETCDCTL_ variables for TLS)
# Asks for two passwords: root's and the user's. Agents and operators take the user's from a file.
set -eu
export ETCDCTL_API=3
prefix=${1:-/elastic}/
etcdctl user add root
etcdctl role add root
etcdctl user grant-role root root
etcdctl user add elastic
etcdctl role add elastic
etcdctl role grant-permission elastic --prefix=true readwrite "$prefix"
etcdctl user grant-role elastic elastic
etcdctl auth enable
