"""The seam between the loop and the frameworks, and the rules of the portable state.

Methods that every rank must call, in the same order, have docstrings that start with
"Collective."
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from hvdtrain.backends._exchange import Exported
from hvdtrain.config import Config
from hvdtrain.data.feed import HostBatch
from hvdtrain.data.order import mix

PortableState = dict[str, NDArray[Any]]
Shapes = Mapping[str, tuple[int, ...]]


class Workers(Protocol):
    """The workers of a job, as one of them sees them.

    Attributes:
        rank: this worker, from 0.
        size: number of workers.
        local_rank: this worker among those of its host, from 0.
        local_size: number of workers on this host.
        host: this host's name.
        controller: what coordinates the workers: "MPI", "Gloo" or "none" (one worker).
    """

    rank: int
    size: int
    local_rank: int
    local_size: int
    host: str
    controller: str

    def broadcast_object(self, value: Any, root: int = 0) -> Any:
        """Collective. Give every worker the root's value (anything that pickles)."""
        ...

    def allgather_object(self, value: Any) -> list[Any]:
        """Collective. Give every worker the values of all, in the order of ranks."""
        ...

    def barrier(self) -> None:
        """Collective. Wait until every worker is here."""
        ...


@dataclass(frozen=True)
class Requests:
    """What a worker asks of all workers, and tells them.

    It travels with a step's metrics, so all learn of it at once.

    Attributes:
        stop: end training after this step, saved.
        save: save now and go on.
        bad_samples: how many samples it could not read.
        waited_seconds: how long it waited for data.
    """

    stop: bool = False
    save: bool = False
    bad_samples: int = 0
    waited_seconds: float = 0.0

    def as_numbers(self) -> tuple[float, ...]:
        """Give it as numbers that add up over workers."""
        return float(self.stop), float(self.save), float(self.bad_samples), self.waited_seconds

    def at_the_end_of(self, length: int) -> tuple[float, ...]:
        """Give its numbers as the last of a vector of zeros: what is added to the one that is reduced."""
        numbers = self.as_numbers()
        return (length - len(numbers)) * (0.0,) + numbers

    def joined(self, other: "Requests") -> "Requests":
        """Give what either asks for."""
        return Requests(self.stop or other.stop, self.save or other.save)


NO_REQUESTS = Requests()
NUMBERS_AFTER_SUMS = 1 + len(NO_REQUESTS.as_numbers())  # in the reduced vector; the first: missing gradients


@dataclass(frozen=True)
class Totals:
    """What some steps add up to, over all workers.

    Attributes:
        sums: name to the weighted sum over samples; "loss" and the task's metrics.
        weight: sum of the samples' weights.
        missing_gradients: parameters that got no gradient, counted per step and worker.
        requests: what any worker asked for.
        bad_samples: how many samples could not be read.
        waited_seconds: how long the workers waited for data, added up.
    """

    sums: Mapping[str, float]
    weight: float
    missing_gradients: int = 0
    requests: Requests = NO_REQUESTS
    bad_samples: int = 0
    waited_seconds: float = 0.0

    @classmethod
    def from_vector(cls, names: Sequence[str], vector: Sequence[float], weight: float) -> "Totals":
        """Read the vector that a backend reduces: a sum per name, missing gradients, ``Requests``."""
        *sums, missing, stop, save, bad, waited = vector
        requests = Requests(stop > 0, save > 0) if stop or save else NO_REQUESTS
        return cls(dict(zip(names, sums, strict=True)), weight, round(missing), requests, round(bad), waited)

    def without_bad_samples(self) -> "Totals":
        """Take the samples that could not be read out of the weight: an evaluation leaves them out."""
        return replace(self, weight=self.weight - self.bad_samples) if self.bad_samples else self


class PendingMetrics(Protocol):
    """Totals on their way from the device."""

    def read(self) -> Totals:
        """Wait for the device if need be and give the totals. The same on every worker."""
        ...


class PendingState(Protocol):
    """A copy of model and optimizer on its way to portable state."""

    def read(self) -> PortableState:
        """Wait for the copies and lay them out. May be called once, in another thread.

        Memory of the copies is freed as it goes.
        """
        ...


class Backend(Protocol):
    """Whatever touches a tensor. The loop decides when it happens and with which number."""

    workers: Workers

    def describe(self) -> str:
        """Say framework, version and device, such as "PyTorch 2.13.0 on the CPU"."""
        ...

    def versions(self) -> dict[str, str]:
        """Give the versions that must be equal on all workers."""
        ...

    def build(self, task: Any, config: Config, accumulate: int) -> None:
        """Build model, optimizer and compiled steps. Local: no collective.

        Args:
            task: the task.
            config: the job's config.
            accumulate: micro-batches per step.

        Raises:
            TaskError: where the task's model, loss, metrics or optimizer do not fit.
        """
        ...

    def to_device(self, batches: Iterable[HostBatch]) -> Iterator[Any]:
        """Turn batches in host memory into the device batches that the steps take, one ahead."""
        ...

    def train_step(self, batch: Any, learning_rate: float, requests: Requests = NO_REQUESTS) -> None:
        """Collective. One optimizer update with the mean gradient over the global batch.

        Args:
            batch: what ``to_device`` gave.
            learning_rate: that of this step.
            requests: what this worker asks all of them to do.
        """
        ...

    def eval_step(self, batch: Any) -> None:
        """Evaluate one batch. Local: no collective, so ranks may have different numbers of them."""
        ...

    def averaged_weights(self) -> AbstractContextManager[None]:
        """Give a context in which the model computes with the average of its weights, if it has one.

        Local: no collective.
        """
        ...

    def take_metrics(self, phase: str, requests: Requests = NO_REQUESTS) -> PendingMetrics:
        """Collective. Take what the steps since the last call added up to.

        Args:
            phase: "train" or "eval".
            requests: in "eval", what this worker tells the others; in training it came with the steps.
        """
        ...

    def parameters(self) -> Iterator[tuple[str, NDArray[Any]]]:
        """Give the trainable parameters of this worker by portable name, in a fixed order."""
        ...

    def parameter_shapes(self) -> dict[str, tuple[int, ...]]:
        """Give the shapes of the trainable parameters by portable name; nothing is copied."""
        ...

    def batch_norm_layers(self) -> int:
        """Give the number of the model's batch-norm layers."""
        ...

    def missing_gradient_names(self) -> list[str]:
        """Name the parameters that got no gradient on this worker when last there were some."""
        ...

    def average_statistics(self) -> None:
        """Collective. Average the moving statistics (batch norm) over workers."""
        ...

    def snapshot(self) -> PendingState:
        """Copy model and optimizer of this worker off the device, for another thread to read.

        What this costs is a plain copy of the tensors; layouts are changed when it is read. Steps
        that follow do not change the snapshot.

        Raises:
            TaskError: where the optimizer holds something that cannot be saved.
        """
        ...

    def get_state(self) -> PortableState:
        """Give model and optimizer of this worker as portable state (copies in host memory)."""
        ...

    def set_state(self, state: PortableState) -> None:
        """Load portable state into this worker's model and optimizer.

        Everything is checked before anything changes. Names that are private to a framework
        (``PRIVATE``) may be missing; so may all averages of weights, which then start from the weights.

        Raises:
            TaskError: listing missing, unexpected and misshapen names.
        """
        ...

    def broadcast_state(self, root: int) -> None:
        """Collective. Give every worker the root's optimizer state, parameters and buffers."""
        ...

    def export(self, form: str, path: Path, batch: HostBatch) -> Exported:
        """Write the model in a form that others serve, load it back and compare outputs. Local.

        Args:
            form: one that ``hvdtrain.export`` lists for this framework.
            path: the file or directory to write.
            batch: real samples.

        Raises:
            TaskError: where the model cannot be written in this form.
        """
        ...

    def load_weights_file(self, path: Path) -> str:
        """Load a framework's own file of weights into the model; say what it held. Local.

        Raises:
            CheckpointError: where it would run code, is damaged or does not fit.
        """
        ...

    def close(self) -> None:
        """Collective. Leave Horovod."""
        ...


def initial_value(name: str, shape: tuple[int, ...], seed: int) -> NDArray[np.float32] | None:
    """Draw the initial value of a parameter from the seed and its portable name alone.

    So both frameworks start from equal parameters, whatever order they are made in. The
    distributions are Keras's defaults: Glorot uniform for kernels (Glorot and Bengio 2010, with
    the receptive field counted into both fans), orthogonal rows for recurrent kernels (Saxe et al.
    2013), uniform in [-0.05, 0.05] for embeddings, ones for gamma and moving_variance, zeros for
    bias, beta and moving_mean.

    Returns:
        The value, or None where the role (the name's last part) says no distribution.
    """
    role = name.rsplit("/", 1)[-1]
    if role in ("bias", "beta", "moving_mean"):
        return np.zeros(shape, np.float32)
    if role in ("gamma", "moving_variance"):
        return np.ones(shape, np.float32)
    if role == "embeddings":
        limit = 0.05
    elif role == "recurrent_kernel" and len(shape) == 2:
        limit = 1.0
    elif role == "kernel" and len(shape) >= 2:
        receptive_field = int(np.prod(shape[:-2]))
        limit = float(np.sqrt(6 / (receptive_field * (shape[-2] + shape[-1]))))
    else:
        return None
    # RandomState's stream is frozen by numpy's compatibility policy; Generator's is not
    key = mix(seed, *name.encode())
    random = np.random.RandomState([key & 0xFFFFFFFF, key >> 32])
    if role == "recurrent_kernel":
        return _orthogonal(random.standard_normal(shape)).astype(np.float32)
    return random.uniform(-limit, limit, shape).astype(np.float32)


def _orthogonal(drawn: NDArray[Any]) -> NDArray[Any]:
    """Give the nearest matrix whose rows (or columns, whichever are fewer) are orthonormal."""
    wide = drawn if drawn.shape[0] <= drawn.shape[1] else drawn.T
    q, r = np.linalg.qr(wide.T)
    rows = (q * np.sign(np.diag(r))).T
    return rows if wide is drawn else rows.T
