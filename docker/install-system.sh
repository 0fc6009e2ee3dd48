#!/bin/sh
# Last stage: Python, ssh and a user of number $1 who runs everything.
set -eu
export DEBIAN_FRONTEND=noninteractive
apt-get update -qq
apt-get install -qq -y --no-install-recommends \
    ca-certificates openssh-client openssh-server python3 tini >/dev/null
# The package made host keys. An image holds no key: containers make theirs, or get them mounted
rm -f /etc/ssh/ssh_host_*
useradd --uid "$1" --create-home --shell /bin/bash --password '*' hvdtrain
install -d -o hvdtrain -g hvdtrain -m 700 /cluster
install -d -o hvdtrain -g hvdtrain -m 755 /work
# For sshd of other set-ups, which reads it by PAM; ours has SetEnv
echo 'PATH="/opt/hvdtrain/bin:/usr/local/bin:/usr/bin:/bin"' >/etc/environment
# Nobody becomes another user here
find / -xdev -type f -perm /6000 -exec chmod a-s {} +
rm -rf /var/lib/apt/lists/* /var/cache/apt/* /var/cache/debconf/* /var/log/* /tmp/install-system.sh
find /usr -name __pycache__ -prune -exec rm -rf {} +
python3 -m compileall -q --invalidation-mode unchecked-hash /usr/lib/python3.11 || true
