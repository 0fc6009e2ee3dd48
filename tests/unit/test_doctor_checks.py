"""The doctor's checks, on reports of hosts with one value changed."""

import pytest
from doctor_reports import DISK, INFO, changed, make_report

from hvdtrain.tools.doctor.checks_network import diagnose
from hvdtrain.tools.doctor.report import Finding, Host, Report


def wrong(report: Report) -> list[tuple[str, str, str]]:
    return [(f.host, f.check, f.status) for f in diagnose(report, "ssh").findings if f.status != "ok"]


VERSIONS = "software__versions__"


@pytest.mark.parametrize(
    ("changes", "check", "status"),
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
def test_one_host_that_differs_is_named(changes, check, status):
    changes = {name.replace("run_directory", "run directory"): value for name, value in changes.items()}
    changes = {name.replace("temporary_directory", "temporary directory"): v for name, v in changes.items()}
    assert ("h2", check, status) in wrong(make_report(INFO, changed(**changes), INFO))
    assert {host for host, *_ in wrong(make_report(INFO, changed(**changes), INFO))} == {"h2"}


def test_a_host_without_any_framework_fails_with_the_others_named():
    bare = changed(software__versions__PyTorch="", software__horovod={}, software__versions__Horovod="")
    assert ("h2", "PyTorch", "fail") in wrong(make_report(INFO, bare))
    assert [f for f in wrong(make_report(bare)) if f[1] == "framework"] == [("h1", "framework", "fail")]


def broken(*pairs: tuple[int, int], hosts: int, error: str = "no answer"):
    report = make_report(*[INFO] * hosts)
    for a, b in pairs:
        report.answers["links"][a][str(b)]["eth0"] = {"error": error}
    return wrong(report)


def test_the_host_that_nobody_reaches_is_named():
    assert broken((0, 1), (2, 1), hosts=3) == [("h2", "ports", "fail")]
    assert broken((0, 1), hosts=2) == [("h2", "ports", "fail")]
    assert broken((0, 2), (1, 2), (3, 2), hosts=4) == [("h3", "ports", "fail")]


def test_a_second_interface_that_leads_nowhere_is_no_fault():
    two = changed(interfaces={"eth0": ["10.0.0.1/24"], "ib0": ["10.1.0.1/24"]})
    report = make_report(two, two)
    for a, b in ((0, 1), (1, 0)):
        report.answers["links"][a][str(b)]["ib0"] = {"error": "no answer"}
    found = [f for f in diagnose(report, "ssh").findings if f.check in ("interface", "ports")]
    assert {f.status for f in found} == {"ok"}
    assert "--network-interfaces eth0" in found[0].found


@pytest.mark.parametrize(("offset", "status"), [(0.4, ""), (5.0, "warn"), (-7200.0, "warn"), (60.0, "fail")])
def test_a_clock_counts_beyond_what_the_round_trip_leaves_open(offset, status):
    report = make_report(INFO, INFO)
    report.answers["links"][0]["1"]["eth0"]["clock"] = offset
    report.answers["links"][1]["0"]["eth0"] = {"error": "no answer"}
    found = wrong(report)
    assert [one[2] for one in found if one[:2] == ("h2", "clock")] == ([status] if status else [])


def test_a_directory_that_is_not_shared_is_a_warning():
    answers = {"marker": ["/work/runs/.mark", None], "marker seen": [True, False]}
    assert wrong(make_report(INFO, INFO, answers=answers)) == [("h2", "run directory", "warn")]


def test_a_library_that_cannot_be_imported_is_a_warning_with_its_cause():
    error = "RuntimeError: operator torchvision::nms does not exist"
    good = changed(software__libraries={"torchvision": ["0.29.1", ""], "datasets": ["5.2.0", ""]})
    report = make_report(good)
    assert wrong(report) == []
    assert "torchvision 0.29.1, datasets 5.2.0" in [one.found for one in diagnose(report, "ssh").findings]
    bad = changed(software__libraries={"transformers": ["5.23.0", error], "datasets": ["5.2.0", ""]})
    report = make_report(good, bad)
    assert wrong(report) == [("h2", "optional libraries", "warn")]
    (finding,) = [one for one in diagnose(report, "ssh").findings if one.status == "warn"]
    assert finding.found == f"transformers 5.23.0 cannot be imported: {error}"
    assert "pip uninstall torchvision" in finding.remedy


def rates(*gflops, share=1.0):
    return {"compute": [{"gflops": rate, "core_share": share} for rate in gflops]}


def test_a_host_five_times_slower_is_named():
    found = diagnose(make_report(*[INFO] * 3, answers=rates(100, 20, 95)), "ssh").findings
    slow = next(f for f in found if f.check == "compute" and f.status == "warn")
    assert slow.host == "h2"
    assert slow.found.startswith("4.8 times slower")
    assert "Another load" in slow.remedy


def test_a_host_behind_a_slow_link_is_named():
    fast, slow = ({str(2**10): 1e-4, str(2**20): seconds} for seconds in (1e-3, 1e-1))
    answers = {"pair 0 1": [slow, None, None], "pair 0 2": [fast, None, None], "pair 1 2": [None, slow, None],
              "pair 0 3": [fast], "pair 2 3": [None, None, fast], "pair 1 3": [None, slow]}  # fmt: skip
    assert wrong(make_report(*[INFO] * 4, answers=answers)) == [("h2", "link", "warn")]


def test_a_host_that_does_not_respond_is_all_that_fails():
    problem = Finding("h2", "ssh", "fail", "it is down", "Start it.")
    report = make_report(INFO, INFO, INFO)
    silent = Report(
        (report.hosts[0], Host("h2", 1, None, problem), report.hosts[2]),
        report.agents,
        report.answers,
        "/work",
    )
    report.answers["links"][1] = None
    for a in (0, 2):
        del report.answers["links"][a]["1"]
    assert wrong(silent) == [("h2", "ssh", "fail")]
