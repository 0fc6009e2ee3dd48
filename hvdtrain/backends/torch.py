"""PyTorch behind the Backend interface, over ``horovod.torch``.

With its parts (``_torch_*.py``) the only place that imports torch.
``tensorflow.py`` has the same names in the same order.
"""

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import horovod.torch as hvd
import numpy as np
import torch
from numpy.typing import NDArray

from hvdtrain.backends import _torch_export
from hvdtrain.backends._exchange import Exported
from hvdtrain.backends._names import Renaming
from hvdtrain.backends._objective import Objective, check_per_sample, make_objective
from hvdtrain.backends._precision import check_precision
from hvdtrain.backends._torch_averages import Averages
from hvdtrain.backends._torch_batch_norm import BatchNormSync, find_batch_norms
from hvdtrain.backends._torch_batches import TorchBatch, TorchPending
from hvdtrain.backends._torch_choice import choose_optimizer
from hvdtrain.backends._torch_compile import check_compiler, compile_model
from hvdtrain.backends._torch_losses import NAMED
from hvdtrain.backends._torch_precision import LossScale, computing, widen_outputs
from hvdtrain.backends._torch_recompute import recompute_blocks
from hvdtrain.backends._torch_slots import TrainingState, fill_slots
from hvdtrain.backends._torch_state import ModelState, TorchSnapshot
from hvdtrain.backends._workers import HorovodWorkers, peer_errors
from hvdtrain.backends.base import NO_REQUESTS, NUMBERS_AFTER_SUMS, PortableState, Requests
from hvdtrain.config import Config
from hvdtrain.data.feed import HostBatch
from hvdtrain.data.order import mix
from hvdtrain.errors import EnvironmentFault, TaskError
from hvdtrain.threads import threads_per_worker

_COMPRESSION = {"none": hvd.Compression.none, "fp16": hvd.Compression.fp16}


def start(config: Config) -> "TorchBackend":
    """Collective. Start Horovod, bind this worker's device and set its threads.

    Raises:
        EnvironmentFault: where the device is missing or the launcher does not fit.
    """
    hvd.init()
    workers = HorovodWorkers(hvd)
    device = _choose_device(config.device, workers)
    check_precision(config.precision, device.type == "cuda", workers.host)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    torch.set_num_threads(config.threads or threads_per_worker(workers.local_size))
    # as TensorFlow does: subnormal numbers, which moments decay to, are a hundred times slower
    torch.set_flush_denormal(True)
    return TorchBackend(workers, device)


def _choose_device(wanted: str, workers: HorovodWorkers) -> torch.device:
    if wanted == "cpu" or (wanted == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise EnvironmentFault(
            f"--device gpu: PyTorch {torch.__version__} sees no GPU on {workers.host}",
            "Use --device cpu, or install a driver and a CUDA build of PyTorch.",
        )
    cards = torch.cuda.device_count()
    if workers.local_rank >= cards:
        raise EnvironmentFault(
            f"{workers.host} has {cards} GPUs for {workers.local_size} workers; each worker needs one",
            f"Start at most {cards} workers on this host, or use --device cpu.",
        )
    return torch.device("cuda", workers.local_rank)


class TorchBackend:
    """The PyTorch backend of one worker.

    Args:
        workers: the job's workers.
        device: where this worker computes.
    """

    def __init__(self, workers: HorovodWorkers, device: torch.device) -> None:
        self.workers = workers
        self._device = device
        self._sums: torch.Tensor | None = None
        self._weight = 0.0
        self._names: tuple[str, ...] = ()
        self._missing: list[str] = []
        self._zeros = torch.zeros(NUMBERS_AFTER_SUMS, device=device)
        self._known_weights: tuple[NDArray[Any], tuple[list[torch.Tensor], list[torch.Tensor]]] | None = None

    def describe(self) -> str:
        """Say framework, version and device."""
        on = torch.cuda.get_device_name(self._device) if self._device.type == "cuda" else "the CPU"
        return f"PyTorch {torch.__version__} on {on}"

    def versions(self) -> dict[str, str]:
        """Give the versions that must be equal on all workers."""
        return {"torch": torch.__version__}

    def build(self, task: Any, config: Config, accumulate: int) -> None:
        """Build model and optimizer. Local: no collective."""
        torch.manual_seed(mix(config.seed, 0) >> 1)
        self._seed = config.seed
        self._clip_norm = config.clip_norm
        self._objective: Objective = make_objective(task, "torch", NAMED)
        self._train_objective = make_objective(task, "torch", NAMED, config.label_smoothing)
        model = task.torch_model()
        if not isinstance(model, torch.nn.Module):
            raise TaskError(f"torch_model() must give a torch.nn.Module, found {type(model).__name__}")
        self._model, self._new_model = model.to(self._device), task.torch_model
        self._batch_norm = BatchNormSync(self.workers.size)
        if config.sync_batch_norm:
            self._batch_norm.take_over(self._model)
        self._precision = config.precision
        self._scale = LossScale() if config.precision == "fp16" else None
        widen_outputs(self._model, config.precision)
        if config.checkpoint_activations:
            recompute_blocks(self._model)
        if config.compile:
            check_compiler(self._device, self.workers.host)
            compile_model(self._model)
        tensors = ModelState(self._model, Renaming(task, "torch"))
        self._trainable = [entry for entry in tensors.entries if entry.trainable]
        if not self._trainable:
            raise TaskError("the model has no parameter that requires a gradient")
        self._parameters = [entry.tensor for entry in self._trainable]
        self._optimizer = hvd.DistributedOptimizer(
            choose_optimizer(task, config, tensors),
            named_parameters=[(entry.path, entry.tensor) for entry in self._trainable],
            compression=_COMPRESSION[config.compression],
            backward_passes_per_step=accumulate,
            op=hvd.Average,
        )
        if not hasattr(task, "torch_optimizer"):
            fill_slots(self._optimizer)
        self._averages = Averages(tensors, config.ema_decay)
        self._state = TrainingState(tensors, self._optimizer, self._averages)

    def to_device(self, batches: Iterable[HostBatch]) -> Iterator[TorchBatch]:
        """Turn batches in host memory into device batches, one ahead."""
        if self._device.type == "cpu":
            yield from map(self._wrap, batches)
            return
        stream = torch.cuda.Stream(self._device)
        ahead: TorchBatch | None = None
        for batch in batches:
            with torch.cuda.stream(stream):
                copied = self._wrap(batch)
            if ahead is not None:
                yield ahead
            current = torch.cuda.current_stream(self._device)
            current.wait_stream(stream)
            for tensor in copied.tensors():
                tensor.record_stream(current)
            ahead = copied
        if ahead is not None:
            yield ahead

    def train_step(self, batch: TorchBatch, learning_rate: float, requests: Requests = NO_REQUESTS) -> None:
        """Collective. One optimizer update with the mean gradient over the global batch."""
        self._seed_step(batch.step)
        for group in self._optimizer.param_groups:
            group["lr"] = learning_rate * group.get("lr_scale", 1.0)
        if not self._model.training:
            self._model.train()
        self._optimizer.zero_grad()
        sums: torch.Tensor | None = None
        with peer_errors():
            for micro_batch, weights, gradient_weights in zip(
                batch.micro_batches, batch.weights, batch.gradient_weights, strict=True
            ):
                self._batch_norm.weights = weights
                losses, values = self._per_sample(micro_batch)
                losses.backward(
                    gradient_weights if self._scale is None else gradient_weights * self._scale.value
                )
                sums = torch.mv(values, weights) if sums is None else sums.addmv_(values, weights)
            assert sums is not None  # a step has at least one micro-batch
            sums = torch.cat((sums, self._fill_missing_gradients(requests)))
            self._reduce_and_update(sums)
        self._averages.update(self._averages.share(batch.step + 1))
        self._add(sums, batch.total_weight)

    def eval_step(self, batch: TorchBatch) -> None:
        """Evaluate one batch. Local: no collective."""
        self._model.eval()
        with torch.inference_mode():
            for micro_batch, weights in zip(batch.micro_batches, batch.weights, strict=True):
                _, values = self._per_sample(micro_batch)
                self._add(torch.cat((torch.mv(values, weights), self._zeros)), batch.total_weight)

    def averaged_weights(self) -> AbstractContextManager[None]:
        """Give a context in which the model computes with the average of its weights, if it has one."""
        return self._averages.in_model()

    def take_metrics(self, phase: str, requests: Requests = NO_REQUESTS) -> TorchPending:
        """Collective. Take what the steps since the last call added up to."""
        sums, weight = self._sums, self._weight
        assert sums is not None  # called after at least one step
        if requests is not NO_REQUESTS:
            sums = sums + sums.new_tensor(requests.at_the_end_of(len(sums)))
        if phase == "eval" and self.workers.size > 1:
            with peer_errors():
                sums = hvd.allreduce_(sums.clone(), op=hvd.Sum, name="hvdtrain.eval_metrics")
        self._sums, self._weight = None, 0.0
        return TorchPending(self._names, sums, weight)

    def parameters(self) -> Iterator[tuple[str, NDArray[Any]]]:
        """Give the trainable parameters of this worker by portable name."""
        for field in self._state.model.trainable_fields():
            yield field.name, field.read()

    def parameter_shapes(self) -> dict[str, tuple[int, ...]]:
        """Give the shapes of the trainable parameters by portable name."""
        return {field.name: field.shape for field in self._state.model.trainable_fields()}

    def batch_norm_layers(self) -> int:
        """Give the number of the model's batch-norm layers."""
        return len(find_batch_norms(self._model))

    def missing_gradient_names(self) -> list[str]:
        """Name the parameters that got no gradient on this worker when last there were some."""
        return self._missing

    def average_statistics(self) -> None:
        """Collective. Average the moving statistics (batch norm) over workers."""
        if self.workers.size == 1:
            return
        with peer_errors():
            for entry in self._state.model.entries:
                if not isinstance(entry.tensor, torch.nn.Parameter) and entry.tensor.is_floating_point():
                    hvd.allreduce_(entry.tensor, op=hvd.Average, name=f"hvdtrain.statistics.{entry.path}")

    def snapshot(self) -> TorchSnapshot:
        """Copy model and optimizer of this worker off the device, for another thread to read."""
        return self._state.snapshot()

    def get_state(self) -> PortableState:
        """Give model and optimizer of this worker as portable state."""
        return self.snapshot().read()

    def set_state(self, state: PortableState) -> None:
        """Load portable state into this worker's model and optimizer."""
        self._state.load(state)

    def broadcast_state(self, root: int) -> None:
        """Collective. Give every worker the root's optimizer state, parameters and buffers."""
        if self.workers.size == 1:
            return
        with peer_errors():
            # made here: Horovod makes missing slots by a step that moves parameters and options
            has_slots = self.workers.broadcast_object(self._state.has_slots(), root)
            self._state.follow(has_slots)
            if has_slots:
                hvd.broadcast_optimizer_state(self._optimizer, root)
            hvd.broadcast_parameters(self._model.state_dict(), root)
            hvd.broadcast_parameters(self._averages.named(), root)

    def export(self, form: str, path: Path, batch: HostBatch) -> Exported:
        """Write the model in a form that others serve, load it back and compare outputs."""
        return _torch_export.export_model(self._model, self._new_model, self._objective, form, path, batch)

    def load_weights_file(self, path: Path) -> str:
        """Load a framework's own file of weights into the model; say what it held."""
        held = _torch_export.load_weights_file(self._model, path)
        self._averages.restart()
        return held

    def close(self) -> None:
        """Collective. Leave Horovod."""
        hvd.shutdown()

    def _wrap(self, batch: HostBatch) -> TorchBatch:
        slots = range(len(batch.weights))
        weights, gradient_weights = self._weigh(batch)
        return TorchBatch(
            step=batch.step,
            # views are taken of the numpy arrays, where they cost a fraction of a tensor's
            micro_batches=[{name: self._move(a[i]) for name, a in batch.arrays.items()} for i in slots],
            weights=weights,
            gradient_weights=gradient_weights,
            total_weight=batch.total_weight,
        )

    def _weigh(self, batch: HostBatch) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Give weights and gradient weights; those of the batch before where they are the same."""
        known = self._known_weights
        if known is None or known[0] is not batch.weights:
            scaled = batch.weights * np.float32(self.workers.size / batch.total_weight)
            tensors = [self._move(w) for w in batch.weights], [self._move(w) for w in scaled]
            known = self._known_weights = batch.weights, tensors
        return known[1]

    def _move(self, array: NDArray[Any]) -> torch.Tensor:
        tensor = torch.from_numpy(array)
        if self._device.type == "cpu":
            return tensor
        return tensor.pin_memory().to(self._device, non_blocking=True)

    def _seed_step(self, step: int) -> None:
        seed = mix(self._seed, step, self.workers.rank) >> 1
        if self._device.type == "cuda":
            torch.cuda.default_generators[self._device.index].manual_seed(seed)
        torch.default_generator.manual_seed(seed)

    def _per_sample(self, micro_batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        """Give the losses (samples,) and, without gradient, all values (1 + metrics, samples)."""
        objective = self._train_objective if self._model.training else self._objective
        with computing(self._precision, self._device):
            losses, metrics = objective(self._model, micro_batch)
        samples = len(next(iter(micro_batch.values())))
        names = ("loss", *metrics)
        if names != self._names:
            for name, value in (("the loss", losses), *metrics.items()):
                check_per_sample(name, tuple(value.shape), samples)
            self._names = names
        detached = [value.detach().to(torch.float32) for value in (losses, *metrics.values())]
        return losses.to(torch.float32), torch.stack(detached)

    def _fill_missing_gradients(self, requests: Requests) -> torch.Tensor:
        """Give zeros to parameters that no micro-batch reached; their number and the requests, (5,).

        Horovod would do so at two workers and more; here it is done at any number, so that weight
        decay and momentum act on them alike.
        """
        missing = [entry for entry in self._trainable if entry.tensor.grad is None]
        if not missing and requests is NO_REQUESTS:
            return self._zeros
        for entry in missing:
            entry.tensor.grad = torch.zeros_like(entry.tensor)
        if missing:
            self._missing = [f"model/{entry.path}" for entry in missing]
        return self._zeros.new_tensor((float(len(missing)), *requests.as_numbers()))

    def _reduce_and_update(self, sums: torch.Tensor) -> None:
        handle = None
        if self.workers.size > 1:
            handle = hvd.allreduce_async_(sums, op=hvd.Sum, name="hvdtrain.metrics")
        self._optimizer.synchronize()
        if self._scale is None or self._scale.unscale([p.grad for p in self._parameters]):
            if self._clip_norm is not None:
                torch.nn.utils.clip_grad_norm_(self._parameters, self._clip_norm)
            with self._optimizer.skip_synchronize():
                self._optimizer.step()
        if handle is not None:
            hvd.synchronize(handle)
        if self._scale is not None:
            self._scale.spoil(sums)

    def _add(self, sums: torch.Tensor, weight: float) -> None:
        self._sums = sums if self._sums is None else self._sums + sums
        self._weight += weight
