"""A backend of TensorFlow whose worker trains on its own, in the process of a job's worker."""

from hvdtrain.backends.base import Backend
from hvdtrain.backends.tensorflow.backend import TensorFlowBackend
from hvdtrain.config import Config
from hvdtrain.workers.agreement import Workers


def backend_alone(config: Config, job: Backend, alone: Workers) -> Backend:
    """Return a backend on the device of the job's, whose steps have no collective. Local: no collective.

    Args:
        config: the config.
        job: the job's backend.
        alone: the one worker of the new backend.
    """
    device = "CPU" if job.info.description.endswith(" on the CPU") else "GPU"
    backend: Backend = TensorFlowBackend(alone, device)
    return backend
