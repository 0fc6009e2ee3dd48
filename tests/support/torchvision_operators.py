"""torchvision with PyTorch for CPUs, where the package index has it for PyTorch with CUDA alone.

The test of an example installs it into a folder. Importing it fails there, as its operators are not loaded
and it says what two of them return for tensors without data: these are declared here.
"""

import subprocess
import sys
from pathlib import Path

from support.cases import command_line
from support.documents import ROOT

_SIGNATURE = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"


def install_torchvision(folder: Path) -> None:
    """Install the torchvision that belongs to the PyTorch of a set-up for CPUs, in any build."""
    lines = (ROOT / "requirements" / "torchvision-cpu.txt").read_text().splitlines()
    wanted = next(line.split()[0] for line in lines if line.startswith("torchvision=="))
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--only-binary", ":all:"]
    subprocess.run([*command, "--target", str(folder), wanted.removesuffix("+cpu")], check=True)


def command_line_with_torchvision(words: list[str], torchvision: str) -> int:
    """Do what ``python -m hvdtrain`` does in a pool, with the torchvision of a folder, if one is given."""
    if torchvision:
        import torch

        sys.path.append(torchvision)
        if "+cpu" not in (Path(torchvision) / "torchvision" / "version.py").read_text():
            for name in ("nms", "qnms"):
                torch.library.define(f"torchvision::{name}", _SIGNATURE)
    return command_line(words)
