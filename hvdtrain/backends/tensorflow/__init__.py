"""TensorFlow / Keras 3 behind the Backend interface, over ``horovod.tensorflow``."""
