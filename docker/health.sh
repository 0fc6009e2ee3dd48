#!/bin/sh
# Health of a container: a worker lets the head in, a head has its keys, and the environment is whole.
set -eu
case $(cat "$HOME/.ssh/role" 2>/dev/null || true) in
worker)
    if [ -e /cluster/keys/id_ed25519 ]; then
        exec ssh -o ConnectTimeout=5 -o LogLevel=ERROR localhost python -c pass </dev/null
    fi
    # without the head's key: sshd answers, and with a key of this cluster
    ssh-keyscan -T 5 -p 2222 -t ed25519 localhost 2>/dev/null | grep -q ssh-ed25519
    ;;
head) [ -r "$HOME/.ssh/known_hosts" ] && [ -r /cluster/keys/id_ed25519 ] ;;
esac
exec python -c "import hvdtrain"
