"""The steps of a build, in order: compiling the patched source, installing the wheel, a check."""

import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import psutil

from hvdtrain.errors import HorovodBuildError
from hvdtrain.horovod_build.cache import VERSION, BuildCache, fetch_source, unpack
from hvdtrain.horovod_build.installed import TITLES, InstalledBuild, installed_build
from hvdtrain.horovod_build.patching import apply_patches, horovod_patches
from hvdtrain.horovod_build.plan import BuildRequest, Plan, make_plan
from hvdtrain.horovod_build.toolchain import Gpu, path_with
from hvdtrain.host.processes import deadline, kill_group, run_limited, start_group
from hvdtrain.storage.text import counted

Echo = Callable[[str], None]

CHECK_LIMIT_SECONDS = 180
PIP_LIMIT_SECONDS = 900
COMPILE_LIMIT_SECONDS = 2 * 3600
GIB_PER_JOB = 2.0

# What is being built, at the root of the source tree. The patch build/0010-build-record makes CMake
# copy it into horovod/metadata.json, where `installed_build` reads it.
RECORD_FILE = "hvdtrain-build.json"

# With the variables of a batch system, mpirun would start its processes through that system; with
# those of an MPI job, it would act as a part of that job.
_CLEARED_IN_CHECK = ("HOROVOD_", "SLURM_", "PBS_", "LSB_", "OMPI_COMM_", "PMIX_", "PMI_", "PRTE_")
_OVER_GLOO = {"HOROVOD_CONTROLLER": "gloo", "HOROVOD_CPU_OPERATIONS": "gloo"}
# Variables of the user's environment that would change the build without changing its key.
_CLEARED_PREFIXES = ("HOROVOD_", "CMAKE_", "CCL_")
_CLEARED_CUDA = ("CUDACXX", "CUDAFLAGS", "CUDA_HOME", "CUDA_PATH")
_CLEARED = ("MAKEFLAGS", "MFLAGS", "MAKELEVEL", "MPI_HOME", "DESTDIR", *_CLEARED_CUDA)

_ERROR = re.compile(
    r"\berror: (?!subprocess-exited|command )|CMake Error|undefined reference|No space left|Killed"
)
_PERCENT = re.compile(r"\[ *(\d+)%\]")

# in one process: extensions that cannot be loaded, or find no libraries, end here
_ALL_REDUCE = {
    "torch": """
import torch, horovod.torch as hvd
hvd.init()
assert hvd.allreduce(torch.ones(1000), op=hvd.Sum).sum().item() == 1000
""",
    "tf": """
import tensorflow as tf, horovod.tensorflow as hvd
hvd.init()
assert float(tf.reduce_sum(hvd.allreduce(tf.ones([1000]), op=hvd.Sum))) == 1000
""",
}


def build_horovod(request: BuildRequest, echo: Echo) -> InstalledBuild:
    """Build Horovod for the frameworks in the environment of the running Python, and install it.

    A build that is installed or cached is not built again. After an error, such as Interrupted by a signal,
    the environment has the Horovod that it had before, or none, and no process is left running.
    """
    echo(f"Horovod {VERSION}: looking at this environment.")
    try:
        cache, plan = BuildCache(), make_plan(request)
        echo(f"For {plan.describe()}.")
        for line in plan.left_out:
            echo(line)
        with cache.lock(lambda: echo("Waiting for another build.")):
            return _build_locked(plan, request, cache, echo)
    except OSError as error:
        raise HorovodBuildError(
            f"{error.filename or 'A file'}: {error.strerror or error}.",
            "A build takes 0.5 GiB in the folder for temporary files (TMPDIR), and 0.1 GiB in the cache "
            "(HVDTRAIN_CACHE).",
        ) from error


def _build_locked(plan: Plan, request: BuildRequest, cache: BuildCache, echo: Echo) -> InstalledBuild:
    installed = installed_build()
    if installed is not None and not request.force and _is_of(installed, plan):
        echo("Already installed.")
        return installed
    wheel = None if request.force else cache.wheel(plan.key)
    if wheel:
        echo(f"Built before: {wheel}")
    else:
        wheel = compile_wheel(plan, cache, request.jobs, echo)
    echo("Installing.")
    _pip("install", "--no-deps", "--force-reinstall", "--no-index", str(wheel))
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
    if installed is None or not _is_of(installed, plan):
        raise HorovodBuildError(
            "Horovod was built and installed, but another Horovod is found before it.",
            "Look at PYTHONPATH, and at folders named horovod on it.",
        )
    echo("Installed.")
    return installed


def _is_of(build: InstalledBuild, plan: Plan) -> bool:
    """Return whether an installed build is the one of a plan, with all its extensions."""
    return build.key == plan.key and all(map(build.built_for, plan.frameworks))


def _pip(*arguments: str) -> None:
    # -P: the current directory may contain a folder named horovod
    command = [sys.executable, "-P", "-m", "pip", *arguments, "--disable-pip-version-check"]
    env = {name: value for name, value in os.environ.items() if name not in ("PIP_TARGET", "PIP_PREFIX")}
    done = run_limited(command, PIP_LIMIT_SECONDS, env)
    if done.code != 0:
        lines = (done.output + done.errors).splitlines()[-8:]
        raise HorovodBuildError(f"pip {arguments[0]} failed. It said:\n{_shown(lines)}")


def _shown(lines: Sequence[str]) -> str:
    """Return lines of an output for a message; a compiler's can be thousands of characters long."""
    return "\n".join(f"  {line[:200]}" for line in lines)


def compile_wheel(plan: Plan, cache: BuildCache, jobs: int, echo: Echo) -> Path:
    """Download, patch and compile Horovod, and put the wheel into the cache; return its path there."""
    if not jobs:
        gib = psutil.virtual_memory().available / 2**30
        jobs = max(1, min(len(os.sched_getaffinity(0)), int(gib / GIB_PER_JOB)))
    log = cache.folder / "logs" / f"{plan.key}.log"
    echo("Getting the source.")
    archive = fetch_source(cache)
    with tempfile.TemporaryDirectory(prefix="hvdtrain-horovod-") as name:
        folder = Path(name)
        source = unpack(archive, folder)
        apply_patches(source, horovod_patches())
        (source / RECORD_FILE).write_text(json.dumps(plan.record(), indent=1), encoding="utf-8")
        echo(f"Compiling with {counted(jobs, 'job')} at a time; log: {log}")
        started = time.monotonic()
        env = build_environment(plan, folder, jobs)
        command = [sys.executable, "-m", "pip", "wheel", "--verbose", "--no-build-isolation", "--no-deps"]
        command += ["--no-index", "--disable-pip-version-check", "--wheel-dir", str(folder), str(source)]
        lines = run_logged(command, log, env, folder, echo)
        built = next(folder.glob("horovod-*.whl"), None)
        if built is None:
            raise _compile_error(lines, log)
        stored = cache.store(plan.key, built)
    mib = stored.stat().st_size / 2**20
    echo(f"Compiled in {time.monotonic() - started:.0f} s; the wheel has {mib:.1f} MiB.")
    return stored


def run_logged(
    command: Sequence[str], log: Path, env: Mapping[str, str], folder: Path, echo: Echo
) -> list[str]:
    """Run a compilation and return the lines of its output, which a log gets, too."""
    lines: list[str] = []
    shown, started = 0, time.monotonic()
    pipe = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "encoding": "utf-8", "errors": "replace"}
    process = start_group(command, env=env, cwd=folder, **pipe)
    assert process.stdout is not None

    def stop() -> None:
        lines.append(f"error: not done after {COMPILE_LIMIT_SECONDS:,} seconds")
        kill_group(process)

    try:
        with process.stdout, log.open("w", encoding="utf-8") as file, deadline(COMPILE_LIMIT_SECONDS, stop):
            for line in process.stdout:
                file.write(line)
                file.flush()
                lines.append(line.rstrip())
                percent = _PERCENT.search(line)
                if percent and int(percent[1]) >= shown + 10:
                    shown = int(percent[1])
                    echo(f"  {shown} % after {time.monotonic() - started:.0f} s")
    finally:
        kill_group(process)
    return lines


def _compile_error(lines: Sequence[str], log: Path) -> HorovodBuildError:
    """Return the error with the first errors of a compiler, or the end of its output."""
    errors = [place for place, line in enumerate(lines) if _ERROR.search(line)][:3]
    # CMake explains an error below it
    near = [lines[place : place + (12 if "CMake Error" in lines[place] else 4)] for place in errors]
    digest = _shown([line for part in near for line in part] or lines[-20:])
    memory = "\nThe compiler was killed, most likely for lack of memory: try --jobs 1."
    return HorovodBuildError(
        f"Horovod did not compile. The first errors:\n{digest}",
        f"The whole log: {log}" + (memory if "Killed" in digest else ""),
    )


def build_environment(plan: Plan, folder: Path, jobs: int) -> dict[str, str]:
    """Return the environment of the compilation."""
    env = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(_CLEARED_PREFIXES) and name not in _CLEARED
    }
    first = [plan.mpi.programs] if plan.mpi else []
    first += [plan.gpu.cuda_home / "bin"] if plan.gpu else []
    env |= {
        "PATH": path_with(*first),
        "PYTHONUNBUFFERED": "1",
        "TF_CPP_MIN_LOG_LEVEL": "3",
        "CXX": plan.toolchain.cxx,
        "MAKEFLAGS": f"-j{jobs}",
        "CMAKE_GENERATOR": "Unix Makefiles",
        # Gloo requests compatibility with a CMake older than CMake 4 supports.
        "CMAKE_POLICY_VERSION_MINIMUM": "3.5",
        # Libraries that are linked by path but not needed would be recorded in the extension with
        # that path if they have no SONAME.
        "LDFLAGS": f"-Wl,--as-needed {os.environ.get('LDFLAGS', '')}".strip(),
        "HOROVOD_CMAKE": str(plan.toolchain.cmake),
        "HOROVOD_WITH_GLOO": "1",
        "HOROVOD_WITHOUT_MXNET": "1",
        "HOROVOD_WITHOUT_NVTX": "1",
        "HVDTRAIN_RPATH": ";".join(plan.rpath),
    }
    for name, variable in (("torch", "PYTORCH"), ("tf", "TENSORFLOW")):
        env[f"HOROVOD_{'WITH' if name in plan.frameworks else 'WITHOUT'}_{variable}"] = "1"
    if torch := plan.frameworks.get("torch"):
        # what the patch build/0026-pytorch-by-its-files reads, so that configuring does not import PyTorch
        env |= {
            "HVDTRAIN_PYTORCH": str(torch.folder),
            "HVDTRAIN_PYTORCH_VERSION": torch.version,
            "HVDTRAIN_PYTORCH_CXX_STANDARD": str(torch.cxx_standard),
            "HVDTRAIN_PYTORCH_CXX11_ABI": str(int(torch.cxx11_abi)),
        }
    if plan.arch_flags:
        env["HOROVOD_BUILD_ARCH_FLAGS"] = plan.arch_flags
    if plan.mpi:
        env |= {"HOROVOD_WITH_MPI": "1", "MPI_HOME": str(plan.mpi.programs.parent)}
    else:
        env["HOROVOD_WITHOUT_MPI"] = "1"
    return env | (_gpu_environment(plan.gpu, folder) if plan.gpu else {})


def _gpu_environment(gpu: Gpu, folder: Path) -> dict[str, str]:
    # NVIDIA's wheels have libnccl.so.2 and libcudart.so.13, but CMake searches for names without a
    # number. A folder of links provides those.
    nccl = folder / "nccl"
    (nccl / "lib").mkdir(parents=True)
    (nccl / "include").symlink_to(gpu.nccl_headers)
    (nccl / "lib" / "libnccl.so").symlink_to(gpu.nccl_library)
    if gpu.runtime:
        (nccl / "lib" / "libcudart.so").symlink_to(gpu.runtime)
    env = {
        "CMAKE_LIBRARY_PATH": str(nccl / "lib"),
        # nvcc passes only lib64/ to the linker, which the wheels do not have.
        "LIBRARY_PATH": f"{gpu.cuda_home / 'lib'}:{os.environ.get('LIBRARY_PATH', '')}".rstrip(":"),
        "HOROVOD_GPU": "CUDA",
        "HOROVOD_GPU_OPERATIONS": "NCCL",
        "HOROVOD_CUDA_HOME": str(gpu.cuda_home),
        "CUDA_HOME": str(gpu.cuda_home),
        "HOROVOD_NCCL_HOME": str(nccl),
        "HOROVOD_NCCL_LINK": "SHARED",
    }
    return env | ({"HOROVOD_BUILD_CUDA_CC_LIST": gpu.architectures} if gpu.architectures else {})


def check_build(plan: Plan, echo: Echo) -> None:
    """Load each extension, start Horovod, and run an all-reduce, in one process."""
    env = check_environment(plan, os.environ)
    for name in plan.frameworks:
        fault = over_mpi = _check_one(name, env)
        if fault and plan.mpi:  # some clusters' MPI works only in processes that mpirun started
            fault = _check_one(name, env | _OVER_GLOO)
        if fault:
            raise HorovodBuildError(
                f"Horovod was built, but does not work with {TITLES[name]}: {fault}", "The build was removed."
            )
        if over_mpi:
            echo(f"With {TITLES[name]}, MPI did not work in a process without mpirun: {over_mpi}")
            echo("Gloo did. To try MPI with mpirun: horovodrun --mpi -np 2 python -m hvdtrain doctor")
        echo(f"It works with {TITLES[name]}.")


def _check_one(framework: str, env: Mapping[str, str]) -> str:
    """Return how the check of an extension failed, with its output; empty if it did not."""
    command = [sys.executable, "-P", "-c", _ALL_REDUCE[framework]]  # -P: a folder here may be named horovod
    done = run_limited(command, CHECK_LIMIT_SECONDS, env)
    if done.code == 0:
        return ""
    how = f"exit code {done.code}" if done.code is not None else "it did not end in time"
    return f"{how}. Its output:\n{_shown((done.output + done.errors).splitlines()[-15:])}"


def check_environment(plan: Plan, environment: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of the check: the built MPI first, and no variables of an outer job."""
    env = {name: value for name, value in environment.items() if not name.startswith(_CLEARED_IN_CHECK)}
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
