"""The example host files: both launchers read them, and start workers where they say."""

from collections import Counter

import pytest
from hosts import Cluster
from support.documents import ROOT

SLOTS = {
    "local.txt": {"localhost": 2},
    "two-hosts.txt": {"host1": 2, "host2": 2},
    "uneven.txt": {"host1": 2, "host2": 1, "host3": 1},
    "16-workers.txt": {"host1": 8, "host2": 8},
}
FOLDER = ROOT / "hostfiles"


def test_horovod_reads_the_slots():
    from horovod.runner.common.util.hosts import parse_host_files, parse_hosts_and_slots

    for name, expected in SLOTS.items():
        names, slots = parse_hosts_and_slots(parse_host_files(str(FOLDER / name)))
        assert names == list(expected)
        assert slots == expected


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    slots = {"host1": 8, "host2": 8, "host3": 1}
    with Cluster(slots, shared=tmp_path_factory.mktemp("shared")) as cluster:
        yield cluster


# Open MPI's daemons may wait for ever, once in a hundred jobs, where workers end as soon as they started
NAME = ["sh", "-c", "sleep 0.7; hostname"]
GLOO, MPI, MPIRUN = ["horovodrun", "--gloo"], ["horovodrun", "--mpi"], ["mpirun", "--bind-to", "none"]


@pytest.mark.parametrize(
    ("launch", "name"),
    [(MPIRUN, "local.txt"), (MPIRUN, "uneven.txt"), (MPI, "16-workers.txt"), (GLOO, "uneven.txt")],
)
def test_launchers_fill_the_slots(launch, name, cluster):
    workers = str(sum(SLOTS[name].values()))
    result = cluster.head.run([*launch, "-np", workers, "--hostfile", str(FOLDER / name), *NAME])
    assert result.returncode == 0, result.output
    expected = {"host1" if host == "localhost" else host: slots for host, slots in SLOTS[name].items()}
    assert Counter(result.stdout.split()) == expected


def test_a_host_file_with_fewer_slots_than_workers_is_refused(cluster):
    words = [*GLOO, "-np", "5", "--hostfile", str(FOLDER / "uneven.txt"), "hostname"]
    result = cluster.head.run(words)
    assert result.returncode != 0
    assert "more processes (5) than there are available slots (4)" in result.output
