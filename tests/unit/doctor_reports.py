"""Reports of hosts for the checks of the doctor: what a real host reported, with values changed."""

import copy

from hvdtrain.tools.doctor.report import Host, Report

DISK = {"path": "runs", "free_mib": 50_000, "error": ""}
INFO = {
    "software": {
        "versions": {
            "Python": "3.11.7",
            "hvdtrain": "0.1.0, files 1234",
            "PyTorch": "2.13.0",
            "TensorFlow": "",
            "Keras": "",
            "NumPy": "2.4.6",
            "mpi4py": "4.1.2",
            "Horovod": "0.28.1 for torch 2.13.0; MPI (Open MPI 5.0.11), Gloo",
            "MPI": "Open MPI 5.0.11",
        },
        "python": "/env/bin/python",
        "build_key": "abc",
        "nccl_build": False,
        "horovod": {"torch": ""},
        "mpi": {"Horovod": "Open MPI 5.0.11", "mpi4py": "Open MPI v5.0.11", "mpi4py error": ""},
        "gpus": {},
    },
    "hostname": "h",
    "addresses": ["10.0.0.1"],
    "own_addresses": ["10.0.0.1", "127.0.0.1"],
    "interfaces": {"eth0": ["10.0.0.1/24"]},
    "directory": "/work",
    "disks": {"run directory": DISK, "temporary directory": DISK, "/dev/shm": DISK},
    "locked_memory_bytes": 8 * 2**20,
    "infiniband": [],
    "cores": 4,
    "cores_of_machine": 4,
    "gpus": {"cards": [], "error": ""},
}
CARDS = [{"name": "H200", "memory_mib": "143771", "driver": "570.1"}] * 2


def changed(**changes):
    """Return a host's info with values changed; ``a__b`` is the value ``b`` of the mapping ``a``."""
    info = copy.deepcopy(INFO)
    for name, value in changes.items():
        *path, last = name.split("__")
        inner = info
        for key in path:
            inner = inner[key.replace("_directory", " directory")]
        inner[last] = value
    return info


def make_report(*infos, slots=1, answers=None):
    hosts = tuple(Host(f"h{number}", slots, info) for number, info in enumerate(infos, start=1))
    links = [
        {str(b): {"eth0": {"error": "", "clock": 0.0, "trip": 0.001}} for b in range(len(infos)) if b != a}
        for a in range(len(infos))
    ]
    return Report(hosts, tuple(range(len(infos))), {"links": links, **(answers or {})}, "/work")
