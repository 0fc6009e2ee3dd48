"""Searches for micro-batches and learning rates: which are tried, what is offered, what does not fit."""

import json
import math
import mmap
import random
from types import SimpleNamespace
from unittest import mock

import pytest

from hvdtrain.config import Config, Layer
from hvdtrain.errors import ConfigError, EnvironmentFault, TrainingError, UsageError
from hvdtrain.host.cores import is_out_of_memory, taken_bytes
from hvdtrain.tools.launch import layers_from_json
from hvdtrain.tools.search import batch_find, lr_find
from hvdtrain.tools.search.batch_find import BatchSize, mark, sizes_to_try
from hvdtrain.tools.search.lr_find import (
    BatchScale,
    Curve,
    LearningRates,
    Rise,
    batch_scale,
    rising_config,
)
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


RISE = Rise(1e-5, 10.0, 121)


def curve_of(loss, rise=RISE) -> Curve:
    curve = Curve()
    for step in range(rise.steps):
        curve.add(rise.rate(step), loss(rise.rate(step)))
    return curve


def typical(rate: float) -> float:
    """A loss that falls fastest at 0.01, and diverges beyond 1."""
    return 2.3 - 2.0 / (1 + (0.01 / rate) ** 2) + (0.0 if rate < 1 else 5.0 * math.log(rate) + 2.5)


def test_the_steepest_descent_and_where_a_loss_explodes_are_found():
    curve = curve_of(typical)
    assert curve.steepest == pytest.approx(0.01, rel=0.25)
    assert 0.7 < curve.diverged < min(2.0, curve.stopped), "it is dated back"
    assert len(curve.losses) < RISE.steps
    curve = curve_of(lambda rate: 1 / (1 + rate) if rate < 0.1 else math.nan)
    assert curve.diverged == pytest.approx(0.1, rel=0.15)
    assert all(map(math.isfinite, curve.losses))
    curve = curve_of(lambda r: typical(min(r, 0.9)) + 3 * math.exp(-((math.log10(r / 0.5) / 0.1) ** 2)))
    assert curve.steepest < 0.1, "a fall after a rise does not count"


def test_a_loss_that_does_not_fall_suggests_nothing_and_negative_ones_do_not_diverge_by_falling():
    found = found_of(curve_of(lambda rate: 2.3 + rate / 100))
    assert found.suggestions == []
    assert "no suggestion" in found.describe()
    curve = curve_of(lambda rate: -2.7 - 2.0 / (1 + (0.01 / rate) ** 2))
    assert curve.stopped is None
    assert curve.steepest == pytest.approx(0.01, rel=0.25)


@pytest.mark.parametrize("plateau", [4.6, 8.6])
def test_a_divergence_that_ends_on_a_plateau_is_one(plateau):
    def loss(rate: float) -> float:
        return 4.2 - 1.6 / (1 + (0.01 / rate) ** 2) + (plateau - 2.6) / (1 + (1.0 / rate) ** 6)

    curve = curve_of(loss)
    assert curve.stopped is None
    assert 0.5 < curve.diverged < 3
    assert len(found_of(curve).suggestions) == 2


def test_noise_suggests_nothing_and_a_fall_within_it_is_found():
    for seed in range(20):
        noise = random.Random(seed)
        curve = curve_of(lambda _, noise=noise: 5.0 + noise.gauss(0, 1))
        assert (curve.steepest, curve.diverged) == (None, None)
    noise = random.Random(1)
    noisy = curve_of(lambda rate: typical(rate) + noise.gauss(0, 0.3))
    assert noisy.steepest == pytest.approx(0.01, rel=0.7)
    assert noisy.diverged is not None


def found_of(curve: Curve, factor: float = 1.0) -> LearningRates:
    scale = BatchScale(2, 64, 32, "linear", factor)
    return LearningRates(
        "digits", "PyTorch on the CPU", scale, curve.rates, curve.losses, curve.diverged, curve.steepest, 10.0
    )


def test_what_is_typed_gives_the_peak_that_is_named():
    once, twice = found_of(curve_of(typical)), found_of(curve_of(typical), factor=2.0)
    for one, other in zip(once.suggestions, twice.suggestions, strict=True):
        assert other.peak == other.learning_rate * 2.0
        assert other.peak == pytest.approx(one.peak, rel=0.01)
    assert len(twice.suggestions) == 2
    assert "the peak is 2 times --learning-rate" in twice.describe()
    assert f"--learning-rate {twice.suggestion:g}" in twice.describe()
    assert [one["loss"] for one in twice.to_document()["curve"]] == twice.losses


def test_rates_out_of_range_are_refused():
    for values in ((0.0, 1.0, 100), (1.0, 0.1, 100), (1e-5, math.inf, 100), (1e-5, 1.0, 5)):
        with pytest.raises(UsageError, match="must be"):
            Rise(*values)


@pytest.mark.parametrize(("compression", "warmup"), [("none", 0.0), ("powersgd:4", 1.0)])
def test_the_suggestion_is_quoted_as_the_job_scales_it_whatever_the_compression(compression, warmup):
    job = Config(
        framework="torch", epochs=9, learning_rate=0.1, compression=compression, warmup_epochs=warmup,
        batch_size=16, base_batch_size=16, lr_scaling="linear",
    )  # fmt: skip
    plan = TrainingPlan.of(rising_config(job, RISE), 2, 1000)
    assert batch_scale(job, plan, 2).peak_by_learning_rate == pytest.approx(2.0)
    assert plan.learning_rate.peak == TrainingPlan.of(job, 2, 1000).learning_rate.peak


@pytest.mark.parametrize(
    ("workers", "everywhere", "state"), [(1, False, 1), (2, True, 1), (2, False, 2)], ids=str
)
def test_a_search_that_fails_on_all_workers_gives_the_weights_back(workers, everywhere, state):
    backend = SimpleNamespace(
        workers=SimpleNamespace(size=workers),
        gather_state=lambda spool=None: SimpleNamespace(read=lambda: 1),
        scatter_state=lambda given: setattr(backend, "state", given),
    )

    def fail() -> None:
        backend.state = 2
        raise TrainingError("no", everywhere=everywhere)

    with pytest.raises(TrainingError), lr_find._state_kept(backend):
        fail()
    assert backend.state == state
