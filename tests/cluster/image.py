"""The CPU image built without a container engine: ``python tests/cluster/image.py build|remove FOLDER``.

debootstrap makes the Debian that the Dockerfile starts from, buildah builds on it with chroot
isolation. Everything lies in a folder of ours; the machine's own images and containers stay alone.
For development, HVDTRAIN_TEST_IMAGE_ROOT names a root file system that was built before;
HVDTRAIN_TEST_IMAGE_BUILD names the folder of a build that still runs (tests/background.py).
"""

import functools
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlparse

import pytest

ROOT = Path(__file__).parents[2]
BASE = "docker.io/library/debian:bookworm-slim"
MIRROR = "http://deb.debian.org/debian"
ENVIRONMENT = "HVDTRAIN_TEST_IMAGE_ROOT"
BUILD_ENVIRONMENT = "HVDTRAIN_TEST_IMAGE_BUILD"
_BUILD_SECONDS = 1800
# What a finished build leaves in its folder: the path of the root file system, or why there is none
_BUILT, _FAILED = "built", "failed"
_CERTIFICATES = "/mnt/certificates.crt"
_TOOLS = ("debootstrap", "buildah", "mount", "chroot")
# What Debian's own slim image leaves out; dpkg leaves it out of later packages too
_SLIM = ("usr/share/doc", "usr/share/info", "usr/share/locale", "usr/share/man")


@functools.cache
def unavailable() -> str | None:
    """Say why this machine cannot build the image, or None where it can."""
    if os.getuid() != 0:
        return "building the image needs root"
    missing = [tool for tool in _TOOLS if not shutil.which(tool)]
    return f"building the image needs {', '.join(missing)}" if missing else None


@pytest.fixture(scope="session")
def image_root() -> Iterator[Path]:
    """Give the root file system of the CPU image: to be read, not written."""
    if built := os.environ.get(ENVIRONMENT):
        yield Path(built)
        return
    if building := os.environ.get(BUILD_ENVIRONMENT):
        yield awaited(Path(building))
        return
    if reason := unavailable():
        pytest.skip(reason)
    cache = Path(tempfile.mkdtemp(prefix="hvdtrain-image-"))
    try:
        yield build(cache)
    finally:
        remove(cache)


def awaited(folder: Path, seconds: float = _BUILD_SECONDS + 300) -> Path:
    """Wait for the build that runs in a folder, and return the root file system that it made."""
    deadline = time.monotonic() + seconds
    while not (folder / _BUILT).exists():
        assert not (folder / _FAILED).exists(), f"the image was not built: {(folder / _FAILED).read_text()}"
        assert time.monotonic() < deadline, f"the image was not built in {seconds} s"
        time.sleep(0.5)
    return Path((folder / _BUILT).read_text())


def build(cache_dir: Path, dockerfile: str = "docker/Dockerfile", **arguments: str) -> Path:
    """Build an image in an empty folder, which `remove` takes away again; give its root file system."""
    storage = Storage(cache_dir)
    if not storage.has(BASE):
        _make_base(storage)
    settings = _pip_settings()
    mounts = _mounts(settings)
    (cache_dir / "pip.conf").write_text(
        "[global]\n" + "".join(f"{option} = {value}\n" for option, value in settings.items())
    )
    mounts[str(cache_dir / "pip.conf")] = "/etc/pip.conf"
    if _has_torch_for_cpus(settings):  # and PyTorch's own index may be out of reach
        arguments = {"TORCH_INDEX": "", **arguments}
    arguments = {"BASE": BASE, **arguments}  # the Dockerfile's own is by digest, and on a registry
    words = ["bud", "--isolation", "chroot", "--pull-never", "--layers=false", "--format", "docker"]
    for name, value in arguments.items():
        words += ["--build-arg", f"{name}={value}"]
    for source, target in mounts.items():
        words += ["--volume", f"{source}:{target}:ro"]
    if wheels := os.environ.get("HVDTRAIN_CACHE"):  # a Horovod of the same key is not compiled twice
        Path(wheels).mkdir(parents=True, exist_ok=True)
        words += ["--volume", f"{wheels}:/tmp/hvdtrain"]
    storage.run(*words, "--file", str(ROOT / dockerfile), "--tag", "hvdtrain:test", str(ROOT))
    container = storage.run("from", "--pull-never", "hvdtrain:test").split()[-1]
    root = Path(storage.run("mount", container).split()[-1])
    for target in (*mounts.values(), "/tmp/hvdtrain"):
        _remove_mount_point(root / target.lstrip("/"))
    return root


def remove(cache_dir: Path) -> None:
    """Unmount and remove what `build` made."""
    if (cache_dir / "storage").exists():
        storage = Storage(cache_dir)
        storage.run("umount", "--all")
        storage.run("rm", "--all")
        # the storage of the overlay driver is a mount onto itself
        for mount in storage.mounts():
            subprocess.run(["umount", mount], check=True, timeout=30)
    shutil.rmtree(cache_dir)


class Storage:
    """buildah with images and containers in a folder of ours."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "tmp").mkdir(parents=True, exist_ok=True)

    @functools.cached_property
    def driver(self) -> str:
        """Overlays where the file system of the folder can hold them: nothing is copied."""
        kept = self.folder / "driver"
        if not kept.exists():
            lower, upper, work, merged = (self.folder / "trial" / part for part in "luwm")
            for part in (lower, upper, work, merged):
                part.mkdir(parents=True)
            options = f"lowerdir={lower},upperdir={upper},workdir={work}"
            command = ["mount", "-t", "overlay", "none", "-o", options, str(merged)]
            works = subprocess.run(command, capture_output=True, check=False, timeout=30).returncode == 0
            if works:
                subprocess.run(["umount", str(merged)], check=True, timeout=30)
            shutil.rmtree(self.folder / "trial")
            kept.write_text("overlay" if works else "vfs")
        return kept.read_text()

    def run(self, *words: str) -> str:
        """Run buildah to its good end and give what it printed to stdout."""
        command = ["buildah", "--root", str(self.folder / "storage"), "--runroot", str(self.folder / "run")]
        environ = {**os.environ, "STORAGE_DRIVER": self.driver, "TMPDIR": str(self.folder / "tmp")}
        return succeed([*command, *words], env=environ)

    def has(self, image: str) -> bool:
        return image in self.run("images", "--format", "{{.Name}}:{{.Tag}}").split()

    def mounts(self) -> list[str]:
        """Give the mounts in our folder, the innermost first."""
        lines = Path("/proc/self/mounts").read_text().splitlines()
        return [line.split()[1] for line in lines if line.split()[1].startswith(f"{self.folder}/")][::-1]


def succeed(command: list[str], **options: dict[str, str]) -> str:
    """Run a command of the build to its good end; its output goes to stderr as it comes."""
    log = tempfile.TemporaryFile(mode="w+")  # noqa: SIM115
    with log:
        streams = {"stdout": subprocess.PIPE, "stderr": log, "text": True}
        done = subprocess.run(command, **streams, timeout=_BUILD_SECONDS, check=False, **options)
        log.seek(0)
        said = done.stdout + log.read()
    assert done.returncode == 0, f"{' '.join(command[:8])} ... ended with {done.returncode}:\n{said[-6000:]}"
    return done.stdout


def _make_base(storage: Storage) -> None:
    """Make the image that the Dockerfiles start from: Debian without documents and translations."""
    container = storage.run("from", "scratch").strip()
    base = Path(storage.run("mount", container).strip())
    succeed(["debootstrap", "--variant=minbase", "bookworm", str(base), MIRROR])
    for folder in (*_SLIM, "var/lib/apt/lists", "var/cache/apt"):
        shutil.rmtree(base / folder, ignore_errors=True)
    (base / "var/cache/apt/archives/partial").mkdir(parents=True)
    excluded = "".join(f"path-exclude /{folder}/*\n" for folder in _SLIM)
    (base / "etc/dpkg/dpkg.cfg.d/docker").write_text(f"{excluded}force-unsafe-io\n")
    storage.run("umount", container)
    storage.run("commit", "--format", "docker", "--rm", container, BASE)


def _pip_settings() -> dict[str, str]:
    """Give pip's settings on this machine, from files and environment."""
    listed = succeed([sys.executable, "-m", "pip", "config", "list"])
    found: dict[str, str] = {}
    for line in listed.splitlines():
        name, _, value = line.partition("=")
        section, _, option = name.rpartition(".")
        if section in ("global", "install", ":env:"):
            found[option] = value.strip("'").replace("\\n", " ")
    return found


def _mounts(settings: dict[str, str]) -> dict[str, str]:
    """Give what the build sees of this machine: the local files that pip's settings name.

    Certificates get a path of their own, which the settings then name: a package writes the usual one.
    """
    mounts = {}
    if "cert" in settings:
        mounts[settings["cert"]] = settings["cert"] = _CERTIFICATES
    for word in " ".join(settings.values()).split():
        path = urlparse(word).path if word.startswith("file://") else word
        if path.startswith("/") and Path(path).exists():
            # the pages of an index link to files beside it
            seen = str(Path(path).parent) if word.startswith("file://") else path
            mounts[seen] = seen
    return mounts


def _has_torch_for_cpus(settings: dict[str, str]) -> bool:
    """Whether pip's settings name a folder with PyTorch's wheel for CPUs."""
    folders = [Path(word) for word in settings.get("find-links", "").split()]
    return any(folder.is_dir() and any(folder.glob("torch-*+cpu-*.whl")) for folder in folders)


def _remove_mount_point(path: Path) -> None:
    """Remove the empty file or folder that a mount left behind, and nothing else."""
    if path.is_dir() and not any(path.iterdir()):
        path.rmdir()
    elif path.is_file() and not path.stat().st_size:
        path.unlink()


def main() -> None:
    """Build the image in a folder, and say there how that ended; or remove a folder."""
    action, folder = sys.argv[1], Path(sys.argv[2])
    if action == "remove":
        remove(folder)
        return
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended by SIGTERM"))
    folder.mkdir()
    try:
        assert action == "build", action
        assert not unavailable(), unavailable()
        result, text = _BUILT, str(build(folder))
    except BaseException as error:
        result, text = _FAILED, str(error)
        raise
    finally:
        (folder / "result").write_text(text)
        (folder / "result").rename(folder / result)


if __name__ == "__main__":
    main()
