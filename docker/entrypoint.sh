#!/bin/sh
# Start of a container:
#   worker          sshd for the head's launcher, on port 2222
#   head COMMAND    wait until the hosts that COMMAND names (-H, --hostfile) answer, then run it
#   head            make the keys and stay, for `docker exec`
#   COMMAND         run it
#
# Keys are in /cluster/keys, mounted or made by the first container that has /cluster:
#   id_ed25519            with which the head logs in; its public half is let in, or authorized_keys is
#   ssh_host_ed25519_key  with which every worker proves that it is one; or the hosts of known_hosts
#
# HVDTRAIN_WAIT_SECONDS  how long the head waits for its hosts (60)
# HVDTRAIN_UMASK         permissions that new files do not get (0022)
set -eu
umask "${HVDTRAIN_UMASK:-0022}"
cluster=/cluster
keys=$cluster/keys
port=2222

fail() { # exit code, problem, remedy
    printf 'hvdtrain: %s\n  %s\n' "$2" "$3" >&2
    exit "$1"
}

make_keys() {
    [ ! -e "$keys" ] || return 0
    [ -w "$cluster" ] || fail 3 "There are no keys in $keys, and $cluster cannot be written by user $(id -u)." \
        "Mount one volume at $cluster in all containers of the job, or keys at $keys."
    new=$(mktemp -d "$cluster/.keys.XXXXXX")
    ssh-keygen -q -t ed25519 -N '' -C hvdtrain-user -f "$new/id_ed25519"
    ssh-keygen -q -t ed25519 -N '' -C hvdtrain-host -f "$new/ssh_host_ed25519_key"
    # One rename: of containers that start together one wins, and nobody sees half a set
    mv -T "$new" "$keys" 2>/dev/null || rm -rf "$new"
}

check_private() { # file
    [ -e "$1" ] || fail 3 "The key $1 is missing." "Make it: ssh-keygen -t ed25519 -N '' -f $1"
    mode=$(stat -L -c %a "$1")
    owner=$(stat -L -c %u "$1")
    others=007
    [ "$owner" != "$(id -u)" ] || others=077
    [ $((0$mode & others)) -eq 0 ] || fail 3 "Others may read or write the private key $1 (mode $mode, owner $owner)." \
        "Take the permission away, chmod 600 on the machine that it is mounted from, and make new keys if others had it."
    [ -r "$1" ] || fail 3 "User $(id -u) cannot read the key $1 (mode $mode, owner $owner)." \
        "chown $(id -u) it, or build the image with --build-arg UID=$owner."
}

public_half() { # private key
    check_private "$1"
    ssh-keygen -y -P '' -f "$1" || fail 3 "$1 is no private key, or has a passphrase." \
        "Make one without: ssh-keygen -t ed25519 -N '' -f FILE"
}

# What is written here holds no secret
trust() { # known_hosts or authorized_keys, private key to derive it from, what comes before the public half
    if [ -e "$keys/$1" ]; then
        cat "$keys/$1" >"$HOME/.ssh/$1"
    else
        half=$(public_half "$2")
        printf '%s%s\n' "$3" "$half" >"$HOME/.ssh/$1"
    fi
    chmod 600 "$HOME/.ssh/$1"
}

prepare_ssh() { # head or worker
    make_keys
    [ -d "$HOME/.ssh" ] || mkdir -m 700 "$HOME/.ssh"
    if [ "$1" = worker ]; then
        check_private "$keys/ssh_host_ed25519_key"
        trust authorized_keys "$keys/id_ed25519" ""
    else
        check_private "$keys/id_ed25519"
    fi
    if [ "$1" = head ] || [ -e "$keys/id_ed25519" ]; then
        trust known_hosts "$keys/ssh_host_ed25519_key" "[*]:$port "
    fi
    echo "$1" >"$HOME/.ssh/role"
}

# The hosts of a launcher's or the doctor's command line, one a line, without this one
hosts_of() {
    while [ $# -gt 0 ]; do
        case $1 in
        -H | --hosts | -host | --host) [ $# -lt 2 ] || printf '%s\n' "$2" | tr ',' '\n' ;;
        -H=* | --hosts=* | --host=*) printf '%s\n' "${1#*=}" | tr ',' '\n' ;;
        -hostfile | --hostfile | -machinefile | --machinefile) [ $# -lt 2 ] || hosts_in "$2" ;;
        --hostfile=*) hosts_in "${1#*=}" ;;
        esac
        shift
    done | sed 's/:.*//' | sort -u | while read -r host; do is_here "$host" || echo "$host"; done
}

hosts_in() { # host file
    if [ -r "$1" ]; then
        sed 's/#.*//' "$1" | awk 'NF {print $1}'
    else
        echo "hvdtrain: The host file $1 cannot be read." >&2
    fi
}

is_here() { # host name or address
    case $1 in "" | localhost | 127.* | "$(hostname)") return 0 ;; esac
    address=$(getent hosts "$1" | awk '{print $1; exit}') || return 1
    case " $(hostname -I) " in *" $address "*) [ -n "$address" ] ;; *) return 1 ;; esac
}

wait_for() { # hosts
    limit=${HVDTRAIN_WAIT_SECONDS:-60}
    end=$(($(date +%s) + limit))
    while :; do
        missing="" reasons=""
        for host in "$@"; do
            if ! said=$(ssh -o ConnectTimeout=2 -o LogLevel=ERROR "$host" true 2>&1 </dev/null); then
                missing="$missing $host"
                reasons="$reasons
  $host: $(printf '%s\n' "$said" | tail -n 1)"
            fi
        done
        [ -n "$missing" ] || return 0
        # shellcheck disable=SC2086 # words
        set -- $missing
        [ "$(date +%s)" -lt "$end" ] || fail 3 "No answer within $limit s from:$missing$reasons" \
            "Is a container with the command 'worker', these names and the same keys running? More time: HVDTRAIN_WAIT_SECONDS."
        sleep 0.5
    done
}

case ${1:-} in
worker)
    [ $# -eq 1 ] || fail 2 "worker takes no more words; found: $2." "Start the job on the head."
    prepare_ssh worker
    exec /usr/sbin/sshd -D -e
    ;;
head)
    shift
    hosts=$(hosts_of "$@")
    case " $* " in *" --host-discovery-script"[\ =]*) finds_hosts=yes ;; *) finds_hosts= ;; esac
    if [ $# -eq 0 ] || [ -n "$hosts$finds_hosts" ]; then
        prepare_ssh head
        # shellcheck disable=SC2086 # words
        [ -z "$hosts" ] || wait_for $hosts
    fi
    [ $# -gt 0 ] || set -- sleep infinity
    ;;
esac
exec "$@"
