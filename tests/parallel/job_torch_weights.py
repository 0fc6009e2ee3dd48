"""Write files of weights into this folder: as training scripts save them, and as they should not be."""

import os
import sys
from pathlib import Path

import torch
from safetensors.torch import save_file

weights = torch.load(sys.argv[1], weights_only=True)


class Code:
    def __reduce__(self):
        return os.system, ("touch ran",)


def renamed(name):
    return name.replace("conv1", "conv_1")


saved = {"epoch": 3, "state_dict": {f"module.{name}": value for name, value in weights.items()}}
torch.save(saved, "parallel.pth")
torch.save({"model": weights, "lr": torch.ones(1)}, "legacy.pt", _use_new_zipfile_serialization=False)
save_file(weights, "whole.safetensors")
torch.save({"state_dict": weights, "note": Code()}, "code.pt")
torch.save({renamed(name): value for name, value in weights.items()}, "renamed.pt")
torch.save({**weights, "dense2.bias": torch.zeros(11)}, "shape.pt")
torch.save({"epoch": 3}, "other.pt")
torch.save([1, 2], "list.pt")
Path("empty.pt").touch()
for whole, cut in (("parallel.pth", "cut.pt"), ("whole.safetensors", "cut.safetensors")):
    content = Path(whole).read_bytes()
    Path(cut).write_bytes(content[: len(content) // 2])
