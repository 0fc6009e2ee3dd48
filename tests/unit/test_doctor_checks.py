"""doctor's checks over sets of facts: what real hosts said, with one thing changed."""

import copy

import pytest

from hvdtrain.doctor.case import Case
from hvdtrain.doctor.findings import Finding, Host
from hvdtrain.doctor.verdicts import diagnose

DISK = {"path": "runs", "free_mib": 50_000, "error": ""}
FACTS = {
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
    """Give facts with values changed; ``a__b`` reaches into a mapping."""
    facts = copy.deepcopy(FACTS)
    for name, value in changes.items():
        *path, last = name.split("__")
        inner = facts
        for key in path:
            inner = inner[key.replace("_directory", " directory")]
        inner[last] = value
    return facts


def case(*facts, slots=1, record=None):
    hosts = tuple(Host(f"h{number}", slots, its) for number, its in enumerate(facts, start=1))
    links = [
        {str(b): {"eth0": {"error": "", "clock": 0.0, "trip": 0.001}} for b in range(len(facts)) if b != a}
        for a in range(len(facts))
    ]
    return Case(hosts, tuple(range(len(facts))), {"links": links, **(record or {})}, "/work")


def wrong(this: Case) -> list[tuple[str, str, str]]:
    return [(f.host, f.check, f.verdict) for f in diagnose(this, "ssh").findings if f.verdict != "ok"]


@pytest.mark.parametrize("number", [1, 2, 3, 16])
def test_equal_healthy_hosts_give_no_alarm(number):
    diagnosis = diagnose(case(*[FACTS] * number), "ssh")
    assert [f for f in diagnosis.findings if f.verdict != "ok"] == []
    assert diagnosis.exit_code == 0


VERSIONS = "software__versions__"


@pytest.mark.parametrize(
    ("changes", "check", "verdict"),
    [
        ({f"{VERSIONS}Python": "3.12.1"}, "Python", "fail"),
        ({f"{VERSIONS}Python": "3.11.2"}, "Python", "warn"),
        ({f"{VERSIONS}hvdtrain": "0.1.0, files 99"}, "hvdtrain", "fail"),
        ({f"{VERSIONS}PyTorch": "2.12.0"}, "PyTorch", "fail"),
        ({f"{VERSIONS}NumPy": "2.0.0"}, "NumPy", "warn"),
        ({f"{VERSIONS}Horovod": "0.28.1 for torch 2.13.0; Gloo"}, "Horovod", "fail"),
        ({f"{VERSIONS}MPI": ""}, "MPI", "fail"),
        ({"software__python": "/other/python"}, "Python's path", "warn"),
        ({"software__horovod": {"torch": "undefined symbol"}}, "Horovod for PyTorch", "fail"),
        ({"software__mpi": {"Horovod": "Open MPI 4.1", "mpi4py": "", "mpi4py error": ""}}, "one MPI", "warn"),
        ({"addresses": []}, "own name", "fail"),
        ({"addresses": ["10.9.9.9"]}, "own name", "fail"),
        ({"interfaces": {"ens3": ["10.0.0.2/24"]}}, "interface", "fail"),
        ({"interfaces": {}}, "interface", "fail"),
        ({"directory": "/root"}, "working directory", "fail"),
        ({"disks__temporary_directory": {**DISK, "free_mib": 1}}, "temporary directory", "fail"),
        ({"disks__/dev/shm": {**DISK, "error": "No space left on device"}}, "/dev/shm", "warn"),
        ({"disks__run_directory": {**DISK, "free_mib": 1}}, "run directory's disk", "warn"),
        ({"infiniband": ["mlx5_0"]}, "locked memory", "warn"),
        ({"cores": 0}, "cores", "warn"),
    ],
)
def test_one_host_that_differs_is_named(changes, check, verdict):
    changes = {name.replace("run_directory", "run directory"): value for name, value in changes.items()}
    changes = {name.replace("temporary_directory", "temporary directory"): v for name, v in changes.items()}
    assert ("h2", check, verdict) in wrong(case(FACTS, changed(**changes), FACTS))
    assert {host for host, *_ in wrong(case(FACTS, changed(**changes), FACTS))} == {"h2"}


def test_of_two_hosts_that_differ_the_first_is_the_rule():
    found = diagnose(case(FACTS, changed(software__versions__PyTorch="2.12.0")), "ssh").findings
    assert Finding("h1", "PyTorch", "ok", "2.13.0") in found
    assert next(f.found for f in found if (f.host, f.check) == ("h2", "PyTorch")) == "2.12.0; 2.13.0 on h1"


def test_a_host_without_any_framework_fails_with_the_others_named():
    bare = changed(software__versions__PyTorch="", software__horovod={}, software__versions__Horovod="")
    assert ("h2", "PyTorch", "fail") in wrong(case(FACTS, bare))
    assert [f for f in wrong(case(bare)) if f[1] == "framework"] == [("h1", "framework", "fail")]


def test_the_disk_of_the_first_host_counts():
    full = {**FACTS["disks"], "run directory": {**DISK, "error": "No space left on device"}}
    assert wrong(case({**FACTS, "disks": full}, FACTS)) == [("h1", "run directory's disk", "fail")]
    assert wrong(case(FACTS, {**FACTS, "disks": full})) == [("h2", "run directory's disk", "warn")]


def broken(*pairs: tuple[int, int], hosts: int, error: str = "no answer"):
    this = case(*[FACTS] * hosts)
    for a, b in pairs:
        this.record["links"][a][str(b)]["eth0"] = {"error": error}
    return wrong(this)


def test_the_host_that_nobody_reaches_is_named():
    assert broken((0, 1), (2, 1), hosts=3) == [("h2", "ports", "fail")]
    assert broken((0, 1), hosts=2) == [("h2", "ports", "fail")]
    assert broken((0, 2), (1, 2), (3, 2), hosts=4) == [("h3", "ports", "fail")]


def test_a_second_interface_that_leads_nowhere_is_no_fault():
    two = changed(interfaces={"eth0": ["10.0.0.1/24"], "ib0": ["10.1.0.1/24"]})
    this = case(two, two)
    for a, b in ((0, 1), (1, 0)):
        this.record["links"][a][str(b)]["ib0"] = {"error": "no answer"}
    found = [f for f in diagnose(this, "ssh").findings if f.check in ("interface", "ports")]
    assert {f.verdict for f in found} == {"ok"}
    assert "--network-interfaces eth0" in found[0].found


@pytest.mark.parametrize(("offset", "verdict"), [(0.4, ""), (5.0, "warn"), (-7200.0, "warn"), (60.0, "fail")])
def test_a_clock_counts_beyond_what_the_round_trip_leaves_open(offset, verdict):
    this = case(FACTS, FACTS)
    this.record["links"][0]["1"]["eth0"]["clock"] = offset
    this.record["links"][1]["0"]["eth0"] = {"error": "no answer"}
    found = wrong(this)
    assert [one[2] for one in found if one[:2] == ("h2", "clock")] == ([verdict] if verdict else [])


def test_a_directory_that_is_not_shared_is_a_warning():
    record = {"mark": ["/work/runs/.mark", None], "seen": [True, False]}
    assert wrong(case(FACTS, FACTS, record=record)) == [("h2", "run directory", "warn")]


def with_cards(cards, **more):
    return changed(
        gpus={"cards": cards, "error": ""}, software__nccl_build=True, locked_memory_bytes=-1, **more
    )


def test_gpus_are_compared():
    good = with_cards(CARDS)
    assert wrong(case(good, good)) == []
    assert ("h2", "GPUs", "fail") in wrong(case(good, FACTS))
    assert ("h1", "GPUs", "fail") in wrong(case(good, slots=3))
    assert ("h1", "Horovod on GPUs", "fail") in wrong(case(changed(gpus={"cards": CARDS, "error": ""})))
    assert wrong(case(changed(gpus={"cards": [], "error": "driver mismatch"}))) == [("h1", "GPUs", "fail")]
    seen = {"torch": {"gpus": ["a", "b"], "nccl": "2.28", "no_peer_access": [[0, 1], [1, 0]]}}
    assert wrong(case(with_cards(CARDS, software__gpus=seen))) == [("h1", "peer access", "warn")]


def rates(*gflops, share=1.0):
    return {"compute": [{"gflops": rate, "core_share": share} for rate in gflops]}


def test_a_host_five_times_slower_is_named():
    found = diagnose(case(*[FACTS] * 3, record=rates(100, 20, 95)), "ssh").findings
    slow = next(f for f in found if f.check == "compute" and f.verdict == "warn")
    assert slow.host == "h2"
    assert slow.found.startswith("4.8 times slower")
    assert "Another load" in slow.remedy


def test_a_host_that_was_slow_once_is_not_named():
    again = {**rates(100, 20, 95), "compute again": rates(90, 92, 95)["compute"]}
    assert wrong(case(*[FACTS] * 3, record=again)) == []


def test_a_host_behind_a_slow_link_is_named():
    fast, slow = ({str(2**10): 1e-4, str(2**20): seconds} for seconds in (1e-3, 1e-1))
    record = {"pair 0 1": [slow, None, None], "pair 0 2": [fast, None, None], "pair 1 2": [None, slow, None],
              "pair 0 3": [fast], "pair 2 3": [None, None, fast], "pair 1 3": [None, slow]}  # fmt: skip
    assert wrong(case(*[FACTS] * 4, record=record)) == [("h2", "link", "warn")]


def test_a_host_that_said_nothing_is_all_that_fails():
    problem = Finding("h2", "ssh", "fail", "it is down", "Start it.")
    this = case(FACTS, FACTS, FACTS)
    silent = Case(
        (this.hosts[0], Host("h2", 1, None, problem), this.hosts[2]), this.members, this.record, "/work"
    )
    this.record["links"][1] = None
    for a in (0, 2):
        del this.record["links"][a]["1"]
    assert wrong(silent) == [("h2", "ssh", "fail")]
