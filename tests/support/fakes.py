"""Fakes that need no framework and no launcher: workers as threads, a backend without tensors."""

import threading
import zlib
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import fields, replace
from types import MappingProxyType, SimpleNamespace
from typing import Any

import numpy as np

from hvdtrain.backends.objective.stateful_metrics import Samples
from hvdtrain.backends.records import BackendInfo, DeviceMemory, DryRun, ModelInfo, StatePart
from hvdtrain.backends.replica_state import ReplicaState
from hvdtrain.backends.step_metrics import NO_SIGNALS, ControlFlags, StepMetrics, findings
from hvdtrain.callbacks import RunContext
from hvdtrain.config import Config
from hvdtrain.data.datasets import ArrayDataset
from hvdtrain.data.feed import HostBatch
from hvdtrain.data.training_data import TrainingData
from hvdtrain.errors import TaskError
from hvdtrain.host.launcher import open_console
from hvdtrain.jobs.entering import hooks_of
from hvdtrain.jobs.opening.setup import TaskData, TrainingRun
from hvdtrain.jobs.opening.start import JobSpec
from hvdtrain.jobs.run_directory.folder import open_run
from hvdtrain.jobs.run_directory.lock import RunLock
from hvdtrain.loop import run
from hvdtrain.reporting.report import Report, report_of_others
from hvdtrain.reporting.run_report import RunReport
from hvdtrain.session import RunState, Services, Session
from hvdtrain.workers.agreement import Workers, run_on_rank_zero
from hvdtrain.workers.wire import decode, encode

_ANSWER_SECONDS = 20


class FakeWorkers(Workers):
    """One of several workers that are threads of this process.

    Objects travel encoded, as they do between real workers.
    """

    def __init__(
        self, rank: int, hosts: Sequence[str], barrier: threading.Barrier, slots: list[bytes]
    ) -> None:
        host, hosts = hosts[rank], list(hosts)
        super().__init__(host, hosts[:rank].count(host), hosts.count(host))
        self.rank, self.size, self.least, self.most = rank, *3 * [len(hosts)]
        self.controller = self.coordination = "MPI"
        self.sent: list[bytes] = []
        self._barrier, self._slots = barrier, slots

    def allgather_object(self, value: Any) -> list[Any]:
        self._slots[self.rank] = encode(value)
        self.sent.append(self._slots[self.rank])
        self._barrier.wait(_ANSWER_SECONDS)
        gathered = [decode(slot) for slot in self._slots]
        self._barrier.wait(_ANSWER_SECONDS)
        return gathered

    def broadcast_object(self, value: Any, root: int = 0) -> Any:
        return self.allgather_object(value if self.rank == root else None)[root]

    def have_failed(self) -> bool:
        self.barrier()
        return True


def on_every_rank(hosts: Sequence[str], work: Callable[[FakeWorkers], Any]) -> list[Any]:
    """Run ``work(workers)`` on one thread per host named; return what each returned or raised, by rank."""
    barrier, slots = threading.Barrier(len(hosts)), [b""] * len(hosts)
    outcomes: list[Any] = [None] * len(hosts)

    def run(rank: int) -> None:
        try:
            outcomes[rank] = work(FakeWorkers(rank, hosts, barrier, slots))
        except Exception as error:
            outcomes[rank] = error

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(len(hosts))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return outcomes


def one_worker() -> FakeWorkers:
    return FakeWorkers(0, ["here"], threading.Barrier(1), [b""])


class DeviceBatch(HostBatch):
    """A batch that is on the device where it was on the host."""

    @classmethod
    def of(cls, batch: HostBatch) -> "DeviceBatch":
        return cls(*(getattr(batch, one.name) for one in fields(batch)))

    @property
    def samples(self) -> Samples:
        return Samples(self.indices, self.weights, self.range_samples)


class StubBackend:
    """What no backend of tests has: a device, recorders, averaged weights, parts that train for a time."""

    model: Any = None

    def __init__(self, workers) -> None:
        self.workers = workers
        self.replica_state = ReplicaState(None, workers, None, list)

    def to_device(self, batches):
        return map(DeviceBatch.of, batches)

    def find_comparing(self, batch, training) -> str:
        return ""

    def recorder(self):
        raise NotImplementedError("a profile")

    def device_memory(self) -> DeviceMemory | None:
        return None

    def restart_clock(self) -> None:
        pass

    def ema_weights(self):
        return nullcontext()

    def sync_statistics(self) -> list[str]:
        return []

    def trained_change(self):
        return (), (), ()

    def trained_state(self) -> None:
        return None

    def close(self) -> None:
        pass


class FakeBackend(StubBackend):
    """A backend whose loss is the step's number, or as given; it logs its calls and holds arrays.

    What workers signal is summed over all of them. ``unused_at`` are steps in which this one has an unused
    parameter; ``eval_losses`` come in order, in place of the mean target.
    """

    info = BackendInfo("Fake 1.0 on the desk", {"Fake": "1.0"})

    def __init__(self, workers, parameters=None, *, losses=None, unused_at=(), eval_losses=()) -> None:
        super().__init__(workers)
        self.state = dict(parameters or {"model/a/kernel": np.zeros((2, 3), np.float32)})
        self.calls: list[str] = []
        self.rates: list[float] = []
        self.clocks: list[int] = []  # how many calls came before each start of the clock
        self._losses, self._unused_at = losses or {}, unused_at
        self._eval_losses = list(eval_losses)
        self._number = 0

    def build(self, task, config) -> ModelInfo:
        return self.model_info()

    def model_info(self) -> ModelInfo:
        shapes = {n: a.shape for n, a in self.state.items() if n.startswith("model/")}
        return ModelInfo(shapes, 0, "fp32, sent uncompressed")

    def dry_run(self, batch, training):
        return DryRun(None, {})

    def train_step(self, batch, learning_rate, signals=NO_SIGNALS):
        vector = [*self._train(batch, learning_rate, batch.total_weight), *self._summed(signals)]
        return self._trained(vector, batch.total_weight)

    def _train(self, batch, learning_rate, weight) -> list[float]:
        """Count a step; return its sum of losses and what it finds."""
        self._number = number = batch.step + 1
        self.calls.append(f"train {number}")
        self.rates.append(learning_rate)
        return [self._losses.get(number, float(number)) * weight, *findings(number in self._unused_at)]

    def _trained(self, vector, weight):
        names = ("model/branch/kernel",) if self.workers.rank else ()
        return self._pending("train", StepMetrics.from_vector(["loss"], vector, weight, names))

    def restart_clock(self) -> None:
        self.clocks.append(len(self.calls))

    def eval_step(self, batch, partial=None):
        total, weight = partial or (0.0, 0.0)
        return total + float((batch.arrays["targets"] * batch.weights).sum()), weight + batch.total_weight

    def eval_metrics(self, partial, signals=NO_SIGNALS):
        total, weight = partial
        metrics = StepMetrics.from_vector(["loss"], [total, *findings(), *self._summed(signals)], weight)
        if self._eval_losses:
            metrics = StepMetrics({"loss": self._eval_losses.pop(0)}, 1.0)
        return self._pending("eval", metrics)

    def _pending(self, phase, metrics):
        number = self._number

        def read() -> StepMetrics:
            self.calls.append(f"read {phase} {number}")
            return metrics

        return SimpleNamespace(read=read)

    def _summed(self, signals) -> tuple[float, ...]:
        gathered = self.workers.allgather_object(tuple(signals))
        return tuple(sum(numbers) for numbers in zip(*gathered, strict=True))

    def sync_statistics(self) -> list[str]:
        self.calls.append("average")
        return []

    def parameter_checksums(self) -> list[tuple[str, int]]:
        self.calls.append("compare")
        return [(name, zlib.crc32(array.tobytes())) for name, array in self.state.items()]

    def gather_state(self, spool=None):
        self.calls.append("gather")
        self.workers.barrier()  # collective, as it may be in a real backend
        state = self.local_state()
        return SimpleNamespace(read=lambda: state) if self.workers.rank == 0 else None

    def local_state(self) -> dict[str, np.ndarray]:
        return {name: array.copy() for name, array in self.state.items()}

    @property
    def weight_shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: array.shape for name, array in self.state.items() if name.startswith("model/")}

    def scatter_state(self, state, part=StatePart.ALL) -> None:
        is_kept = {
            StatePart.ALL: lambda name: False,
            StatePart.WEIGHTS: lambda name: not name.startswith("model/"),
            StatePart.SOME_WEIGHTS: lambda name: True,
        }[part]
        own = {name: array for name, array in self.state.items() if is_kept(name)}
        run_on_rank_zero(self.workers, lambda: self._load({**own, **state}))
        self.broadcast_state(0)

    def _load(self, state) -> None:
        shapes = [{name: array.shape for name, array in one.items()} for one in (self.state, state)]
        if shapes[0] != shapes[1]:
            raise TaskError("the state does not fit the model: misshapen")
        self.state = {name: state[name].copy() for name in self.state}

    def broadcast_state(self, root) -> None:
        self.state = self.workers.broadcast_object(self.state, root)


class FakeLocalBackend(FakeBackend):
    """One whose steps are local: their sums and signals travel when the workers synchronise."""

    def __init__(self, *args, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        self._window: list[tuple[float, ...]] = []

    def train_step(self, batch, learning_rate, signals=NO_SIGNALS):
        own = float(batch.weights.sum())
        vector = (*self._train(batch, learning_rate, own), *signals)
        self._window.append((batch.total_weight, *vector))
        return self._pending("own", StepMetrics.from_vector(["loss"], vector, own))

    def synchronize(self):
        self.calls.append(f"synchronize {self._number}")
        weight, *sums = (sum(numbers) for numbers in zip(*self._window, strict=True))
        self._window.clear()
        return self._trained(self._summed(sums), weight)


class FakeReport(Report):
    """A report that remembers what it got."""

    def __init__(self) -> None:
        super().__init__()
        self.steps: list[int] = []
        self.windows: list[tuple[int, dict]] = []
        self.busy: list[dict] = []
        self.evaluations: list[tuple[int, dict]] = []
        self.notes: list[str] = []
        self.checkpoints: list[tuple[int, Any]] = []

    def on_step(self, step, metrics) -> None:
        self.steps.append(step.step)

    def on_window(self, step, means, samples_per_second, more=MappingProxyType({})) -> None:
        self.windows.append((step.step, dict(means)))
        self.busy.append({name: more[name] for name in ("slowest_rank", "wait_fraction") if name in more})

    def on_evaluation(self, step, means, samples_per_second, more=MappingProxyType({})) -> None:
        self.evaluations.append((step.step, dict(means)))

    def on_checkpoint(self, step, path) -> None:
        self.checkpoints.append((step, path))

    def note(self, text) -> None:
        self.notes.append(text)


class FakeSaver:
    """A saver that remembers the manifests that rank 0 was given."""

    def __init__(self, failed: bool = False) -> None:
        self.newest = None
        self.failures: list[str] = []
        self.manifests: list[Any] = []
        self.failed = failed

    @property
    def steps(self) -> list[int]:
        return [manifest.step for manifest in self.manifests]

    def save(self, backend, manifest) -> None:
        if backend.gather_state() is not None:
            self.manifests.append(manifest)
            backend.calls.append(f"save {manifest.step}")

    def poll(self) -> bool:
        return self.failed

    def finish(self, timeout_seconds=None) -> None:
        pass


def dataset(size: int) -> ArrayDataset:
    """Return ``size`` samples whose inputs tell their index."""
    return ArrayDataset({"inputs": np.arange(size, dtype=np.float32)[:, None], "targets": np.arange(size)})


def make_session(run_dir, workers=None, train_size=100, eval_size=0, **fields: Any) -> Session:
    """Return a session over fakes: real config, real data, no framework and no report."""
    parameters = {"model/a/kernel": np.ones((3, 4), np.float32), "model/a/bias": np.zeros(4, np.float32)}
    backend, fields = FakeBackend(workers or one_worker(), parameters), {"epochs": 1, **fields}
    return _session(backend, Services(SimpleNamespace(), run_dir), train_size, eval_size, fields)


def _session(backend, services, train_size, eval_size, fields) -> Session:
    config = Config(**{"framework": "torch", **fields})
    evaluation = dataset(eval_size) if eval_size else None
    data = TrainingData(config, backend.workers, dataset(train_size), evaluation)
    return Session(config, backend, data, services)


def given_run(config, backend, data_size: int = 100) -> TrainingRun:
    """Return a run with data of a size, before it is found where it starts from."""
    data = TaskData(None, range(data_size), None, {})
    return TrainingRun(JobSpec(config, None, "", {}), backend, data, None)


def open_directory(config, workers, resumed_step=None, callbacks=(), *, context=None, lock=None):
    """Open a run directory as a job does; return this rank's report and the directory."""
    context, lock = context or RunContext(workers.rank, workers.size, config), lock or RunLock()

    def make_report(path):
        given = replace(context, run_dir=path)
        return RunReport(open_console(), given, resumed_step, callbacks, lost_lock=lock.lost)

    path, report = open_run(
        config, workers, resumed_step, lock=lock, provenance=None, make_report=make_report
    )
    return report or report_of_others(replace(context, run_dir=path), callbacks), path


def make_loop_session(tmp_path, backend=None, eval_size=0, train_size=10, **fields) -> Session:
    """Return a session of two epochs of 10 samples, in steps of 4 for each worker."""
    backend, fields = (
        backend or FakeBackend(one_worker()),
        {"epochs": 2, "batch_size": 4, "log_every": 1, **fields},
    )
    session = _session(backend, Services(FakeReport(), tmp_path, FakeSaver()), train_size, eval_size, fields)
    session.state = RunState.from_manifest(None, session.config)
    session.services.hooks = hooks_of(session)
    return session


def trained(tmp_path, backend=None, eval_size=0, **fields) -> tuple[FakeBackend, FakeReport, Session]:
    """Train 10 samples an epoch in steps of 4."""
    session = make_loop_session(tmp_path, backend, eval_size, **fields)
    run(session)
    return session.backend, session.services.report, session


def asks(at: dict[int, ControlFlags], backend: FakeBackend):
    """Return what a worker asks for: ``at[k]`` on its k-th step."""
    return lambda: at.get(1 + sum(call.startswith("train") for call in backend.calls), ControlFlags())
