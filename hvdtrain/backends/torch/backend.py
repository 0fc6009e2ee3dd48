"""PyTorch behind the Backend protocol, over ``horovod.torch``."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import horovod.torch as hvd
import torch

from hvdtrain.backends.base import Backend
from hvdtrain.backends.options import check_precision
from hvdtrain.backends.records import BackendInfo, DeviceMemory, Exported, PortableState
from hvdtrain.backends.start import start_horovod
from hvdtrain.backends.steps import choose_step
from hvdtrain.backends.torch import export, probes
from hvdtrain.backends.torch.batches import TorchBatch
from hvdtrain.backends.torch.objective.metric_objects import COLLECTIVES
from hvdtrain.backends.torch.probes import state_kept
from hvdtrain.backends.torch.replica_state import StateTensors
from hvdtrain.backends.torch.state.moving_state import MovingState
from hvdtrain.backends.torch.state.tensors import optimizers_kept
from hvdtrain.backends.torch.step_clock import ProfilerRecorder
from hvdtrain.backends.torch.steps.optimizer_state import TrainingState
from hvdtrain.backends.torch.steps.parts import Parts
from hvdtrain.backends.torch.task_model import choose_device, device_memory
from hvdtrain.config import Config
from hvdtrain.data.feed import HostBatch
from hvdtrain.data.order import mix
from hvdtrain.elastic.member.membership import Membership
from hvdtrain.host.cores import threads_per_worker
from hvdtrain.workers.agreement import Workers


def start(config: Config, membership: Membership | None = None) -> "TorchBackend":
    """Collective. Start Horovod, bind this worker's device and set its threads."""
    workers = start_horovod(hvd, COLLECTIVES(), membership, has_groups=config.stages > 1)
    device = choose_device(config.device, workers)
    check_precision(config.precision, device.type == "cuda", workers.host)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    torch.set_num_threads(config.threads or threads_per_worker(workers.local_size))
    # as TensorFlow does: subnormal numbers, which moments decay to, are a hundred times slower
    torch.set_flush_denormal(True)
    return TorchBackend(workers, device)


class TorchBackend(Backend):
    """The PyTorch backend of one worker."""

    model: torch.nn.Module
    parts: Parts
    _state: TrainingState
    _probes, _files = probes, export
    _recorder, _untrained = ProfilerRecorder, StateTensors

    def __init__(self, workers: Workers, device: torch.device) -> None:
        self.workers: Workers = workers
        on = torch.cuda.get_device_name(device) if device.type == "cuda" else "the CPU"
        self.info = BackendInfo(f"PyTorch {torch.__version__} on {on}", {"torch": torch.__version__})
        self._device = device

    def to_device(self, batches: Iterable[HostBatch]) -> Iterator[TorchBatch]:
        """Yield the device batches that the steps take, one ahead of the host's."""
        wrap = self.parts.computation.wrap
        if self._device.type == "cpu":
            yield from map(wrap, batches)
            return
        stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        ahead: TorchBatch | None = None
        for batch in batches:
            with torch.cuda.stream(stream):
                copied = wrap(batch)
            if ahead is not None:
                yield ahead
            current = torch.cuda.current_stream(self._device)
            current.wait_stream(stream)
            for tensor in copied.tensors():
                tensor.record_stream(current)
            ahead = copied
        if ahead is not None:
            yield ahead

    def device_memory(self) -> DeviceMemory | None:
        """Return the memory of this worker's GPU; None on the CPU. Local: no collective."""
        return device_memory(self._device)

    def follow_trained(self, kept: dict[str, list[str]] | None = None) -> int:
        """Train what requires a gradient now, or what a checkpoint keeps; return how many numbers. Local."""
        self._take(self.parts.renewed(kept))
        self._moving = self._moving_state()
        return sum(entry.tensor.numel() for entry in self.parts.trainable)

    def undone_step(self, batch: TorchBatch, learning_rate: float, signals: Sequence[float]) -> None:
        """Collective. Do a step as ``train_step``, with what was trained before, and undo it."""
        with self.parts.trained_set.as_before(), self._all_kept():
            self.train_step(batch.copied(), learning_rate, signals)

    def trained_state(self) -> dict[str, list[str]] | None:
        """Return what a checkpoint keeps of what is trained; None while all is as it was built. Local."""
        if not self.step.follows_trained:
            return None
        return self.parts.trained_set.state(optimized=self.parts.optimized, slots=self.parts.slotted)

    @contextmanager
    def ema_weights(self) -> Iterator[None]:
        """Collective. Return a context as in the base, after which the model is in training."""
        # so train() undoes with the averages what eval() did with them, such as merging them
        computation = self.parts.computation
        with self.parts.ema.in_model():
            try:
                yield
            finally:
                if not computation.is_training:
                    computation.enter_mode(training=True)

    @staticmethod
    def close() -> None:
        """Collective. Leave Horovod."""
        hvd.shutdown()

    def export(self, format_name: str, path: Path, batches: Sequence[HostBatch]) -> Exported:
        """Write the model in a format for serving, load it back and compare outputs. Local."""
        one = self.parts.computation
        with one.gathering.alone():
            return export.export_model(self.model, one.new_model, one.serving, format_name, path, batches)

    def plain_model(self) -> torch.nn.Module:
        """Return the model with its weights as the task made it, ready for evaluation. Local."""
        return export.plain_model(self.model, self.parts.computation.new_model)

    def _make(self, task: Any, config: Config, batch: HostBatch | None) -> Parts:
        torch.manual_seed(mix(config.seed, 0) >> 1)
        self.step = choose_step(task, config)(task, config, self.workers, self._device)
        return Parts(self.step, task, config, batch, self._device.type == "cpu")

    def _state_of_layers(self, is_root: bool) -> PortableState:
        return self.parts.tensors.extra_states()

    def _moving_state(self, changed_early: Sequence[Any] = ()) -> MovingState:
        paths, replicas = self._state_tensors.paths, self.replica_state

        def is_changing(tensor: torch.Tensor) -> bool:
            return f"model/{paths.get(id(tensor))}" in replicas.changing

        return MovingState(self.model, self.parts.trainable, changed_early, is_changing)

    @contextmanager
    def _all_kept(self) -> Iterator[None]:
        """Return a context after which everything that steps change is as it was."""
        scale = self.parts.loss_scale
        numbers = None if scale is None else scale.to_broadcast()
        averages = self.parts.ema.to_broadcast()
        with state_kept(self.model, self._device, averages), optimizers_kept(self.optimizers):
            yield
        if scale is not None and numbers is not None:
            scale.follow(numbers)
