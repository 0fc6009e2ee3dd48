"""Hosts whose files are those of an image, as containers of it have them: nothing of this machine shows."""

import os
import pwd
from pathlib import Path

from machine_hosts import HostFiles

_USER, _PORT, _CLUSTER = "hvdtrain", 2222, "/cluster"
_PATH = "/opt/hvdtrain/bin:/usr/local/bin:/usr/bin:/bin"
# What a container engine mounts. $1: image, $2: the host's own folder, $3: folder of all hosts, $4: shared
_MOUNTS = """
mkdir $2/layers $2/root
mount -t tmpfs layers $2/layers
mkdir $2/layers/upper $2/layers/work
mount -t overlay -o lowerdir=$1,upperdir=$2/layers/upper,workdir=$2/layers/work image $2/root
cd $2/root
mount -t proc proc proc
mount -t sysfs -o ro sysfs sys
mount -t tmpfs -o mode=755 dev dev
mkdir dev/pts dev/shm
mount -t devpts -o newinstance,ptmxmode=0666,mode=620 devpts dev/pts
mount -t tmpfs -o mode=1777 shm dev/shm
for device in null zero full random urandom tty; do
    touch dev/$device
    mount --bind /dev/$device dev/$device
done
ln -s pts/ptmx dev/ptmx
ln -s /proc/self/fd dev/fd
for file in hosts hostname; do rm -f etc/$file; touch etc/$file; done
mount --bind $3/hosts etc/hosts
mount --bind $2/hostname etc/hostname
mkdir -p cluster .$4 old
mount --bind $3/cluster cluster
mount --bind $4 .$4
pivot_root . old
cd /
umount --lazy /old
rmdir /old
"""


def image_hosts(folder: Path, addresses: dict[str, str], root: Path, shared: Path) -> dict[str, HostFiles]:
    """Write the private files of hosts, each an overlay over the image; they share keys and ``shared``."""
    user = _user(root)
    names = "".join(f"{address}\t{name}\n" for name, address in addresses.items())
    (folder / "hosts").write_text(f"127.0.0.1\tlocalhost\n{names}")
    (folder / "cluster").mkdir()
    for common in (folder / "cluster", shared):
        os.chown(common, user.pw_uid, user.pw_gid)
    for name in addresses:
        (folder / name).mkdir()
        (folder / name / "hostname").write_text(f"{name}\n")
    everyone = ",".join(addresses)
    return {
        name: HostFiles(
            mounts=[["sh", "-euc", _MOUNTS, "sh", str(root), str(folder / name), str(folder), str(shared)]],
            prefix=_as_user(user),
            sshd=["sh", "-c", "exec hvdtrain-entrypoint worker </dev/null >~/worker.log 2>&1 &"],
            port=_PORT,
            ready=["hvdtrain-entrypoint", "head", "true", "-H", everyone],
        )
        for name in addresses
    }


def _user(root: Path) -> pwd.struct_passwd:
    """Give the image's entry for its user."""
    for line in (root / "etc" / "passwd").read_text().splitlines():
        name, password, uid, gid, *rest = line.split(":")
        if name == _USER:
            return pwd.struct_passwd((name, password, int(uid), int(gid), *rest))
    raise LookupError(f"{root} has no user {_USER}")


def _as_user(user: pwd.struct_passwd) -> list[str]:
    """Give the words that start a command as the image's user, with the image's environment.

    Of this process's environment nothing goes along; what a test sets for its job does.
    """
    ours = [word for name in os.environ for word in ("--unset", name)]
    theirs = [f"PATH={_PATH}", f"HOME={user.pw_dir}", f"USER={_USER}", "LANG=C.UTF-8"]
    who = ["setpriv", f"--reuid={user.pw_uid}", f"--regid={user.pw_gid}", "--clear-groups"]
    return [*who, "env", *ours, *theirs]
