"""Memory of the GPU that a TensorFlow job computes on."""

import tensorflow as tf


def device_peak_bytes() -> int | None:
    """Return the most memory that tensors have had on this worker's GPU; None without a GPU."""
    if not tf.config.list_logical_devices("GPU"):
        return None
    return int(tf.config.experimental.get_memory_info("GPU:0")["peak"])
