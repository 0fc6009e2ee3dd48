"""TensorFlow / Keras 3 behind the Backend interface, over ``horovod.tensorflow``."""

import os

from hvdtrain.host.output import quiet_stderr

os.environ["KERAS_BACKEND"] = "tensorflow"  # read when keras is imported
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
with quiet_stderr():  # TensorFlow's native start-up notices
    import tensorflow  # noqa: F401 - before any module of this folder loads it
