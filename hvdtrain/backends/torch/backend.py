"""PyTorch behind the Backend protocol, over ``horovod.torch``."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import horovod.torch as hvd
import torch
from numpy.typing import NDArray

from hvdtrain.backends.base import Backend, ModelFiles, PendingState
from hvdtrain.backends.common import CommonBackend
from hvdtrain.backends.options import check_precision
from hvdtrain.backends.records import BackendInfo, DeviceMemory, DryRun, Exported, ModelInfo
from hvdtrain.backends.replica_state import ReplicaState
from hvdtrain.backends.start import start_horovod
from hvdtrain.backends.steps import choose_step
from hvdtrain.backends.torch import probes
from hvdtrain.backends.torch.batches import TorchBatch
from hvdtrain.backends.torch.export import export_model, load_weights_file, plain_model
from hvdtrain.backends.torch.objective.metric_objects import HorovodCollectives
from hvdtrain.backends.torch.probes import state_kept
from hvdtrain.backends.torch.replica_state import StateTensors
from hvdtrain.backends.torch.state.moving_state import MovingState
from hvdtrain.backends.torch.state.tensors import optimizers_kept
from hvdtrain.backends.torch.step_clock import ProfilerRecorder
from hvdtrain.backends.torch.steps.optimizer_state import TrainingState
from hvdtrain.backends.torch.steps.parts import Parts, describe_parts, make_parts, renewed_parts
from hvdtrain.backends.torch.task_model import choose_device, device_memory
from hvdtrain.backends.trained_set import not_in_own_step
from hvdtrain.backends.workers import peer_errors
from hvdtrain.config import Config
from hvdtrain.data.feed import HostBatch
from hvdtrain.data.order import mix
from hvdtrain.elastic.member.membership import Membership
from hvdtrain.host.cores import threads_per_worker
from hvdtrain.workers.agreement import Workers

# of the step that is done for nothing: its numbers are of no use, and some optimizers divide by it
_WARM_UP_RATE = 1e-6


def start(config: Config, membership: Membership | None = None) -> "TorchBackend":
    """Collective. Start Horovod, bind this worker's device and set its threads."""
    workers = start_horovod(hvd, HorovodCollectives(), membership, has_groups=config.stages > 1)
    device = choose_device(config.device, workers)
    check_precision(config.precision, device.type == "cuda", workers.host)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    torch.set_num_threads(config.threads or threads_per_worker(workers.local_size))
    # as TensorFlow does: subnormal numbers, which moments decay to, are a hundred times slower
    torch.set_flush_denormal(True)
    return TorchBackend(workers, device)


class TorchBackend(CommonBackend):
    """The PyTorch backend of one worker.

    Attributes:
        model: the task's model, or the blocks of this worker's stage, after ``build``.
    """

    model: torch.nn.Module
    parts: Parts
    _state: TrainingState

    def __init__(self, workers: Workers, device: torch.device) -> None:
        self.workers: Workers = workers
        on = torch.cuda.get_device_name(device) if device.type == "cuda" else "the CPU"
        self.info = BackendInfo(f"PyTorch {torch.__version__} on {on}", {"torch": torch.__version__})
        self._device = device

    def build(self, task: Any, config: Config, batch: HostBatch | None = None) -> ModelInfo:
        """Build model, optimizer and steps, with their initial values. Collective if the model is split."""
        torch.manual_seed(mix(config.seed, 0) >> 1)
        self.step = step = choose_step(task, config)(task, config, self.workers, self._device)
        self._take(parts := make_parts(step, task, config, batch))
        self.model = parts.computation.model
        self.weight_shapes = step.weight_shapes(self._state.weight_shapes())
        self._state_tensors = StateTensors(self.model, parts.tensors)
        replicas, collectives = step.replicas()
        self.replica_state = ReplicaState(
            task, replicas, collectives, self._state_tensors, replicas is self.workers
        )
        self._moving = self._moving_state(step.changed_early())
        if config.initial_parameters == "portable":
            self._state.load_initial(config.seed)
        info: ModelInfo = step.describe(describe_parts(step, parts))
        return info

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

    def dry_run(self, batch: HostBatch, training: bool) -> DryRun:
        """Collective. Compute the first micro-batch without changing state."""
        return probes.dry_run(self.step, self._state_tensors, batch, training)

    def device_memory(self) -> DeviceMemory | None:
        """Return the memory of this worker's GPU; None on the CPU. Local: no collective."""
        return device_memory(self._device)

    def recorder(self) -> ProfilerRecorder:
        """Return what records this worker's steps. Local: no collective."""
        return ProfilerRecorder(self.parts.clock)

    def ema_weights(self) -> AbstractContextManager[None]:
        """Collective. Return a context in which the model has the moving average of its weights, if any."""
        return self._evaluating()

    def sync_statistics(self) -> list[str]:
        """Collective. Give all workers one state of what no optimizer updates, which is then saved."""
        error = self._state_tensors.take_back()
        with peer_errors():
            return self.replica_state.combine(error)

    def follow_trained(self, kept: dict[str, list[str]] | None = None) -> int:
        """Train what requires a gradient now, or what a checkpoint keeps; return how many numbers. Local."""
        if not self.step.follows_trained:
            raise not_in_own_step()
        self._take(renewed_parts(self.parts, kept))
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

    def gather_state(self, spool: Path | None = None) -> PendingState | None:
        """Collective. Copy model and optimizer off the device, for rank 0 to read in another thread."""
        self._state.check()
        with peer_errors():
            kept = self.parts.reducer.state()
        kept = kept | self.parts.tensors.extra_states()
        return self._state.gather(kept, spool, is_root=self.workers.rank == 0)

    def broadcast_state(self, root: int) -> None:
        """Collective. Copy the root's parameters, buffers and optimizer state to every worker."""
        self.replica_state.restart()
        if self.workers.size == 1:
            return
        self._state_tensors.take_back()
        with peer_errors():
            if self.workers.is_elastic:
                self.replica_state.follow(self.workers, root)
            self.step.broadcast(root)

    def enter_world(self) -> None:
        """Forget what a step that failed had begun, and take the number of workers anew. Local."""
        self.step.forget()
        self.parts.computation.evaluation.begin()
        self.parts.clock.enter_world()

    def warm_up(self, batch: HostBatch, eval_batch: HostBatch | None = None) -> None:
        """Compile and run a training step, and an evaluation step, alone. Local: the world has one worker."""
        wrap = self.parts.computation.wrap
        with self._all_kept():
            self.train_step(wrap(batch), _WARM_UP_RATE).read()
            if eval_batch is not None:
                with self.ema_weights():
                    self.eval_step(wrap(eval_batch))
        self.enter_world()

    @staticmethod
    def close() -> None:
        """Collective. Leave Horovod."""
        hvd.shutdown()

    def export(self, format_name: str, path: Path, batches: Sequence[HostBatch]) -> Exported:
        """Write the model in a format for serving, load it back and compare outputs. Local."""
        one = self.parts.computation
        with one.gathering.alone():
            return export_model(
                self.model, one.new_model, one.objective, format_name, path, batches, one.serve
            )

    def load_weights_file(self, path: Path) -> str:
        """Load a framework's own file of weights into the model; return a note on what it held. Local."""
        held = load_weights_file(self.model, path)
        self.parts.ema.restart()
        return held

    def predict(self, batch: TorchBatch) -> dict[str, NDArray[Any]]:
        """Return the model's outputs for one batch, by name. Local: no collective."""
        return self.parts.computation.predict(batch)

    def plain_model(self) -> torch.nn.Module:
        """Return the model with its weights as the task made it, ready for evaluation. Local."""
        return plain_model(self.model, self.parts.computation.new_model)

    def _take(self, parts: Parts) -> None:
        """Take the parts of a step, at first and when others are trained."""
        self.parts, self.optimizers = parts, list(parts.optimizers.values())
        self.step.attach(parts)
        self._state = self.step.make_state()

    def _moving_state(self, changed_early: Sequence[Any] = ()) -> MovingState:
        paths, replicas = self._state_tensors.paths, self.replica_state

        def is_changing(tensor: torch.Tensor) -> bool:
            return f"model/{paths.get(id(tensor))}" in replicas.changing

        return MovingState(self.model, self.parts.trainable, changed_early, is_changing)

    @contextmanager
    def _evaluating(self) -> Iterator[None]:
        """Return a context as ``ema_weights``, after which the model is in training, as each trainer has it.

        So ``train()`` undoes with the averages what ``eval()`` did with them, such as merging them.
        """
        computation = self.parts.computation
        with self.parts.ema.in_model():
            try:
                yield
            finally:
                if not computation.is_training:
                    computation.enter_mode(training=True)

    @contextmanager
    def _all_kept(self) -> Iterator[None]:
        """Return a context after which everything that steps change is as it was."""
        scale = self.parts.loss_scale
        numbers = None if scale is None else scale.to_broadcast()
        averages = [average for _, average in self.parts.ema.to_broadcast()]
        with state_kept(self.model, self._device, averages), optimizers_kept(self.optimizers):
            yield
        if scale is not None and numbers is not None:
            scale.follow(numbers)


_backend: type[Backend] = TorchBackend
_files: type[ModelFiles] = TorchBackend
