"""What bench computes of its measurements, its options, and what it refuses."""

import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from hvdtrain.cli import cli
from hvdtrain.config import Config
from hvdtrain.errors import EnvironmentFault, UsageError
from hvdtrain.tools.bench import sweep
from hvdtrain.tools.bench.job import CpuTimes, busy_hosts, describe_job, doubtful_parts, notes_on
from hvdtrain.tools.bench.options import BenchOptions
from hvdtrain.tools.blocks import bench_config
from hvdtrain.tools.message_times import KIB, MIB, sizes_up_to
from hvdtrain.tools.spread import Block, Spread, split_of


def test_a_spread_is_the_median_and_the_range():
    found = Spread.of([3.0, 1.0, 2.0])
    assert (found.median, found.low, found.high) == (2.0, 1.0, 3.0)
    assert found.times(1e3).describe(0) == "2,000 (1,000 to 3,000)"


def test_the_parts_of_a_step_add_up_to_it():
    job = Block([[10.0, 12.0], [10.0, 12.0]], 2.0)
    alone = Block([[4.0, 6.0], [8.0, 2.0]], 0.5)
    found = split_of(job, alone)
    assert found["data"] == 2.0  # of the job
    assert found["compute"] == 5.0 - 0.5
    assert found["slowest"] == (8.0 + 6.0) / 2 - 5.0  # in each step another worker was the slowest
    assert sum(found.values()) == 11.0


def test_one_worker_waits_for_nobody():
    assert split_of(Block([[4.0, 6.0]], 1.0), None) == {
        "data": 1.0, "compute": 4.0, "slowest": 0.0, "communication": 0.0
    }  # fmt: skip


@pytest.mark.parametrize(
    ("most", "sizes"),
    [
        (4 * KIB, [4 * KIB]),
        (20 * KIB, [4 * KIB, 16 * KIB, 20 * KIB]),
        (128 * MIB, [4**k * 4 * KIB for k in range(8)] + [128 * MIB]),
    ],
)
def test_sizes_end_with_the_largest(most, sizes):
    assert list(sizes_up_to(most)) == sizes


def cpu(own: float, busy: float, stolen: float = 0.0, host: str = "h1") -> CpuTimes:
    return CpuTimes(host, 2, 10.0, busy, stolen, own)


@pytest.mark.parametrize(
    ("of_ranks", "said"),
    [
        ([cpu(10.0, 20.0), cpu(9.9, 20.0)], []),
        ([cpu(5.0, 20.0), cpu(5.0, 20.0)], ["h1 was busy: other processes used 1.0 of its 2 cores"]),
        ([cpu(10.0, 10.0, 5.0)], ["h1 is a virtual machine that did not get 0.5 of its 2 cores"]),
        ([cpu(10.0, 10.0), cpu(1.0, 20.0, host="h2")], ["h2 was busy: other processes used 1.9"]),
    ],
)
def test_a_busy_machine_is_said(of_ranks, said):
    found = busy_hosts(of_ranks)
    assert len(found) == len(said)
    assert all(text.startswith(start) for text, start in zip(found, said, strict=True))


def test_processes_that_have_ended_count():
    before = CpuTimes.now("here")
    subprocess.run([sys.executable, "-c", "sum(range(30_000_000))"], check=True)
    spent = CpuTimes.now("here").since(before)
    assert 0.1 < spent.own <= spent.busy + 1
    assert spent.host == "here"


def of(*three: float) -> dict:
    return Spread(*three).to_dict()


RESULT = {
    "task": "digits", "device": "PyTorch on the CPU", "workers": 2, "controller": "Gloo", "global_batch": 64,
    "threads": 0, "reduction": "fp32, sent uncompressed", "steps_timed": 50,
    "step_seconds": of(0.01, 0.009, 0.011), "mean_step_seconds": of(0.01, 0.01, 0.01),
    "samples_per_second": of(6400.0, 6000.0, 7000.0),
    "part_seconds": {"data": of(0.0, 0.0, 0.0), "communication": of(0.001, -0.001, 0.002)},
    "all_reduce": [{"bytes": 4096, "horovod_seconds": of(3e-4, 2e-4, 4e-4)}],
    "warnings": ["h1 was busy"], "notes": ["a note"],
}  # fmt: skip


@pytest.mark.parametrize(
    ("part", "said"),
    [
        (Spread(0.0111, 0.009, 0.012), "11.10 (9.00 to 12.00) ms, 111% of it; not trustworthy"),
        (Spread(-0.0035, -0.004, 0.001), "-35% of it; not above the noise; not trustworthy"),
        (Spread(0.01004, 0.01, 0.011), ""),
        (Spread(-0.00004, -0.001, 0.001), ""),
    ],
)
def test_a_part_that_cannot_be_is_not_trustworthy(part, said):
    text = describe_job({**RESULT, "part_seconds": {"compute": part.to_dict()}})
    assert said in text
    assert ("not trustworthy" in text) == bool(said)
    warnings = doubtful_parts({"compute": part}, 0.01)
    assert len(warnings) == bool(said)
    assert all(one.startswith("computing cannot be more than all of a step") for one in warnings)


def document(workers: int, speed: float, **others) -> dict:
    return {**RESULT, "workers": workers, "samples_per_second": of(speed, 0.9 * speed, speed), **others}


def test_efficiency_is_relative_to_the_smallest_number_of_workers():
    found = sweep.sweep_of([document(2, 100.0), document(4, 160.0)])
    rows = found["sweep"]
    assert [row["efficiency"]["median"] for row in rows] == [1.0, 0.8]
    assert rows[1]["efficiency"]["low"] == pytest.approx(0.72)
    assert "80% (72% to 80%)" in sweep.describe_sweep(found)


def test_a_sweep_needs_a_slot_for_each_worker(monkeypatch):
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0, 1})
    assert sweep.check_slots((1, 2), None) == "localhost:2"
    with pytest.raises(UsageError, match="3 workers need a slot each; this host has 2 cores") as error:
        sweep.check_slots((1, 3), None)
    assert "-H localhost:3" in error.value.remedy
    with pytest.raises(UsageError, match="this host has 2 cores") as error:
        sweep.check_slots((3,), None, may_share=False)
    assert "-H" not in error.value.remedy, "what cannot be given is no remedy"
    assert sweep.check_slots((3,), "localhost:3") == "localhost:3"
    with pytest.raises(UsageError, match="the hosts of -H have 3 slots"):
        sweep.check_slots((4,), "h1:2,h2:1")


def config(**values) -> Config:
    return Config(framework="torch", **values)


def test_a_measured_job_has_no_end_and_leaves_nothing():
    found = bench_config(config(epochs=2, run_dir="runs/a", lr_schedule="plateau", save_every=5))
    assert (found.epochs, found.run_dir, found.save_every, found.lr_schedule) == (
        None,
        None,
        None,
        "constant",
    )
    assert found.steps >= 10**9
    assert notes_on(config(resume="runs/a", lr_schedule="plateau"))[0].startswith("the measurement starts")


def invoke(*words: str):
    return CliRunner().invoke(cli, ["bench", *words])


@pytest.fixture
def handed_on(monkeypatch):
    """Gives the layers and options that a command line hands on, without measuring."""
    found: list = []
    monkeypatch.setattr(sweep, "run_bench", lambda layers, options: found.extend((layers, options)))

    def get(*words: str):
        result = invoke(*words)
        assert result.exit_code == 0, result.output
        return found

    return get


def test_options_of_the_job_and_of_bench_are_told_apart(handed_on):
    layers, options = handed_on(
        *("--framework", "torch", "--batch-size", "8", "--set", "seed=3", "--sweep", "2,1,2"),
        *("--no-split", "--json", "a.json", "--seconds", "3"),
    )
    assert layers[1].values == {"framework": "torch", "batch_size": 8}
    assert layers[0].values == {"seed": 3}
    assert options == BenchOptions(seconds=3.0, split=False, sweep=(1, 2), json_path=Path("a.json"))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"hosts": "h1:2"}, "-H is for --sweep"),
        ({"controller": "mpi"}, "--controller is for"),
    ],
)
def test_options_that_contradict_each_other_are_refused(options, said):
    with pytest.raises(UsageError, match=said):
        BenchOptions(**options).check()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"json_path": Path("/dev/null/a.json")}, "/dev/null/a.json cannot be written: Not a directory"),
        ({"json_path": Path("/tmp")}, "/tmp cannot be written: Is a directory"),
        ({"json_path": Path("/proc/self/a.json"), "sweep": (1, 2)}, "/proc/self/a.json cannot be written"),
    ],
)
def test_files_that_cannot_be_written_are_refused_early(options, said):
    with pytest.raises(UsageError, match=said):
        sweep.run_bench([], BenchOptions(**options))


def test_what_was_measured_is_shown_before_it_is_written(monkeypatch, capsys):
    monkeypatch.setattr(sweep, "bench_job", lambda *_: RESULT)
    monkeypatch.setattr(sweep, "check_writable", lambda *_, **__: None)
    with pytest.raises(EnvironmentFault, match="/dev/full cannot be written: No space left on device"):
        sweep.run_bench([], BenchOptions(json_path=Path("/dev/full")))
    assert "64 samples a step" in capsys.readouterr().out


def test_what_launches_workers_refuses_a_launcher(monkeypatch):
    monkeypatch.setenv("HOROVOD_RANK", "0")
    monkeypatch.setenv("HOROVOD_SIZE", "2")
    with pytest.raises(UsageError, match="launches workers itself, but a launcher has started this process"):
        sweep.run_bench([], BenchOptions(sweep=(1, 2)))
