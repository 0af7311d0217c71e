#!/bin/sh
# etcd users for elastic, each of whom may touch nothing but elastic's keys. Run it again at any time: what is there
# already stays.
set -eu
export ETCDCTL_API=3

usage() {
    cat <<'TEXT'
usage: users.sh [--prefix PATH] [--passwords DIRECTORY]               the first three below; switches authentication on
       users.sh [--prefix PATH] [--passwords DIRECTORY] job JOB       a user for the agents of this one job
       users.sh [--prefix PATH] [--passwords DIRECTORY] operator JOB  a user who asks things of this one job
       users.sh [--prefix PATH] [--passwords DIRECTORY] reader JOB    a user who looks at this one job
       users.sh [--passwords DIRECTORY] password USER                 another password for a user who is there

  user                  for                                may
  elastic-reader        dashboards, elasticctl jobs        read all jobs
  elastic-operator      elasticctl, elastic-coordinator    read and write all jobs
  elastic-agents        agents of any job                  read and write all jobs
  elastic-agents-JOB    agents of this one job             read and write this job
  elastic-operator-JOB  elasticctl with this one job       read this job; drain, exclude, evict, set, pause, close it
  elastic-reader-JOB    elasticctl with this one job       read this job

Where etcd is, ETCDCTL_ENDPOINTS, ETCDCTL_CACERT, ETCDCTL_CERT and ETCDCTL_KEY say. Passwords, root's too, are asked for;
or each stands in DIRECTORY/USER. They are never arguments of a command, which everybody on a host can read.
--prefix is what agents are given as --rdzv-conf=prefix=…: /elastic, unless it is named.
TEXT
}

fail() {
    echo "users.sh: $*" >&2
    exit 1
}

# password USER: from its file, or asked for.
password() {
    if [ -n "$passwords" ]; then
        [ -r "$passwords/$1" ] || fail "$passwords/$1 is missing: it holds the password of $1"
        given=$(cat "$passwords/$1")
    else
        [ -t 0 ] || fail "the password of $1 can be asked for on a terminal only: use --passwords DIRECTORY"
        printf 'Password of etcd user %s: ' "$1" >&2
        trap 'stty echo' EXIT
        stty -echo
        read -r given
        stty echo
        trap - EXIT
        echo >&2
    fi
    case $given in
    '') fail "the password of $1 is empty" ;;
    *[[:space:]]*) fail "the password of $1 has a blank or a line break in it, which etcdctl does not take" ;;
    esac
    printf '%s\n' "$given"
}

# etcdctl as root. It reads root's password from its environment, which no other user can read, and $word from its input.
word=
etcdctl_as_root() {
    printf '%s\n' "$word" | ETCDCTL_USER=root:$root etcdctl "$@"
}

# The same, and once more where root has no right to it. For 0.1 s after users have changed, etcd 3.5 can take root for
# what it was before: it reads an entry of its buffer that is not in use any more. 3.6 has the fix (etcd's PR 12587).
as_root() {
    code=0
    { refusal=$(etcdctl_as_root "$@" 2>&1 >&3); } 3>&1 || code=$?
    [ -z "$refusal" ] || printf '%s\n' "$refusal" >&2
    case $code:$refusal in
    0:*) return ;;
    *'permission denied'*) ;;
    *) return "$code" ;;
    esac
    echo "users.sh: etcd refuses $1 $2 to root, as etcd 3.5 can just after a change of users: trying once more" >&2
    sleep 1
    etcdctl_as_root "$@"
}

has() {
    as_root "$1" list | grep -qxF "$2"
}

user() {
    if has user "$1"; then
        echo "user $1 is there already: its password stays"
        return
    fi
    word=$(password "$1")
    as_root user add "$1" --interactive=false
}

# role NAME RIGHT PATH [RIGHT PATH]: the role, and the user of the same name who has it. A path that ends in / means all
# keys below it, another means that key.
role() {
    name=$1
    shift
    has role "$name" || as_root role add "$name"
    while [ $# -gt 0 ]; do
        case $2 in
        */) as_root role grant-permission "$name" --prefix=true "$1" "$2" >/dev/null ;;
        *) as_root role grant-permission "$name" "$1" "$2" >/dev/null ;;
        esac
        shift 2
    done
    user "$name"
    as_root user grant-role "$name" "$name" >/dev/null
}

prefix=/elastic
passwords=
while :; do
    case ${1:-} in
    --prefix | --passwords)
        [ $# -ge 2 ] || { usage >&2 && exit 2; }
        if [ "$1" = --prefix ]; then prefix=${2%/}; else passwords=$2; fi
        shift 2
        ;;
    -h | --help) usage && exit ;;
    *) break ;;
    esac
done
case $#:${1:-} in
0: | 2:job | 2:operator | 2:reader | 2:password) ;;
*) usage >&2 && exit 2 ;;
esac
case $prefix in
/?*) ;;
*) fail "$prefix: a prefix begins with / and is not empty" ;;
esac
root=$(password root)
as_root user list >/dev/null ||
    fail "etcd at ${ETCDCTL_ENDPOINTS:-127.0.0.1:2379} does not answer root: the line above says why"

case ${1:-} in
'')
    role elastic-reader read "$prefix/"
    # An agent leads a job, starts it again and ends it; a coordinator does the first. They write the same keys.
    role elastic-operator readwrite "$prefix/"
    role elastic-agents readwrite "$prefix/"
    # root was asked for above: it is not asked for twice.
    word=$root
    has user root || as_root user add root --interactive=false
    has role root || as_root role add root
    as_root user grant-role root root >/dev/null
    as_root auth enable
    ;;
job | operator | reader)
    case $2 in
    '' | *[!A-Za-z0-9._@+=-]*) fail "$2: a user of its own is for jobs whose id has letters, digits and ._-@+= alone" ;;
    esac
    job=$prefix/v1/jobs/$2
    case $1 in
    # Agents write every key of their job but desired, and delete that too when they start it again.
    job) role "elastic-agents-$2" readwrite "$job/" ;;
    # What is wished for, and the line of history that says by whom: not the round, and not the checkpoint, which names
    # the file that workers load.
    operator) role "elastic-operator-$2" read "$job/" write "$job/desired" write "$job/events/" ;;
    reader) role "elastic-reader-$2" read "$job/" ;;
    esac
    ;;
password)
    has user "$2" || fail "there is no user $2"
    word=$(password "$2")
    as_root user passwd "$2" --interactive=false
    ;;
esac
