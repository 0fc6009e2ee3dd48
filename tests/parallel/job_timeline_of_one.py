"""Two workers, of which rank 1 alone may record a timeline by its environment."""

import json
import os
from pathlib import Path

import horovod.torch as hvd
import torch

if __name__ == "__main__":
    launched = os.environ.get("OMPI_COMM_WORLD_RANK") or os.environ["HOROVOD_RANK"]
    if launched == "1":
        os.environ["HOROVOD_TIMELINE"] = "DYNAMIC"
    hvd.init()
    sums = [hvd.allreduce(torch.ones(1) + hvd.rank(), name="a", op=hvd.Sum).item() for _ in range(5)]
    if hvd.rank() == 0:
        Path("found.json").write_text(json.dumps({"sums": sums}))
    hvd.shutdown()
