"""A backend of PyTorch whose worker trains on its own, in the process of a job's worker."""

from typing import cast

from hvdtrain.backends.base import Backend
from hvdtrain.backends.torch.backend import TorchBackend
from hvdtrain.backends.torch.device import choose_device
from hvdtrain.backends.workers import HorovodWorkers
from hvdtrain.config import Config
from hvdtrain.workers.agreement import Workers


def backend_alone(config: Config, job: Backend, alone: Workers) -> Backend:
    """Return a backend on the device of the job's, whose steps have no collective. Local: no collective.

    Args:
        config: the config.
        job: the job's backend.
        alone: the one worker of the new backend.
    """
    backend: Backend = TorchBackend(alone, choose_device(config.device, cast(HorovodWorkers, job.workers)))
    return backend
