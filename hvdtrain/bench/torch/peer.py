"""Programs in PyTorch that do a job's work: a plain loop, DistributedDataParallel, Horovod's optimizer."""

import os
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import horovod.torch as hvd
import torch
from torch import distributed
from torch.nn.parallel import DistributedDataParallel

from hvdtrain.backends.counting import Weighted
from hvdtrain.backends.objective import Objective, make_objective
from hvdtrain.backends.portable.names import Renaming
from hvdtrain.backends.torch.device import choose_device
from hvdtrain.backends.torch.losses import NAMED
from hvdtrain.backends.torch.model_state import ModelState
from hvdtrain.bench.peer import (
    LossOnly,
    Peer,
    Place,
    prepare_peer,
    run_steps,
    set_initial_values,
    workers_at,
)
from hvdtrain.config import Layer
from hvdtrain.data.feed import HostBatch
from hvdtrain.data.order import mix
from hvdtrain.host.cores import threads_per_worker
from hvdtrain.seeding import seed_generators


class ModelWithLoss(torch.nn.Module):
    """The user's model with its loss, so that one forward pass computes both.

    Args:
        model: the model.
        objective: the loss.
    """

    def __init__(self, model: torch.nn.Module, objective: Objective) -> None:
        super().__init__()
        self.model = model
        self._objective = objective

    def forward(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        """Return the mean loss of a batch."""
        losses, _ = self._objective(self.model, batch)
        mean: torch.Tensor
        if isinstance(losses, Weighted):
            mean = (losses.values * losses.weights).sum() / losses.weights.sum()
        else:
            mean = losses.mean()
        return mean


def run_peer(program: str, layers: list[Layer], place: Place, steps: int) -> dict[str, Any] | None:
    """Collective. Train a job's model with another program; return what was measured on rank 0.

    Args:
        program: "plain", "ddp" or "horovod".
        layers: config values, weakest source first, without the task's defaults.
        place: which process this is; Horovod's program asks Horovod.
        steps: how many steps are timed.
    """
    open_peer = prepare_peer(layers)
    if program == "horovod":
        hvd.init()
        place = Place(hvd.rank(), hvd.size())
    peer = open_peer(place)
    device = choose_device(peer.config.device, workers_at(place))
    torch.set_num_threads(peer.config.threads or threads_per_worker(place.size))
    seed_generators(peer.config.seed, "model")
    torch.manual_seed(mix(peer.config.seed, 0) >> 1)  # as the trainer does: the initial weights are the same
    model = peer.task.torch_model().to(device)
    set_initial_values(peer, ModelState(model, Renaming(peer.task, "torch")).fields)
    objective = make_objective(LossOnly(peer.task), "torch", NAMED, peer.config.label_smoothing)
    trained: torch.nn.Module = ModelWithLoss(model, objective).train()
    mean_of: Callable[[float], float] = float
    if program == "ddp":
        trained, mean_of = _with_ddp(trained, place, device)
    optimizer = _optimizer(peer, model.parameters())
    if program == "horovod":
        optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
        hvd.broadcast_parameters(model.state_dict(), root_rank=0)
        mean_of = _mean_over_horovod
    torch.manual_seed(mix(peer.config.seed, 0, place.rank) >> 1)  # of the first step
    try:
        step = _step_of(peer, trained, optimizer, device)
        found = run_steps(peer, step, lambda loss: float(loss.item()), mean_of, steps)
    finally:
        if program == "ddp":
            distributed.destroy_process_group()
    return found if place.rank == 0 else None


def _with_ddp(
    model: torch.nn.Module, place: Place, device: torch.device
) -> tuple[torch.nn.Module, Callable[[float], float]]:
    """Return a model as PyTorch's tutorial wraps it, with Gloo on CPUs and NCCL on GPUs."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # the processes are on one host
    is_gpu = device.type == "cuda"
    if is_gpu:
        torch.cuda.set_device(device)
    distributed.init_process_group(
        "nccl" if is_gpu else "gloo",
        init_method=Path(place.store).as_uri(),
        rank=place.rank,
        world_size=place.size,
    )

    def mean_of(value: float) -> float:
        tensor = torch.tensor([value], dtype=torch.float64, device=device)
        distributed.all_reduce(tensor)
        return float(tensor.item()) / place.size

    ids = [device.index] if is_gpu else None
    return DistributedDataParallel(model, device_ids=ids, gradient_as_bucket_view=True), mean_of


def _mean_over_horovod(value: float) -> float:
    return float(hvd.allreduce(torch.tensor([value], dtype=torch.float64), name="bench.mean").item())


def _optimizer(peer: Peer, parameters: Iterable[torch.nn.Parameter]) -> torch.optim.Optimizer:
    """Return the task's optimizer, or the config's; PyTorch's fused one, as a user who wants speed takes."""
    config, trained = peer.config, [p for p in parameters if p.requires_grad]
    if hasattr(peer.task, "torch_optimizer"):
        own: torch.optim.Optimizer = peer.task.torch_optimizer(trained)
        return own
    if config.optimizer == "adamw":
        return torch.optim.AdamW(
            trained,
            lr=peer.learning_rate,
            betas=(config.adam_beta1, config.adam_beta2),
            eps=config.adam_epsilon,
            weight_decay=config.weight_decay,
            fused=True,
        )
    return torch.optim.SGD(
        trained,
        lr=peer.learning_rate,
        momentum=config.momentum,
        weight_decay=config.weight_decay,
        fused=True,
    )


def _step_of(
    peer: Peer, model: torch.nn.Module, optimizer: Any, device: torch.device
) -> Callable[[HostBatch], torch.Tensor]:
    clip_norm, synchronize = peer.config.clip_norm, getattr(optimizer, "synchronize", None)

    def step(batch: HostBatch) -> torch.Tensor:
        tensors = {name: torch.from_numpy(array[0]).to(device) for name, array in batch.arrays.items()}
        optimizer.zero_grad()
        loss: torch.Tensor = model(tensors)
        loss.backward()  # type: ignore[no-untyped-call]
        if clip_norm is not None:
            if synchronize is not None:  # Horovod's sums, before they are clipped
                synchronize()
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip_norm)
        skips = clip_norm is not None and synchronize is not None
        with optimizer.skip_synchronize() if skips else nullcontext():
            optimizer.step()
        return loss.detach()

    return step
