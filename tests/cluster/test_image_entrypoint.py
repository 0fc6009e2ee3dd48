"""The entry point in containers: head and worker, whose keys are made or mounted, and what it refuses."""

import contextlib
import os
import signal
import subprocess
import time

import pytest
from hosts import Cluster

ENTRY = "hvdtrain-entrypoint"
_STOP_SECONDS = 10
# Cut short what would be a minute
HURRY = {"HVDTRAIN_WAIT_SECONDS": "1"}


@pytest.fixture
def cluster(image_root, tmp_path):
    with Cluster({"head": 1, "worker1": 1}, root=image_root, shared=tmp_path) as cluster:
        yield cluster


@pytest.fixture
def keys(tmp_path):
    """A folder of keys as a user makes it, for the hosts to mount."""
    folder = tmp_path / "keys"
    folder.mkdir()
    for name in ("id_ed25519", "ssh_host_ed25519_key"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", folder / name], check=True)
    own(folder)
    return folder


def own(folder):
    """Give the folder to the image's user, as the user who mounts it would."""
    for path in (folder, *folder.iterdir()):
        os.chown(path, 1000, 1000)


def mount(host, folder):
    """Mount keys on a host whose container starts again."""
    host.stop_sshd()
    host.bind(folder, "/cluster/keys")
    return host.run([ENTRY, "head", "true", "-H", host.name])


@contextlib.contextmanager
def container(host, *words):
    """Run the entry point as an engine does, and end it as `docker stop` does: it must end well in time.

    sshd overwrites its environment, by which a job's processes are found: it has to be stopped here.
    """
    with host.started(["tini", "-s", "--", ENTRY, *words]) as job:
        try:
            yield job
        finally:
            os.kill(job.process.pid, signal.SIGTERM)
            ended = job.wait(_STOP_SECONDS)
    assert ended.returncode in (0, 128 + signal.SIGTERM), ended.output


def test_a_worker_serves_the_head_with_the_environment_and_the_head_insists_on_known_host_keys(cluster):
    said = cluster.head.run(["ssh", "worker1", "hostname; id -un; command -v python; umask"])
    assert said.stdout.split() == ["worker1", "hvdtrain", "/opt/hvdtrain/bin/python", "0022"], said.output
    said = cluster.head.run(["ssh", "-o", "UserKnownHostsFile=/dev/null", "worker1", "true"])
    assert said.returncode == 255
    assert "Host key verification failed" in said.stderr
    stranger = ["-F", "none", "-o", "IdentityFile=none", "-o", "BatchMode=yes"]
    said = cluster.head.run(["ssh", *stranger, "-p", "2222", "worker1", "true"])
    assert "Permission denied (publickey)" in said.stderr


def test_the_head_names_the_hosts_that_never_came(cluster):
    cluster.hosts["worker1"].stop_sshd()
    hosts = "head:1,worker1:1,worker9:2"
    started = time.monotonic()
    said = cluster.head.run([ENTRY, "head", "horovodrun", "-np", "4", "-H", hosts, "true"], **HURRY)
    assert said.returncode == 3
    assert "No answer within 1 s from: worker1 worker9" in said.stderr
    assert "worker1: ssh: connect to host worker1 port 2222: Connection refused" in said.stderr
    assert "worker9: ssh: Could not resolve hostname worker9" in said.stderr
    assert "HVDTRAIN_WAIT_SECONDS" in said.stderr
    assert time.monotonic() - started < 55  # the limit would be 60


def test_the_head_reads_host_files(cluster, tmp_path):
    path = tmp_path / "hosts.txt"
    path.write_text("# two\nhead slots=1\n\nworker9 slots=2  # not here\n")
    for words in (["--hostfile", str(path)], ["-hostfile", str(path)], [f"--hostfile={path}"]):
        said = cluster.head.run([ENTRY, "head", "true", *words], **HURRY)
        assert "from: worker9\n" in said.stderr, words


def test_a_head_without_other_hosts_needs_no_key(image_root, tmp_path):
    with Cluster({"head": 1}, root=image_root, shared=tmp_path) as cluster:
        (tmp_path / "none").mkdir()
        cluster.head.bind(tmp_path / "none", "/cluster")
        assert cluster.head.run([ENTRY, "head", "true", "-H", "localhost:2"]).returncode == 0
        said = cluster.head.run([ENTRY, "head", "true", "-H", "worker1"])
        assert said.returncode == 3
        assert "There are no keys in /cluster/keys, and /cluster cannot be written" in said.stderr


def test_mounted_keys_are_used(cluster, keys):
    for host in cluster.hosts.values():
        mount(host, keys)
    with container(cluster.hosts["worker1"], "worker") as worker:
        words = [ENTRY, "head", "sh", "-c", "ssh worker1 hostname", "-H", "worker1"]
        said = cluster.head.run(words)
        assert said.stdout.strip() == "worker1", said.output + worker.result().output


def test_a_worker_needs_only_the_public_half_of_the_heads_key(cluster, keys, tmp_path):
    theirs = tmp_path / "theirs"
    theirs.mkdir()
    (keys / "ssh_host_ed25519_key").rename(theirs / "ssh_host_ed25519_key")
    (theirs / "authorized_keys").write_text((keys / "id_ed25519.pub").read_text())
    (keys / "known_hosts").write_text("[worker1]:2222 " + (keys / "ssh_host_ed25519_key.pub").read_text())
    for folder in (keys, theirs):
        own(folder)
    mount(cluster.head, keys)
    mount(cluster.hosts["worker1"], theirs)
    with container(cluster.hosts["worker1"], "worker"):
        said = cluster.head.run([ENTRY, "head", "sh", "-c", "ssh worker1 hostname", "-H", "worker1"])
        assert said.stdout.strip() == "worker1", said.output
        assert cluster.hosts["worker1"].run(["hvdtrain-health"]).returncode == 0


def test_keys_that_others_can_read_or_that_have_a_passphrase_are_refused(cluster, keys):
    worker, host_key = cluster.hosts["worker1"], keys / "ssh_host_ed25519_key"
    host_key.chmod(0o644)
    mount(worker, keys)
    said = worker.run([ENTRY, "worker"])
    assert said.returncode == 3
    assert (
        "Others may read or write the private key /cluster/keys/ssh_host_ed25519_key (mode 644" in said.stderr
    )
    assert "chmod 600" in said.stderr

    host_key.chmod(0o600)
    change = ["ssh-keygen", "-q", "-p", "-P", "", "-N", "long enough", "-f", keys / "id_ed25519"]
    subprocess.run(change, check=True, stdout=subprocess.DEVNULL)
    own(keys)
    said = worker.run([ENTRY, "worker"])
    assert said.returncode == 3
    assert "has a passphrase" in said.stderr


def test_a_worker_ends_on_sigterm_and_its_health_with_it(cluster):
    worker = cluster.hosts["worker1"]
    assert worker.run(["hvdtrain-health"]).returncode == 0
    worker.stop_sshd()
    assert worker.run(["hvdtrain-health"]).returncode != 0
    with container(worker, "worker") as job:
        cluster.head.run([ENTRY, "head", "true", "-H", "worker1"])
    assert job.process.returncode == 0
    assert "Server listening on 0.0.0.0 port 2222" in job.result().stderr


def test_a_head_without_a_command_stays_and_any_other_command_runs_as_it_is(cluster):
    with container(cluster.head, "head") as job:
        assert cluster.head.run(["hvdtrain-health"]).returncode == 0
        assert job.process.poll() is None
    said = cluster.head.run([ENTRY, "sh", "-c", "umask; exit 7"], HVDTRAIN_UMASK="0027")
    assert (said.returncode, said.stdout.strip()) == (7, "0027")
    said = cluster.head.run([ENTRY, "worker", "python"])
    assert said.returncode == 2
    assert said.stderr.splitlines()[0] == "hvdtrain: worker takes no more words; found: python."
