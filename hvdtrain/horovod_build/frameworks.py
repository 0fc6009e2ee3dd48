"""The installed PyTorch and TensorFlow, read from their files without importing them."""

import importlib.metadata
import importlib.util
import re
from dataclasses import dataclass, field
from pathlib import Path

from hvdtrain.host.frameworks import FRAMEWORKS

# The names, for people, of the frameworks that Horovod has an extension for.
TITLES = {flag: framework.title for flag, framework in FRAMEWORKS.items() if framework.horovod}
PIP_NAMES = {"torch": "torch", "tf": "tensorflow"}

# The first versions of the ranges in setup.cfg; older ones have other interfaces (Keras 2, C++14).
OLDEST = {"torch": "2.4", "tf": "2.18"}

# TensorFlow's package has several names, and no small file that contains its version.
_TENSORFLOW_PACKAGES = (
    "tensorflow",
    "tensorflow-cpu",
    "tensorflow-rocm",
    "tensorflow-cpu-aws",
    "intel-tensorflow",
    "tf-nightly",
    "tf-nightly-cpu",
)


@dataclass(frozen=True)
class InstalledFramework:
    """An installed framework.

    Args:
        name: "torch" or "tf".
        version: as the framework itself reports it, e.g. "2.13.0+cpu".
        cuda: the CUDA version that it was built with; empty for a CPU build.
        cxx11_abi: whether it was built with the newer ABI of the C++ library.
        cxx_standard: the C++ standard that its headers require, e.g. 20; 0 if it has no headers.
        folder: the folder of the package; None if unknown.
    """

    name: str
    version: str
    cuda: str = ""
    cxx11_abi: bool = True
    cxx_standard: int = 17
    folder: Path | None = field(default=None, compare=False)

    @property
    def title(self) -> str:
        """The name as it is displayed."""
        return TITLES[self.name]

    @property
    def cuda_major(self) -> str:
        """The major version of its CUDA; empty for a CPU build."""
        return self.cuda.partition(".")[0]


def package_folder(name: str) -> Path | None:
    """Return the folder of an installed package without importing it, or None without the package."""
    try:
        spec = importlib.util.find_spec(name)
    except ValueError:  # a module in sys.modules that has no spec
        return None
    if spec is None or spec.origin is None:  # without an origin it is only a leftover folder
        return None
    return Path(spec.origin).parent


def installed_framework(name: str) -> InstalledFramework | None:
    """Return the installed framework "torch" or "tf", or None if it is not installed."""
    return _torch() if name == "torch" else _tensorflow()


def same_version(one: str, other: str) -> bool:
    """Return whether two spellings mean the same version ("2.22.0-rc0" and "2.22.0rc0")."""
    return one.replace("-", "") == other.replace("-", "")


def unsupported(found: InstalledFramework) -> tuple[str, str]:
    """Return why Horovod is not built for a framework, and what helps; both are empty if it can be."""
    oldest, pip_name = OLDEST[found.name], PIP_NAMES[found.name]
    if _release(found.version) < _release(oldest):
        reason = f"{found.title} {found.version} is too old: hvdtrain needs {oldest} or newer."
        return reason, f"pip install --upgrade {pip_name}"
    if not found.cxx_standard:
        reason = f"{found.title} {found.version} in {found.folder} has no C++ headers (include/ATen/ATen.h)."
        return reason, f"pip install --force-reinstall --no-deps {pip_name}"
    return "", ""


def _release(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version)[:2])


def _torch() -> InstalledFramework | None:
    folder = package_folder("torch")
    if folder is None:
        return None
    # The package's metadata leaves out the "+cu130" that torch.__version__ has.
    version_file = _text(folder / "version.py")
    version = _first(r"__version__ = ['\"]([^'\"]+)", version_file)
    if not version:
        return None
    config = _text(folder / "share" / "cmake" / "Torch" / "TorchConfig.cmake")
    return InstalledFramework(
        name="torch",
        version=version,
        cuda=_first(r"cuda(?:: [^=]+)? = ['\"]([^'\"]+)", version_file),
        cxx11_abi="_GLIBCXX_USE_CXX11_ABI=0" not in config,
        cxx_standard=_torch_cxx_standard(folder / "include"),
        folder=folder,
    )


def _torch_cxx_standard(headers: Path) -> int:
    """Return the C++ standard that PyTorch's headers require, or 0 without headers.

    They end the compilation unless ``__cplusplus`` is at least a month of the standard's year, e.g. 202002L.
    """
    text = _text(headers / "ATen" / "ATen.h")
    return int(_first(r"__cplusplus < 20(\d\d)\d\dL", text) or 17) if text else 0


def _tensorflow() -> InstalledFramework | None:
    folder = package_folder("tensorflow")
    if folder is None:
        return None
    build_info = _text(folder / "python" / "platform" / "build_info.py")
    for package in _TENSORFLOW_PACKAGES:
        try:
            version = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
        cuda = _first(r"'cuda_version', '([^']+)'", build_info)
        return InstalledFramework("tf", version, cuda=cuda, folder=folder)
    return None


def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8", errors="replace") if path.is_file() else ""


def _first(pattern: str, text: str) -> str:
    match = re.search(pattern, text)
    return match.group(1) if match else ""
