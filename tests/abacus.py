"""The loop without a framework: a backend whose loss is the step's number, and a report that remembers."""

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import numpy as np
from fakes import dataset, one_worker

from hvdtrain.backends.base import NO_REQUESTS, Requests, Totals
from hvdtrain.config import Config
from hvdtrain.loop import run
from hvdtrain.report import SilentReport
from hvdtrain.session import Session


class Recorder(SilentReport):
    """A report that remembers what it was told."""

    def __init__(self) -> None:
        super().__init__()
        self.steps: list[int] = []
        self.windows: list[tuple[int, dict]] = []
        self.evaluations: list[tuple[int, dict]] = []
        self.notes: list[str] = []
        self.started: tuple[int, int, float] | None = None

    def start(self, steps, done, seconds_before=0.0) -> None:
        super().start(steps, done, seconds_before)
        self.started = steps, done, seconds_before

    def stepped(self, mark, totals) -> None:
        self.steps.append(mark.step)

    def trained(self, mark, means, samples_per_second, data_wait_fraction) -> None:
        self.windows.append((mark.step, dict(means)))

    def evaluated(self, mark, means, samples_per_second) -> None:
        self.evaluations.append((mark.step, dict(means)))

    def note(self, text) -> None:
        self.notes.append(text)


class Abacus:
    """A backend whose loss is the step's number; it logs its calls.

    What workers request is joined over all of them, as the vector that real backends reduce does.
    """

    def __init__(self, workers, losses=None, missing_at=(), eval_losses=()) -> None:
        self.workers = workers
        self.calls: list[str] = []
        self.rates: list[float] = []
        self._losses, self._missing_at = losses or {}, missing_at
        self._eval_losses = list(eval_losses)
        self._sums, self._weight, self._missing = 0.0, 0.0, 0
        self._requests = NO_REQUESTS
        self._number = 0

    def versions(self) -> dict[str, str]:
        return {"Abacus": "1.0"}

    def to_device(self, batches):
        return iter(batches)

    def train_step(self, batch, learning_rate, requests=NO_REQUESTS) -> None:
        self._number = number = batch.step + 1
        self.calls.append(f"train {number}")
        self.rates.append(learning_rate)
        self._sums = self._losses.get(number, float(number)) * batch.total_weight
        self._weight = batch.total_weight
        self._missing = int(number in self._missing_at)
        self._requests = requests

    def eval_step(self, batch) -> None:
        self._sums += float((batch.arrays["targets"] * batch.weights).sum())
        self._weight += batch.total_weight

    def batch_norm_layers(self) -> int:
        return 0

    def averaged_weights(self):
        return nullcontext()

    def take_metrics(self, phase, requests=NO_REQUESTS):
        self._requests = self._requests if requests is NO_REQUESTS else requests
        vector = [self._sums, self._missing, *self._summed_requests()]
        totals = Totals.from_vector(["loss"], vector, self._weight)
        if phase == "eval" and self._eval_losses:
            totals = Totals({"loss": self._eval_losses.pop(0)}, 1.0)
        self._sums, self._weight, self._missing = 0.0, 0.0, 0
        self._requests = NO_REQUESTS
        number = self._number

        def read() -> Totals:
            self.calls.append(f"read {phase} {number}")
            return totals

        return SimpleNamespace(read=read)

    def _summed_requests(self) -> tuple[float, ...]:
        gathered = self.workers.allgather_object(self._requests.as_numbers())
        return tuple(sum(numbers) for numbers in zip(*gathered, strict=True))

    def snapshot(self):
        self.calls.append("snapshot")
        state = {"model/a/kernel": np.full((2, 3), len(self.calls), np.float32)}
        return SimpleNamespace(read=lambda: state)

    def parameters(self):
        self.calls.append("compare")
        return iter([])

    def average_statistics(self) -> None:
        self.calls.append("average")

    def missing_gradient_names(self) -> list[str]:
        return ["model/branch/kernel"] if self.workers.rank else []


class Ledger:
    """A saver that remembers the records it was given."""

    def __init__(self, failed: bool = False) -> None:
        self.newest = None
        self.failures: list[str] = []
        self.records: list[Any] = []
        self.failed = failed

    @property
    def steps(self) -> list[int]:
        return [record.step for record in self.records]

    def save(self, backend, record) -> None:
        self.records.append(record)
        backend.calls.append(f"save {record.step}")

    def poll(self) -> bool:
        return self.failed

    def finish(self, timeout_seconds=None) -> None:
        pass


def make_loop_session(tmp_path, backend=None, eval_size=0, train_size=10, **fields) -> Session:
    """Give a session of two epochs of 10 samples, in steps of 4 for each worker."""
    config = Config(**{"framework": "torch", "epochs": 2, "batch_size": 4, "log_every": 1, **fields})
    evaluation = dataset(eval_size) if eval_size else None
    backend = backend or Abacus(one_worker())
    return Session(config, backend, dataset(train_size), evaluation, Recorder(), tmp_path, saver=Ledger())


def trained(tmp_path, backend=None, eval_size=0, **fields) -> tuple[Abacus, Recorder, Session]:
    """Train 10 samples an epoch in steps of 4."""
    session = make_loop_session(tmp_path, backend, eval_size, **fields)
    run(session)
    return session.backend, session.report, session


def asks(at: dict[int, Requests], backend: Abacus):
    """Give what a worker asks for: ``at[k]`` on its k-th step."""
    return lambda: at.get(1 + sum(call.startswith("train") for call in backend.calls), NO_REQUESTS)
