"""PyTorch behind the seam, ``Backend``, over ``horovod.torch``."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import horovod.torch as hvd
import torch

from hvdtrain.backends.base import Backend
from hvdtrain.backends.options import check_precision
from hvdtrain.backends.records import BackendInfo, DeviceMemory, Exported, PortableState
from hvdtrain.backends.steps import choose_step
from hvdtrain.backends.torch import export, probes
from hvdtrain.backends.torch.batches import TorchBatch
from hvdtrain.backends.torch.objective.gathering import COLLECTIVES
from hvdtrain.backends.torch.probes import state_kept
from hvdtrain.backends.torch.replica_state import StateTensors
from hvdtrain.backends.torch.state.moving_state import MovingState
from hvdtrain.backends.torch.step_clock import ProfilerRecorder
from hvdtrain.backends.torch.steps.optimizer_state import TrainingState
from hvdtrain.backends.torch.steps.plain_step import Parts
from hvdtrain.backends.torch.task_model import choose_device, device_memory
from hvdtrain.backends.workers import start_horovod
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
    _hvd, _probes, _files = hvd, probes, export
    _recorder, _untrained = ProfilerRecorder, StateTensors

    def __init__(self, workers: Workers, device: torch.device) -> None:
        self.workers: Workers = workers
        on = torch.cuda.get_device_name(device) if device.type == "cuda" else "the CPU"
        self.info = BackendInfo(f"PyTorch {torch.__version__} on {on}", {"torch": torch.__version__})
        self._device = device

    def to_device(self, batches: Iterable[HostBatch]) -> Iterator[TorchBatch]:
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
        return device_memory(self._device)

    def follow_trained(self, kept: dict[str, list[str]] | None = None) -> int:
        self._take(self.parts.renewed(kept))
        self._moving = self._moving_state(self.step.changed_early())
        return sum(entry.tensor.numel() for entry in self.parts.trainable)

    def undone_step(self, batch: TorchBatch, learning_rate: float, signals: Sequence[float]) -> None:
        with self.parts.trained_set.as_before(), self._all_kept():
            self.train_step(batch.copied(), learning_rate, signals)

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

    def export(self, format_name: str, path: Path, batches: Sequence[HostBatch]) -> Exported:
        one = self.parts.computation
        with one.gathering.alone():
            return export.export_model(self.model, one.new_model, one.serving, format_name, path, batches)

    def plain_model(self) -> torch.nn.Module:
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
        scale = self.parts.loss_scale
        numbers = None if scale is None else scale.to_broadcast()
        moving = MovingState(self.model, (), self.optimizers, device="cpu")
        with state_kept(self.model, self._device, self.parts.ema.to_broadcast()):
            moving.keep()
            try:
                yield
            finally:
                moving.restore()
        if scale is not None and numbers is not None:
            scale.follow(numbers)
