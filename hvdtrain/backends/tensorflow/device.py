"""Which device a TensorFlow worker computes on."""

import tensorflow as tf

from hvdtrain.backends.base import DeviceMemory
from hvdtrain.backends.precision import check_precision
from hvdtrain.backends.workers import HorovodWorkers
from hvdtrain.config import Config
from hvdtrain.errors import EnvironmentFault
from hvdtrain.host.cores import threads_per_worker


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


def device_name(device: str) -> str:
    """Return the name, for people, of what this worker computes on."""
    if device == "CPU":
        return "the CPU"
    details = tf.config.experimental.get_device_details(tf.config.get_visible_devices("GPU")[0])
    return str(details["device_name"])


def use_device(config: Config, workers: HorovodWorkers) -> str:
    """Bind this worker's device, set its threads and return the device. Local: no collective.

    Raises:
        EnvironmentFault: If the device is missing or cannot compute in the config's precision, or TensorFlow
            was used already.
    """
    threads = config.threads or threads_per_worker(workers.local_size)
    try:
        device = choose_device(config.device, workers)
        check_precision(config.precision, device == "GPU", workers.host)
        tf.config.threading.set_intra_op_parallelism_threads(threads)
        if device == "CPU":
            tf.config.threading.set_inter_op_parallelism_threads(threads)
    except RuntimeError as error:
        raise EnvironmentFault(
            f"TensorFlow was used before hvdtrain could choose its device and threads: {error}",
            "Use TensorFlow only inside the task's methods, or after hvdtrain.train().",
        ) from None
    return device


def device_memory() -> DeviceMemory:
    """Return the memory of this worker's GPU, which is the only one it sees; how large it is is not known."""
    return DeviceMemory(int(tf.config.experimental.get_memory_info("GPU:0")["peak"]))
