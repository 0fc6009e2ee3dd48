"""Checkpoints to try things on: a small state, a record, and what a folder holds."""

from pathlib import Path

import numpy as np

import hvdtrain
from hvdtrain.checkpoints import storage as checkpoint
from hvdtrain.checkpoints.manifest import Manifest
from hvdtrain.config import Config

FILES = ("model.safetensors", "optimizer.safetensors", "trainer.json")


def make_state(value: float = 1.0) -> dict[str, np.ndarray]:
    return {
        "model/a/kernel": np.full((3, 4), value, np.float32),
        "model/a/bias": np.arange(4, dtype=np.float32),
        "optimizer/momentum/a/kernel": np.full((3, 4), -value, np.float32),
        "optimizer/step": np.asarray(7, np.int64),
    }


def make_record(step: int = 120, **fields: object) -> Manifest:
    values = {
        "step": step,
        "samples": step * 4,
        "data_size": 100,
        "seconds": 1.5,
        "workers": 1,
        "config": Config(framework="torch", epochs=1).model_dump(mode="json"),
        "versions": {"hvdtrain": hvdtrain.__version__, "Fake": "1.0"},
    }
    return Manifest(**{**values, **fields})


def saved(folder: Path, step: int = 120, value: float = 1.0, **fields: object) -> Path:
    """Write a checkpoint, with the directories that it is in; return its own."""
    folder.mkdir(parents=True, exist_ok=True)
    return checkpoint.write(folder, make_state(value), make_record(step, **fields))


def contents(folder: Path) -> dict[str, bytes]:
    """Return the content of every file below a folder, by its path in it."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def equal(one: dict[str, np.ndarray], other: dict[str, np.ndarray]) -> bool:
    """Whether two states have the same names, types, shapes and bytes."""
    facts = [{name: (a.dtype, a.shape, a.tobytes()) for name, a in state.items()} for state in (one, other)]
    return facts[0] == facts[1]
