"""Compiling the patched source into a wheel, with progress and a short error message."""

import contextlib
import json
import os
import re
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import psutil

from hvdtrain.errors import HorovodBuildError
from hvdtrain.horovod_build.cache import BuildCache, fetch_source, unpack
from hvdtrain.horovod_build.patching import apply_patches, horovod_patches
from hvdtrain.horovod_build.plan import Plan
from hvdtrain.horovod_build.processes import path_with, run_logged
from hvdtrain.horovod_build.toolchain import Gpu
from hvdtrain.storage.text import counted

# What is being built, at the root of the source tree. The patch build/0010-build-record makes CMake
# copy it into horovod/metadata.json, where `installed_build` reads it.
RECORD_FILE = "hvdtrain-build.json"

COMPILE_LIMIT_SECONDS = 2 * 3600
GIB_PER_JOB = 2.0
MAX_ERRORS_SHOWN = 3

# Variables of the user's environment that would change the build without changing its key.
_CLEARED_PREFIXES = ("HOROVOD_", "CMAKE_", "CCL_")
_CLEARED_CUDA = ("CUDACXX", "CUDAFLAGS", "CUDA_HOME", "CUDA_PATH")
_CLEARED = ("MAKEFLAGS", "MFLAGS", "MAKELEVEL", "MPI_HOME", "DESTDIR", *_CLEARED_CUDA)

_ERROR = re.compile(r"\berror: \S|CMake Error|undefined reference|No space left|Killed")
_NO_ERROR = re.compile(r"-W\S*error|error: subprocess-exited|error: command .* failed")
_PERCENT = re.compile(r"\[ *(\d+)%\]")


def compile_wheel(plan: Plan, cache: BuildCache, jobs: int, echo: Callable[[str], None]) -> Path:
    """Download, patch and compile Horovod, and put the wheel into the cache; return its path there."""
    jobs = jobs or default_jobs()
    log = cache.new_log(plan.key)
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
        wheel = _build_wheel(source, folder, env, log, echo)
        stored = cache.store(plan.key, wheel)
    mib = stored.stat().st_size / 2**20
    echo(f"Compiled in {duration(time.monotonic() - started)}; the wheel has {mib:.1f} MiB.")
    return stored


def _build_wheel(
    source: Path, folder: Path, env: Mapping[str, str], log: Path, echo: Callable[[str], None]
) -> Path:
    wheels = folder / "wheels"
    command = [sys.executable, "-m", "pip", "wheel", "--verbose", "--no-build-isolation", "--no-deps"]
    command += ["--no-index", "--disable-pip-version-check", "--wheel-dir", str(wheels), str(source)]
    lines: list[str] = []
    with log.open("w", encoding="utf-8") as file, _progress(echo) as show:

        def on_line(line: str) -> None:
            lines.append(line.rstrip())
            percent = _PERCENT.search(line)
            if percent:
                show(int(percent.group(1)))

        try:
            exit_code = run_logged(
                command, file, env=env, folder=folder, limit_seconds=COMPILE_LIMIT_SECONDS, on_line=on_line
            )
        except TimeoutError as error:
            raise HorovodBuildError(f"Compiling Horovod: {error}.", f"The whole log: {log}") from error
    built = sorted(wheels.glob("horovod-*.whl")) if exit_code == 0 else []
    if not built:
        digest = error_digest(lines)
        memory = "\nThe compiler was killed, most likely for lack of memory: try --jobs 1."
        raise HorovodBuildError(
            f"Horovod did not compile. The first errors:\n{digest}",
            f"The whole log: {log}" + (memory if "Killed" in digest else ""),
        )
    return built[0]


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
    if "torch" in plan.frameworks:
        torch = plan.frameworks["torch"]
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
    if plan.gpu:
        env |= _gpu_environment(plan.gpu, folder)
    return env


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
    if gpu.architectures:
        env["HOROVOD_BUILD_CUDA_CC_LIST"] = gpu.architectures
    return env


def default_jobs() -> int:
    """Return the number of compile jobs for which there are cores and memory."""
    gib = psutil.virtual_memory().available / 2**30
    return max(1, min(len(os.sched_getaffinity(0)), int(gib / GIB_PER_JOB)))


def error_digest(lines: Sequence[str]) -> str:
    """Return the first errors of a compiler's log with the lines around them, or the end of the log."""
    errors = [
        number for number, line in enumerate(lines) if _ERROR.search(line) and not _NO_ERROR.search(line)
    ]
    if not errors:
        return "\n".join(f"  {_shortened(line)}" for line in lines[-20:])
    shown: dict[int, str] = {}
    for number in errors[:MAX_ERRORS_SHOWN]:
        after = 12 if "CMake Error" in lines[number] else 4  # CMake explains the error below it
        for near in range(max(0, number - 2), min(len(lines), number + after)):
            shown[near] = f"  {_shortened(lines[near])}"
    more = len(errors) - MAX_ERRORS_SHOWN
    return "\n".join(shown[number] for number in sorted(shown)) + (
        f"\n  ... and {more} more." if more > 0 else ""
    )


def duration(seconds: float) -> str:
    """Format seconds: "42 s", "4 min 7 s"."""
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if minutes else f"{rest} s"


def _shortened(line: str, width: int = 200) -> str:
    # A compiler's command line can be thousands of characters long.
    return line if len(line) <= width else line[: width - 4] + " ..."


@contextlib.contextmanager
def _progress(echo: Callable[[str], None]) -> Iterator[Callable[[int], None]]:
    """Display make's percentage: as a bar on a terminal, otherwise as a line every ten percent."""
    if sys.stdout.isatty():
        from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

        columns = (TextColumn("compiling"), BarColumn(), TextColumn("{task.percentage:>3.0f} %"))
        with Progress(*columns, TimeElapsedColumn()) as bar:
            task = bar.add_task("compiling", total=100)
            yield lambda percent: bar.update(task, completed=percent)
        return
    started = time.monotonic()
    reported = 0

    def say(percent: int) -> None:
        nonlocal reported
        if percent >= reported + 10:
            reported = percent - percent % 10
            echo(f"  {percent} % after {duration(time.monotonic() - started)}")

    yield say
