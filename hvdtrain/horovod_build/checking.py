"""The check at the end of a build: an all-reduce of two processes with every framework and controller."""

import os
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path

from hvdtrain.errors import HorovodBuildError
from hvdtrain.horovod_build.frameworks import TITLES
from hvdtrain.horovod_build.plan import Plan
from hvdtrain.horovod_build.processes import path_with, run_logged, scripts_folder

CHECK_LIMIT_SECONDS = 180
# The time that horovodrun and mpirun have to end their workers and remove their files.
CHECK_GRACE_SECONDS = 10

# With the variables of a batch system, mpirun would start its processes through that system; with
# those of an MPI job, it would act as a part of that job.
_CLEARED_PREFIXES = ("HOROVOD_", "SLURM_", "PBS_", "LSB_", "OMPI_COMM_", "PMIX_", "PMI_", "PRTE_")

_ALL_REDUCE = {
    "torch": """\
import torch
import horovod.torch as hvd
hvd.init()
total = hvd.allreduce(torch.full((1000,), hvd.rank() + 1.0), op=hvd.Sum).sum().item()
""",
    "tf": """\
import tensorflow as tf
import horovod.tensorflow as hvd
hvd.init()
total = float(tf.reduce_sum(hvd.allreduce(tf.fill([1000], hvd.rank() + 1.0), op=hvd.Sum)))
""",
}
_VERDICT = """\
assert hvd.size() == 2, f"{hvd.size()} processes, not 2"
assert total == 3000, f"the sum is {total}, not 3000"
print("all-reduce works", flush=True)
hvd.shutdown()
"""


def check_build(plan: Plan, echo: Callable[[str], None]) -> None:
    """Run an all-reduce of two processes with each framework over each controller.

    Args:
        plan: what was built.
        echo: called with a line of text for each all-reduce that worked.

    Raises:
        HorovodBuildError: If one failed, timed out or returned a wrong sum. The message has the end of
            its output.
    """
    controllers = (["mpi"] if plan.mpi else []) + ["gloo"]
    with tempfile.TemporaryDirectory(prefix="hvdtrain-check-") as name:
        for framework in plan.frameworks.values():
            for controller in controllers:
                _check_one(plan, framework.name, controller, Path(name))
                title = controller_title(controller)
                echo(f"Two processes: all-reduce works with {framework.title} over {title}.")


def controller_title(controller: str) -> str:
    """Return the name of a controller as it is displayed."""
    return {"mpi": "MPI", "gloo": "Gloo"}[controller]


def _check_one(plan: Plan, framework: str, controller: str, folder: Path) -> None:
    script = folder / f"all_reduce_{framework}.py"
    script.write_text(_ALL_REDUCE[framework] + _VERDICT, encoding="utf-8")
    command = [str(scripts_folder() / "horovodrun"), "-np", "2", f"--{controller}", "--disable-cache"]
    command += [sys.executable, str(script)]
    output: list[str] = []
    with (folder / "output.log").open("w", encoding="utf-8") as log:
        try:
            exit_code = run_logged(
                command,
                log,
                env=check_environment(plan, os.environ),
                folder=folder,
                limit_seconds=CHECK_LIMIT_SECONDS,
                grace_seconds=CHECK_GRACE_SECONDS,
                on_line=output.append,
            )
            fault = f"exit code {exit_code}" if exit_code else ""
        except (TimeoutError, OSError) as error:
            fault = str(error)
    if not fault and sum("all-reduce works" in line for line in output) != 2:
        fault = "not both processes reached the end"
    if fault:
        raise HorovodBuildError(
            f"Horovod was built, but two processes could not do an all-reduce with {TITLES[framework]} "
            f"over {controller_title(controller)}: {fault}. The end of the output:\n"
            + "".join(f"  {line}" for line in output[-15:]).rstrip(),
            "The build was removed.",
        )


def check_environment(plan: Plan, environment: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of the check: the built MPI first, and no variables of an outer job."""
    env = {name: value for name, value in environment.items() if not name.startswith(_CLEARED_PREFIXES)}
    env |= {
        "PATH": path_with(*([plan.mpi.programs] if plan.mpi else [])),
        "TF_CPP_MIN_LOG_LEVEL": "2",
        # The check is about the build; tensors stay in main memory.
        "CUDA_VISIBLE_DEVICES": "",
        "OMP_NUM_THREADS": "1",
    }
    if os.getuid() == 0:  # containers; Open MPI otherwise refuses
        env |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    return env
