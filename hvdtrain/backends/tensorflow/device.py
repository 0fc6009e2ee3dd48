"""Which device a TensorFlow worker computes on."""

import tensorflow as tf

from hvdtrain.backends.workers import HorovodWorkers
from hvdtrain.errors import EnvironmentFault


def choose_device(wanted: str, workers: HorovodWorkers) -> str:
    """Return the device of this worker, chosen by its rank on the host. Local: no collective.

    Args:
        wanted: "auto", "cpu" or "gpu".
        workers: the job's workers.

    Raises:
        EnvironmentFault: If there is no GPU, or not one for each worker of the host.
    """
    cards = tf.config.list_physical_devices("GPU")
    if wanted == "cpu" or (wanted == "auto" and not cards):
        tf.config.set_visible_devices([], "GPU")
        return "CPU"
    if not cards:
        raise EnvironmentFault(
            f"--device gpu: TensorFlow {tf.__version__} sees no GPU on {workers.host}",
            "Use --device cpu, or install a driver and TensorFlow with CUDA.",
        )
    if workers.local_rank >= len(cards):
        raise EnvironmentFault(
            f"{workers.host} has {len(cards)} GPUs for {workers.local_size} workers; each worker needs one",
            f"Start at most {len(cards)} workers on this host, or use --device cpu.",
        )
    tf.config.set_visible_devices(cards[workers.local_rank], "GPU")
    tf.config.experimental.set_memory_growth(cards[workers.local_rank], True)
    return "GPU"
