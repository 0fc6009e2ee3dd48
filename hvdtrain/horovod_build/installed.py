"""The installed Horovod, and whether it fits the job, without importing it."""

import importlib
import importlib.machinery
import importlib.metadata
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hvdtrain.errors import HorovodBuildError
from hvdtrain.horovod_build.frameworks import (
    PIP_NAMES,
    TITLES,
    InstalledFramework,
    installed_framework,
    package_folder,
    same_version,
)
from hvdtrain.horovod_build.patching import horovod_patches, patches_digest

BUILD_COMMAND = "python -m hvdtrain build-horovod"

# Name of the framework in metadata.json, and its extension without the suffix.
_IN_METADATA = {"torch": "pytorch", "tf": "tensorflow"}
_EXTENSIONS = {"torch": "torch/mpi_lib_v2", "tf": "tensorflow/mpi_lib"}


@dataclass(frozen=True)
class InstalledBuild:
    """The Horovod in the environment of the running Python.

    Args:
        version: Horovod's version.
        torch: the PyTorch version it was built for; None if that extension is missing.
        tensorflow: the same for TensorFlow.
        mpi: the MPI that it was built with, e.g. "Open MPI 5.0.11"; None without MPI, or if
            the build does not record it.
        gloo: whether it has the Gloo controller (False if the build does not record it).
        nccl: whether it reduces on GPUs with NCCL (False if the build does not record it).
        patches: digest of the patches that were applied; empty if hvdtrain did not build it.
        key: identifies everything that the build depended on; empty if hvdtrain did not
            build it.
    """

    version: str
    torch: str | None
    tensorflow: str | None
    mpi: str | None
    gloo: bool
    nccl: bool
    patches: str = ""
    key: str = ""

    def describe(self) -> str:
        """Return one line with version, frameworks and controllers."""
        frameworks = [
            f"{title} {version}"
            for title, version in (("torch", self.torch), ("TensorFlow", self.tensorflow))
            if version
        ]
        built_for = " and ".join(frameworks) or "no framework"
        if not self.patches:
            return f"{self.version} for {built_for}; not built by hvdtrain"
        parts = [f"MPI ({self.mpi})"] if self.mpi else []
        parts += ["Gloo"] if self.gloo else []
        parts += ["NCCL"] if self.nccl else []
        return f"{self.version} for {built_for}; {', '.join(parts)}"

    def identify(self) -> str:
        """Return ``describe()`` and the digest of the patches: builds that differ in them may not agree."""
        return f"{self.describe()}; patches {self.patches}" if self.patches else self.describe()

    @property
    def command(self) -> str:
        """The command that builds Horovod again, for the same devices."""
        return BUILD_COMMAND + (" --gpu nccl" if self.nccl else "")

    def built_for(self, framework: str) -> str | None:
        """Return the version of "torch" or "tf" that it was built for, or None without that extension."""
        return self.torch if framework == "torch" else self.tensorflow


def installed_build() -> InstalledBuild | None:
    """Read what is installed, in milliseconds, without importing Horovod or a framework.

    Returns:
        The build, or None if no Horovod is installed.
    """
    importlib.invalidate_caches()
    folder = package_folder("horovod")
    if folder is None:
        return None
    try:
        version = importlib.metadata.version("horovod")
    except importlib.metadata.PackageNotFoundError:
        return None
    metadata = _read_metadata(folder)
    record = metadata.get("hvdtrain") or {}
    built_for = {
        name: str(metadata.get(_IN_METADATA[name], "")) if _extension(folder, name) else "" for name in TITLES
    }
    return InstalledBuild(
        version=version,
        torch=built_for["torch"] or None,
        tensorflow=built_for["tf"] or None,
        mpi=str(record.get("mpi", "MPI")) if metadata.get("have_mpi") else None,
        gloo=bool(metadata.get("have_gloo")),
        nccl=bool(metadata.get("have_nccl")),
        # Builds of hvdtrain before 0017-horovod-patches-are-diffs wrote "edits".
        patches=str(record.get("patches") or record.get("edits") or ""),
        key=str(record.get("key", "")),
    )


def is_intact(build: InstalledBuild, frameworks: Mapping[str, InstalledFramework]) -> bool:
    """Return whether the build's files exist, are complete, and are for these frameworks."""
    try:
        files = importlib.metadata.files("horovod") or []
    except importlib.metadata.PackageNotFoundError:
        return False
    for file in files:
        path = Path(str(file.locate()))
        if file.suffix == ".so" and (not path.is_file() or path.stat().st_size != file.size):
            return False
    return all(
        same_version(build.built_for(name) or "", framework.version) for name, framework in frameworks.items()
    )


def require_horovod(framework: str) -> InstalledBuild:
    """Raise an error unless Horovod is installed and fits the installed framework.

    Every job calls this when it starts. It imports neither Horovod nor a framework. A Horovod that
    hvdtrain did not build is accepted if it was built for the installed version.

    Args:
        framework: "torch" or "tf".

    Returns:
        The installed build.

    Raises:
        HorovodBuildError: If the framework or Horovod is missing, or Horovod lacks the extension for
            this framework or was built for another version. The message has the command that helps.
    """
    title = TITLES[framework]
    installed = installed_framework(framework)
    if installed is None:
        raise HorovodBuildError(
            f"{title} is not installed in this Python environment.",
            f"Install it, then build Horovod for it:\n"
            f"  pip install {PIP_NAMES[framework]}\n  {BUILD_COMMAND}",
        )
    build = installed_build()
    if build is None:
        raise HorovodBuildError(
            f"Horovod is not installed in this Python environment ({title} {installed.version} is).",
            f"Build and install it (a few minutes, once):\n  {BUILD_COMMAND}",
        )
    whose = "" if build.patches else " It is not a build of hvdtrain."
    built_for = build.built_for(framework)
    if built_for is None:
        raise HorovodBuildError(
            f"The installed Horovod ({build.describe()}) has no extension for {title}.{whose}",
            f"Build it for everything that is installed:\n  {build.command}",
        )
    if not same_version(built_for, installed.version):
        raise HorovodBuildError(
            f"The installed Horovod was built for {title} {built_for}, "
            f"but {title} {installed.version} is installed.{whose}",
            f"Build it again for what is installed:\n  {build.command}",
        )
    return build


def check_patches(build: InstalledBuild, *, elastic: bool) -> str:
    """Check that a build of hvdtrain has the patches of this hvdtrain. Local: no collective.

    Elastic jobs start Horovod again and again in one process, which some patches mend: with others, workers
    may crash. A Horovod that hvdtrain did not build has none, and is not checked.

    Args:
        build: the installed build.
        elastic: whether the job is elastic.

    Returns:
        What to tell the user; empty if the patches are the same.

    Raises:
        HorovodBuildError: If they are others and the job is elastic.
    """
    own = patches_digest(horovod_patches())
    if build.patches in ("", own):
        return ""
    found = f"built with patches {build.patches}, and this hvdtrain has patches {own}"
    if elastic:
        raise HorovodBuildError(
            f"The installed Horovod was {found}. In an elastic job its workers may crash.",
            f"Build it with the patches of this hvdtrain:\n  {build.command}",
        )
    return f"the installed Horovod was {found}; build it again: {build.command}"


def _read_metadata(folder: Path) -> dict[str, Any]:
    """Return the metadata that Horovod's build wrote, or an empty dict if it cannot be read."""
    try:
        metadata = json.loads((folder / "metadata.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return metadata if isinstance(metadata, dict) else {}


def _extension(folder: Path, framework: str) -> Path | None:
    """Return the extension for a framework and the running Python, or None if it is missing."""
    suffix = importlib.machinery.EXTENSION_SUFFIXES[0]
    path = folder / (_EXTENSIONS[framework] + suffix)
    return path if path.is_file() else None
