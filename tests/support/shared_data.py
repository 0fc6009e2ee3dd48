"""Data that lies beside the checkout, or in the folder that HVDTRAIN_DATA names; not everybody has it."""

import os
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def shared_data(name: str) -> Path:
    """Return a file of the shared data, or skip the test where it is absent (it needs the mark may_skip)."""
    folder = Path(os.environ.get("HVDTRAIN_DATA") or ROOT.parent / "shared" / "data")
    if not (folder / name).is_file():
        pytest.skip(f"{folder} has no {name}; $HVDTRAIN_DATA may name another folder")
    return folder / name
