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
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

from hvdtrain.errors import HorovodBuildError, Interrupted
from hvdtrain.horovod_build.cache import BuildCache
from hvdtrain.horovod_build.checking import check_build
from hvdtrain.horovod_build.compiling import compile_wheel
from hvdtrain.horovod_build.installed import InstalledBuild, installed_build, is_intact
from hvdtrain.horovod_build.ownership import exposure
from hvdtrain.horovod_build.plan import BuildRequest, Plan, make_plan
from hvdtrain.horovod_build.source import VERSION


def build_horovod(request: BuildRequest, echo: Callable[[str], None]) -> InstalledBuild:
    """Build Horovod for the frameworks in the environment of the running Python, and install it.

    A build that is installed or cached is not built again.

    Args:
        request: what to build.
        echo: called with every step as a line of text.

    Returns:
        The installed build.

    Raises:
        HorovodBuildError: If something is missing or a step failed. The environment then has the
            Horovod that it had before, or none.
        Interrupted: If SIGTERM was received. No process that the build started is left running.
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

    A wheel is code, and lies beside its own checksum: who can write both chooses the code that is installed.
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
    return _verify_installed(plan, echo)


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


def _verify_installed(plan: Plan, echo: Callable[[str], None]) -> InstalledBuild:
    installed = installed_build()
    if installed is None or installed.key != plan.key:
        raise HorovodBuildError(
            "Horovod was built and installed, but another Horovod is found before it.",
            "Look at PYTHONPATH, and at folders named horovod on it.",
        )
    echo("Installed.")
    return installed


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
