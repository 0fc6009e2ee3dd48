"""Write files of weights into this folder: as Keras saves them, and as they should not be."""

import os
import sys
import zipfile
from pathlib import Path

os.environ["KERAS_BACKEND"] = "tensorflow"
import h5py
import keras
import numpy as np

from hvdtrain.models import convnet

model = keras.models.load_model(sys.argv[1])
model.save_weights("good.weights.h5")
model.compile("adam", "mse")
model.optimizer.build(model.trainable_variables)
model.save("compiled.keras")

convnet.tf_model((8, 8, 1), 11).save_weights("shape.weights.h5")
keras.Sequential([keras.Input((4,)), keras.layers.Dense(2)]).save_weights("other.weights.h5")
with h5py.File("old.weights.h5", "w") as file:
    file.attrs["layer_names"] = np.array([b"conv1"])
with zipfile.ZipFile("no_weights.keras", "w") as archive:
    archive.writestr("config.json", "{}")
with zipfile.ZipFile("damaged_lzma.keras", "w", zipfile.ZIP_LZMA) as archive:
    archive.writestr("model.weights.h5", bytes(1000))
damaged = bytearray(Path("damaged_lzma.keras").read_bytes())
damaged[50:60] = b"\xff" * 10
Path("damaged_lzma.keras").write_bytes(damaged)
for whole, cut in (("good.weights.h5", "cut.weights.h5"), ("compiled.keras", "cut.keras")):
    content = Path(whole).read_bytes()
    Path(cut).write_bytes(content[: len(content) // 2])
