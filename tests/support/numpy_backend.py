"""A reference backend in numpy, for one worker: the seam as a whole, so that jobs run in a second.

It trains a network of one hidden layer by SGD with momentum; ``install`` makes it ``--framework numpy``.
"""

import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from hvdtrain.backends.base import PendingState
from hvdtrain.backends.portable.initial_values import initial_value
from hvdtrain.backends.records import BackendInfo, DryRun, ModelInfo, PortableState, StatePart
from hvdtrain.backends.step_metrics import NO_SIGNALS, PendingVector, StepMetrics, findings
from hvdtrain.config import Config
from hvdtrain.data.feed import HostBatch
from hvdtrain.errors import TaskError
from hvdtrain.host.frameworks import FRAMEWORKS, Framework
from hvdtrain.tasks.digits import Digits
from support.fakes import StubBackend, one_worker

NAMES = ("loss", "accuracy")


@dataclass
class Mlp:
    """The model that ``numpy_model`` gives: sizes, and the weights by portable name."""

    inputs: int
    hidden: int
    outputs: int

    def __post_init__(self) -> None:
        shapes = {
            "model/hidden/kernel": (self.inputs, self.hidden),
            "model/hidden/bias": (self.hidden,),
            "model/output/kernel": (self.hidden, self.outputs),
            "model/output/bias": (self.outputs,),
        }
        self.weights = {name: np.zeros(shape, np.float32) for name, shape in shapes.items()}

    def forward(self, x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        w1, b1, w2, b2 = self.weights.values()
        hidden = np.tanh(x @ w1 + b1)
        return hidden, hidden @ w2 + b2


def start(config: Config, membership: Any = None) -> "NumpyBackend":
    """Return the backend; one worker needs no Horovod."""
    return NumpyBackend(one_worker())


class NumpyBackend(StubBackend):
    """The numpy backend of the only worker."""

    info = BackendInfo(f"numpy {np.__version__} on the CPU", {"numpy": np.__version__})

    def build(self, task: Any, config: Config) -> ModelInfo:
        self.model = task.numpy_model()
        if not isinstance(self.model, Mlp):
            raise TaskError("numpy_model() must give an Mlp")
        self._weights = self.model.weights
        self._momentum = config.momentum
        self._velocity = {name: np.zeros_like(weight) for name, weight in self._weights.items()}
        for name, weight in self._weights.items():
            weight[...] = initial_value(name, weight.shape, config.seed)
        shapes = {name: weight.shape for name, weight in self._weights.items()}
        self.weight_shapes = shapes
        return ModelInfo(shapes, batch_norm_layers=0, reduction="fp32, one worker")

    def train_step(
        self, batch: HostBatch, learning_rate: float, signals: Sequence[float] = NO_SIGNALS
    ) -> PendingVector:
        gradients = {name: np.zeros_like(weight) for name, weight in self._weights.items()}
        sums = np.zeros(len(NAMES))
        for x, targets, weights in _micro_batches(batch):
            hidden, logits = self.model.forward(x)
            sums += _sums(logits, targets, weights)
            d_logits = _softmax(logits)
            d_logits[np.arange(len(x)), targets] -= 1
            d_logits *= (weights / batch.total_weight)[:, None]
            d_hidden = d_logits @ self._weights["model/output/kernel"].T * (1 - hidden**2)
            parts = (x.T @ d_hidden, d_hidden.sum(0), hidden.T @ d_logits, d_logits.sum(0))
            for gradient, part in zip(gradients.values(), parts, strict=True):
                np.add(gradient, part, out=gradient)
        vector = [*sums, *findings(), *signals]
        *reduced, vector = self._summed([*gradients.values(), np.asarray(vector, np.float64)])
        for (name, weight), gradient in zip(self._weights.items(), reduced, strict=True):
            self._velocity[name] = self._momentum * self._velocity[name] + gradient
            np.subtract(weight, np.float32(learning_rate) * self._velocity[name], out=weight)
        return _pending(vector.tolist(), batch.total_weight)

    def eval_step(self, batch: HostBatch, partial: Any = None) -> Any:
        sums, weight = partial or (np.zeros(len(NAMES)), 0.0)
        for x, targets, weights in _micro_batches(batch):
            sums = sums + _sums(self.model.forward(x)[1], targets, weights)
        return sums, weight + batch.total_weight

    def eval_metrics(self, partial: Any, signals: Sequence[float] = NO_SIGNALS) -> PendingVector:
        sums, weight = partial
        (vector,) = self._summed([np.asarray([*sums, *findings(), *signals], np.float64)])
        return _pending(vector.tolist(), weight)

    def _summed(self, arrays: list[np.ndarray]) -> list[np.ndarray]:
        """Return the sums of arrays over workers: of the only one, the arrays."""
        return arrays

    def parameter_checksums(self) -> list[tuple[str, int]]:
        return [(name, zlib.crc32(weight.tobytes())) for name, weight in self._weights.items()]

    def gather_state(self, spool: Path | None = None) -> PendingState | None:
        state = self._state()
        return SimpleNamespace(read=lambda: state)

    def scatter_state(self, state: PortableState | None, part: StatePart = StatePart.ALL) -> None:
        assert state is not None  # this is rank 0
        self._load(state if part is StatePart.ALL else {**self._state(), **state})

    def broadcast_state(self, root: int) -> None:
        pass

    def _state(self) -> PortableState:
        slots = {name.replace("model/", "optimizer/momentum/"): v for name, v in self._velocity.items()}
        return {name: array.copy() for name, array in {**self._weights, **slots}.items()}

    def _load(self, state: PortableState) -> None:
        own = self._state()
        if {n: a.shape for n, a in own.items()} != {n: a.shape for n, a in state.items()}:
            raise TaskError("the state does not fit the model")
        for name, weight in self._weights.items():
            weight[...] = state[name]
            self._velocity[name] = state[name.replace("model/", "optimizer/momentum/")].copy()

    def dry_run(self, batch: HostBatch, training: bool) -> DryRun:
        outputs = None
        try:
            x, targets, _ = next(_micro_batches(batch))
            outputs = self.model.forward(x)[1]
            return DryRun(outputs, _values(outputs, targets))
        except Exception as error:
            return DryRun(outputs, {}, error=error)


def _micro_batches(batch: HostBatch) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    for x, targets, weights in zip(
        batch.arrays["inputs"], batch.arrays["targets"], batch.weights, strict=True
    ):
        yield x.reshape(len(x), -1), targets, weights


def _softmax(logits: np.ndarray) -> np.ndarray:
    shifted = np.exp(logits - logits.max(1, keepdims=True))
    return shifted / shifted.sum(1, keepdims=True)


def _sums(logits: np.ndarray, targets: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """Return the weighted sums of ``NAMES``."""
    return np.asarray([values @ weights for values in _values(logits, targets).values()])


def _values(logits: np.ndarray, targets: np.ndarray) -> dict[str, np.ndarray]:
    losses = -np.log(_softmax(logits)[np.arange(len(targets)), targets])
    return dict(zip(NAMES, (losses, logits.argmax(1) == targets), strict=True))


def _pending(vector: Sequence[float], weight: float) -> PendingVector:
    return SimpleNamespace(read=lambda: StepMetrics.from_vector(NAMES, vector, weight))


class NumpyDigits(Digits):
    """Handwritten digits, with a model for this backend."""

    def numpy_model(self) -> Mlp:
        return Mlp(inputs=64, hidden=48, outputs=10)


def install(monkeypatch, module: str = __name__) -> None:
    """Add a backend to the table of frameworks, as ``--framework numpy``; ``module`` starts it."""
    monkeypatch.setattr(f"{__name__}.start", lambda config, *_: NumpyBackend(one_worker()))
    row = Framework("numpy", "numpy", module)
    monkeypatch.setitem(FRAMEWORKS, "numpy", row)
