"""Micro-batches of one global batch: which are tried, what is offered, and what does not fit."""

import json
import mmap
from unittest import mock

import pytest

from hvdtrain.config import Config, Layer
from hvdtrain.errors import ConfigError, EnvironmentFault
from hvdtrain.host.cores import is_out_of_memory, taken_bytes
from hvdtrain.tools.launch import layers_from_json
from hvdtrain.tools.search import batch_find
from hvdtrain.tools.search.batch_find import BatchSize, mark, sizes_to_try
from hvdtrain.tools.search.options import BatchOptions
from hvdtrain.training_plan import TrainingPlan


def config(**fields) -> Config:
    return Config(framework="torch", epochs=1, **fields)


@pytest.mark.parametrize(
    ("fields", "workers"),
    [
        ({"batch_size": 32}, 1),
        ({"batch_size": 24, "accumulate": 2}, 2),
        ({"global_batch_size": 100}, 3),
        ({"batch_size": 2520}, 1),
        ({"batch_size": 16, "base_batch_size": 8, "lr_scaling": "sqrt"}, 2),
    ],
    ids=str,
)
def test_each_size_has_the_global_batch_and_the_learning_rate_of_the_job(fields, workers):
    job = config(**fields)
    before = TrainingPlan.of(job, workers, 1000)
    sizes = sizes_to_try(job, workers)
    assert 1 < len(sizes) <= 9
    assert sizes == sorted(sizes, key=lambda size: size.micro_batch)
    for size in sizes:
        after = TrainingPlan.of(job.model_copy(update=dict(size.values)), workers, 1000)
        assert after.batch.global_batch == before.batch.global_batch
        assert after.batch.micro_batch == size.micro_batch
        assert after.learning_rate == before.learning_rate
        assert after.steps == before.steps
    assert BatchSize(before.batch.micro_batch, job.accumulate, job.global_batch_size) in sizes


def test_lack_of_memory_is_recognized_through_other_errors():
    outer = ConfigError("the model cannot be called")
    for error in (
        MemoryError(),
        RuntimeError("CUDA out of memory. Tried to allocate 2 GiB"),
        OSError(12, "Cannot allocate memory"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
        type("ResourceExhaustedError", (Exception,), {})("OOM when allocating tensor"),
    ):
        outer.__cause__ = error
        assert is_out_of_memory(error)
        assert is_out_of_memory(outer)
    assert not is_out_of_memory(ValueError("a wrong shape"))


def test_what_is_mapped_from_a_file_is_not_taken(tmp_path):
    size, before = 2**26, taken_bytes()
    (tmp_path / "tokens").write_bytes(bytes(size))
    with (tmp_path / "tokens").open("rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as mapped:
        assert mapped.find(b"x") == -1  # which reads all of it
        assert taken_bytes() < before + size / 2
    kept = bytearray(b"x") * size
    assert taken_bytes() > before + size / 2
    assert kept
    assert taken_bytes(2**22 + 1) == 0, "no process has this number"


class Jobs:
    """Stands for the jobs: those of more than ``most`` samples at once do not fit."""

    def __init__(self, monkeypatch, most: int, how: str = "marker", broken=()) -> None:
        self.most, self.how, self.broken = most, how, broken
        self.sizes: list[int] = []
        monkeypatch.setattr(batch_find, "run_module", self.run)
        monkeypatch.setattr("os.sched_getaffinity", lambda _: {0, 1})

    def run(self, name, launcher, module, *given):
        values, folder, _ = given
        folder.mkdir()
        layer = layers_from_json(values["layers"])[-1]
        assert layer.source == "batch-find"
        size = layer.values["batch_size"]
        self.sizes.append(size)
        if size in self.broken:
            raise EnvironmentFault("the job ended with exit code 2", "batch norm needs two samples")
        if size > self.most and self.how == "marker":
            mark(folder / batch_find.MARKER, "a worker took 3 of 2 MiB")
        if size > self.most:
            killed = "with exit code -9" if self.how == "killed" else "with exit code 1"
            raise EnvironmentFault(f"the job ended {killed}", "Traceback\nValueError: no")
        return {
            "device": "PyTorch on the CPU", "samples_per_second": 100.0 + size, "host_bytes": 2**20 * size,
            "device_bytes": None,
        }  # fmt: skip


LAYERS = [Layer("options", {"framework": "torch", "batch_size": 8, "accumulate": 4})]


def find(**options):
    return batch_find.find_sizes(LAYERS, BatchOptions(num_proc=2, memory=2**30, **options))


def test_the_largest_and_the_fastest_are_found(monkeypatch):
    jobs = Jobs(monkeypatch, most=32)
    found = find()
    assert jobs.sizes == [8, 1, 2, 4, 16, 32]  # the job as it is comes first
    assert found.largest.size == found.fastest.size == BatchSize(32, 1)
    assert "fastest:            --batch-size 32 --accumulate 1" in found.describe()


@pytest.mark.parametrize("how", ["marker", "killed"])
def test_what_does_not_fit_ends_nothing(monkeypatch, how):
    jobs = Jobs(monkeypatch, most=8, how=how)
    found = find()
    assert jobs.sizes == [8, 1, 2, 4, 16]  # 32 is larger than one that does not fit
    assert found.to_document()["largest"] == {"batch_size": 8, "accumulate": 4}
    first, second = (one.problem for one in found.tried if one.problem)
    assert (first[:12], second) == ("does not fit", "not tried: a smaller one does not fit")


def test_a_size_that_fails_for_another_reason_ends_nothing(monkeypatch):
    jobs = Jobs(monkeypatch, most=32, broken=[1, 16])
    found = find()
    assert jobs.sizes == [8, 1, 2, 4, 16, 32]
    assert found.largest.size == BatchSize(32, 1)
    problems = [one.problem for one in found.tried if one.problem]
    assert problems == 2 * ["failed: the job ended with exit code 2. batch norm needs two samples"]
    Jobs(monkeypatch, most=2, broken=[1])
    assert find().largest.size == BatchSize(2, 16), "the job as it is does not fit"
    Jobs(monkeypatch, most=0, how="error")
    with pytest.raises(EnvironmentFault, match="exit code 1"):
        find()
    layers = [*LAYERS, Layer("--set", {"sync_every": 4})]
    with pytest.raises(ConfigError, match="sync_every 4 cannot be used by batch-find"):
        batch_find.find_sizes(layers, BatchOptions(num_proc=2))


def test_lack_of_memory_without_words_is_told(monkeypatch, tmp_path):
    def opened(*_):
        raise MemoryError

    monkeypatch.setattr(batch_find, "opened_run", opened)
    monkeypatch.setattr(batch_find, "MemoryWatch", mock.Mock())
    with pytest.raises(MemoryError):
        batch_find.work({"found": str(tmp_path / "found"), "limit": 2**50, "layers": [], "seconds": 1})
    marker = tmp_path / batch_find.MARKER
    assert json.loads(marker.read_text()) == "memory did not suffice: MemoryError"
