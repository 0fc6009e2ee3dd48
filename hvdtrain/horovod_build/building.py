"""The steps of a build, in order."""

import contextlib
import hashlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path

from hvdtrain.errors import HorovodBuildError, Interrupted
from hvdtrain.horovod_build.cache import VERSION, BuildCache, exposure
from hvdtrain.horovod_build.compiling import compile_wheel
from hvdtrain.horovod_build.installed import TITLES, InstalledBuild, installed_build, is_intact
from hvdtrain.horovod_build.plan import BuildRequest, Plan, make_plan
from hvdtrain.horovod_build.processes import path_with, run_logged, scripts_folder

CHECK_LIMIT_SECONDS = 180
# The time that horovodrun and mpirun have to end their workers and remove their files.
CHECK_GRACE_SECONDS = 10

# With the variables of a batch system, mpirun would start its processes through that system; with
# those of an MPI job, it would act as a part of that job.
_CLEARED_PREFIXES = ("HOROVOD_", "SLURM_", "PBS_", "LSB_", "OMPI_COMM_", "PMIX_", "PMI_", "PRTE_")

_CONTROLLERS = {"mpi": "MPI", "gloo": "Gloo"}
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
    """Run an all-reduce of two processes with each framework over each controller."""
    controllers = (["mpi"] if plan.mpi else []) + ["gloo"]
    with tempfile.TemporaryDirectory(prefix="hvdtrain-check-") as name:
        for framework in plan.frameworks.values():
            for controller in controllers:
                _check_one(plan, framework.name, controller, Path(name))
                echo(
                    f"Two processes: all-reduce works with {framework.title} over {_CONTROLLERS[controller]}."
                )


def _check_one(plan: Plan, framework: str, controller: str, folder: Path) -> None:
    script = folder / f"all_reduce_{framework}.py"
    script.write_text(_ALL_REDUCE[framework] + _VERDICT, encoding="utf-8")
    command = [str(scripts_folder() / "horovodrun"), "-np", "2", f"--{controller}", "--disable-cache"]
    command += [sys.executable, str(script)]
    output: list[str] = []
    with (folder / "output.log").open("w", encoding="utf-8") as log:
        try:
            exit_code = run_logged(
                command, log, env=check_environment(plan, os.environ), folder=folder,
                limit_seconds=CHECK_LIMIT_SECONDS, grace_seconds=CHECK_GRACE_SECONDS, on_line=output.append,
            )  # fmt: skip
            fault = f"exit code {exit_code}" if exit_code else ""
        except (TimeoutError, OSError) as error:
            fault = str(error)
    if not fault and sum("all-reduce works" in line for line in output) != 2:
        fault = "not both processes reached the end"
    if fault:
        raise HorovodBuildError(
            f"Horovod was built, but two processes could not do an all-reduce with {TITLES[framework]} "
            f"over {_CONTROLLERS[controller]}: {fault}. The end of the output:\n"
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


def build_horovod(request: BuildRequest, echo: Callable[[str], None]) -> InstalledBuild:
    """Build Horovod for the frameworks in the environment of the running Python, and install it.

    A build that is installed or cached is not built again. After an error, such as Interrupted by SIGTERM,
    the environment has the Horovod that it had before, or none, and no process is left running.
    """
    echo(f"Horovod {VERSION}: looking at this environment.")
    with _trusted_cache(request.cache_folder, echo) as cache:
        plan = make_plan(replace(request, cache_dir=cache.folder))
        echo(f"For {plan.describe()}.")
        for line in plan.left_out:
            echo(line)
        environment = hashlib.sha256(sys.prefix.encode()).hexdigest()[:16]
        with (
            _ended_by_sigterm(),
            cache.lock(
                f"environment-{environment}", lambda: echo("Waiting for another build in this environment.")
            ),
            cache.lock(
                f"build-{plan.key}", lambda: echo("Waiting for another process that builds the same.")
            ),
        ):
            return _build_locked(plan, request, cache, echo)


@contextlib.contextmanager
def _trusted_cache(folder: Path, echo: Callable[[str], None]) -> Iterator[BuildCache]:
    """Give the cache in a folder, or an empty one for this build if somebody else can change that folder.

    A wheel is code, and lies next to its own checksum: who can write both chooses the code that is installed.
    """
    reason = exposure(folder / "wheels")
    if not reason:
        yield BuildCache(folder)
        return
    echo(f"The cache {folder} is not used: {reason}, who could replace what is installed from it.")
    echo("Make it yours alone (chown, chmod go-w), or set HVDTRAIN_CACHE to a folder that is.")
    own = Path(tempfile.mkdtemp(prefix="hvdtrain-cache-"))
    yield BuildCache(own)
    shutil.rmtree(own, ignore_errors=True)  # after a failure it is kept: the log is in it


def _build_locked(
    plan: Plan, request: BuildRequest, cache: BuildCache, echo: Callable[[str], None]
) -> InstalledBuild:
    installed = installed_build()
    if (
        not request.force
        and installed
        and installed.key == plan.key
        and is_intact(installed, plan.frameworks)
    ):
        echo("Already installed.")
        return installed
    wheel = None if request.force else cache.wheel(plan.key)
    if wheel:
        echo(f"Built before: {wheel}")
    else:
        wheel = compile_wheel(plan, cache, request.jobs, echo)
    echo("Installing.")
    _pip("install", "--no-deps", "--force-reinstall", "--no-index", str(wheel))
    if request.check:
        try:
            check_build(plan, echo)
        except BaseException as error:
            # The next build must not find an unchecked build installed. A wheel that failed is
            # removed from the cache; one whose check was interrupted can be checked again.
            if isinstance(error, HorovodBuildError):
                cache.remove(plan.key)
            _pip("uninstall", "--yes", "horovod")
            raise
    installed = installed_build()
    if installed is None or installed.key != plan.key:
        raise HorovodBuildError(
            "Horovod was built and installed, but another Horovod is found before it.",
            "Look at PYTHONPATH, and at folders named horovod on it.",
        )
    echo("Installed.")
    return installed


@contextlib.contextmanager
def _ended_by_sigterm() -> Iterator[None]:
    """Let SIGTERM end the build as Ctrl-C does: by an exception, so that started processes are ended."""
    in_main_thread = threading.current_thread() is threading.main_thread()
    if not in_main_thread or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        yield  # only the main thread may set handlers, and the caller's handler has precedence
        return

    def stop(number: int, frame: object) -> None:
        raise Interrupted(number)

    signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _pip(*arguments: str) -> None:
    command = [sys.executable, "-m", "pip", *arguments, "--disable-pip-version-check"]
    env = {name: value for name, value in os.environ.items() if name not in ("PIP_TARGET", "PIP_PREFIX")}
    done = subprocess.run(
        command,
        env=env,
        cwd=tempfile.gettempdir(),  # the current directory may contain a folder named horovod
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    if done.returncode:
        raise HorovodBuildError(
            f"pip {arguments[0]} failed. It said:\n"
            + "\n".join(f"  {line}" for line in done.stdout.splitlines()[-8:])
        )
