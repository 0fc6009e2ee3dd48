"""Two workers: how busy rank 0 is while it waits for rank 1, which alone may record a timeline."""

import json
import os
import time
from pathlib import Path

import horovod.torch as hvd
import torch

if __name__ == "__main__":
    launched = os.environ.get("OMPI_COMM_WORLD_RANK") or os.environ["HOROVOD_RANK"]
    if launched == "1":
        os.environ["HOROVOD_TIMELINE"] = "DYNAMIC"
    hvd.init()
    shares, sums = [], []
    for number in range(4):
        begun, busy = time.monotonic(), time.process_time()
        if hvd.rank() and number:  # from the second time on, what is ready is agreed on in bits
            time.sleep(1)
        sums.append(hvd.allreduce(torch.ones(1) + hvd.rank(), name="a", op=hvd.Sum).item())
        shares.append((time.process_time() - busy) / (time.monotonic() - begun))
    if hvd.rank() == 0:
        Path("found.json").write_text(json.dumps({"shares": shares[1:], "sums": sums}))
    hvd.shutdown()
