"""Takes a run up again and again in child processes, which find all modules imported.

Start number N begins when there is a file ``start-N``; ``pid-N`` then holds its process and
``ended-N`` its exit code. After one that ends well, this script ends, too.
"""

import os
import sys
import time
import traceback
from itertools import count
from pathlib import Path

import rich.console  # noqa: F401 - imported for the children, as are those below
import safetensors.numpy  # noqa: F401
import tensorboard.summary.writer.record_writer  # noqa: F401
import torch._dynamo  # noqa: F401

import hvdtrain
import hvdtrain.backends.torch.backend


def write(name: str, number: int) -> None:
    """Write a file whole."""
    Path(f"{name}.new").write_text(str(number))
    Path(f"{name}.new").rename(name)


def train(task: str, hidden: str, steps: str) -> None:
    """Train in a child process, saving at every step."""
    options = {"task_options": {"hidden": int(hidden)}, "steps": int(steps)}
    saving = {"save_every": 1, "keep_last": 2, "run_dir": "run", "resume": "auto"}
    try:
        hvdtrain.train(task, framework="torch", **options, **saving)
        os._exit(0)
    except BaseException:
        traceback.print_exc()
        os._exit(1)


for start in count():
    while not Path(f"start-{start}").exists():
        time.sleep(0.005)
    sys.stdout.flush()
    pid = os.fork()
    if pid == 0:
        train(*sys.argv[1:])
    write(f"pid-{start}", pid)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    write(f"ended-{start}", code)
    if code == 0:
        break
