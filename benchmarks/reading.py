"""Reading a folder of small JPEG files: samples/s by reader processes, and what steps wait for.

    python benchmarks/reading.py                    # 50,000 files, both frameworks
    python benchmarks/reading.py --images 5000      # fewer

Reads with 0 processes (two threads of the worker), 1 and 2 in turn, so that all see the same machine;
then trains a convolutional net with 2 workers and prints ``data_wait_fraction``. Needs ``horovodrun``.
"""

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
from PIL import Image

from hvdtrain.data.feed import Feed, Reader, Shard, read_ahead
from hvdtrain.data.order import BatchPlan, ShuffledOrder
from hvdtrain.data.readers import Readers

SIDE, CLASSES, BATCH, ROUNDS, STEPS_A_ROUND = 64, 10, 64, 3, 40


class Photos:
    """A folder of JPEG files, decoded with Pillow when they are read."""

    def __init__(self, folder: str) -> None:
        self.paths = sorted(str(path) for path in Path(folder).glob("*/*.jpg"))

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> dict:
        with Image.open(self.paths[index]) as image:
            pixels = np.asarray(image.convert("RGB"), np.float32) / 255
        return {"inputs": pixels, "targets": index % CLASSES}


class Task:
    """Classify them; the labels mean nothing, the time does."""

    loss = "cross_entropy"

    def __init__(self, path: str) -> None:
        self.path = path

    def train_data(self):
        return Photos(self.path)

    def eval_data(self):
        return None

    def torch_model(self):
        from torch import nn

        class Model(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.convolutions = nn.Sequential(
                    *(nn.Conv2d(3, 32, 3), nn.ReLU(), nn.Conv2d(32, 32, 3, stride=2), nn.ReLU()),
                    *(nn.Conv2d(32, 64, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten()),
                )
                self.dense = nn.Linear(64, CLASSES)

            def forward(self, x):
                return self.dense(self.convolutions(x.permute(0, 3, 1, 2)))

        return Model()

    def tf_model(self):
        import keras
        from keras import layers

        inputs = keras.Input((SIDE, SIDE, 3))
        x = layers.Conv2D(32, 3, activation="relu", name="a")(inputs)
        x = layers.Conv2D(32, 3, strides=2, activation="relu", name="b")(x)
        x = layers.Conv2D(64, 3, activation="relu", name="c")(x)
        x = layers.GlobalAveragePooling2D(name="pool")(x)
        return keras.Model(inputs, layers.Dense(CLASSES, name="dense")(x))


def make_photos(folder: Path, count: int) -> None:
    """Write JPEG files of smooth random colours, ten folders of them."""
    random = np.random.default_rng(0)
    for label in range(CLASSES):
        (folder / str(label)).mkdir()
    for index in range(count):
        small = random.integers(0, 256, (8, 8, 3), np.uint8)
        image = Image.fromarray(small).resize((SIDE, SIDE), Image.Resampling.BICUBIC)
        image.save(folder / str(index % CLASSES) / f"{index:06d}.jpg", quality=85)


def speeds(folder: str) -> dict[int, list[float]]:
    """Return samples/s of each round by the number of processes."""
    data, found = Photos(folder), {0: [], 1: [], 2: []}
    order = ShuffledOrder(len(data), seed=0)
    first = 0
    for _ in range(ROUNDS):
        for processes, results in found.items():
            share = Shard(BatchPlan(BATCH, 1), 0, first, first * BATCH, (first + STEPS_A_ROUND) * BATCH)
            first += STEPS_A_ROUND
            with Readers({"data": data}, processes) as readers:
                fetch = readers.fetch_from("data")
                for _ in range(processes):
                    fetch(np.zeros(1, np.int64), None)  # until it has started
                reader = Reader(data, order, share, fetch)
                with Feed(read_ahead(reader.__getitem__, len(reader), processes or 2)) as feed:
                    begun = time.perf_counter()
                    samples = sum(batch.indices.size for batch in feed)
                    results.append(samples / (time.perf_counter() - begun))
    return found


def wait_fractions(folder: str, framework: str, processes: int) -> list[float]:
    """Train with 2 workers; give data_wait_fraction of the windows after the first, and their samples/s."""
    with tempfile.TemporaryDirectory() as run_dir:
        options = ["--framework", framework, "--device", "cpu", "--batch-size", "32", "--steps", "50"]
        options += ["--log-every", "10", "--read-workers", str(processes), "--run-dir", f"{run_dir}/run"]
        command = ["horovodrun", "-np", "2", sys.executable, "-m", "hvdtrain", *options]
        command += ["--task", f"{__file__}:Task", "--set", f"task_options.path={folder}"]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, cwd=run_dir)
        lines = map(json.loads, Path(run_dir, "run", "metrics.jsonl").read_text().splitlines())
        train = [line for line in lines if line["phase"] == "train"][1:]
    rate = statistics.median(line["samples_per_second"] for line in train)
    print(f"| {framework} | {processes} | {rate:,.0f} | ", end="")
    print(", ".join(f"{line['data_wait_fraction']:.1%}" for line in train), "|", flush=True)
    return [line["data_wait_fraction"] for line in train]


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--images", type=int, default=50_000)
    parser.add_argument("--frameworks", nargs="+", default=["torch", "tf"])
    arguments = parser.parse_args()
    folder = tempfile.mkdtemp(prefix="hvdtrain-photos-")
    try:
        begun = time.perf_counter()
        make_photos(Path(folder), arguments.images)
        print(f"{arguments.images:,} JPEG files of {SIDE}x{SIDE} in {time.perf_counter() - begun:.0f} s")
        print(f"load average {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores\n")
        found = speeds(folder)
        for processes, results in found.items():
            ratio = statistics.median(a / b for a, b in zip(results, found[0], strict=True))
            middle = f"{statistics.median(results):,.0f} ({min(results):,.0f}-{max(results):,.0f})"
            print(f"| {processes} | {middle} | {ratio:.2f} |")
        print("\n| framework | processes | samples/s | data_wait_fraction by window |")
        for framework in arguments.frameworks:
            for processes in (0, 1):
                wait_fractions(folder, framework, processes)
        print(f"load average {os.getloadavg()[0]:.1f}")
    finally:
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
