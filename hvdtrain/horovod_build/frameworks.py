"""Which PyTorch and TensorFlow are installed, read from their files without importing them."""

import importlib.metadata
import importlib.util
import re
from dataclasses import dataclass
from pathlib import Path

TITLES = {"torch": "PyTorch", "tf": "TensorFlow"}
PIP_NAMES = {"torch": "torch", "tf": "tensorflow"}

# TensorFlow comes under several names, and none of its small files holds its version.
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
class Framework:
    """An installed framework.

    Args:
        name: "torch" or "tf".
        version: as the framework itself gives it, e.g. "2.13.0+cpu".
        cuda: the CUDA version that it was built with; empty for a CPU build.
        cxx11_abi: whether it was built with the newer ABI of the C++ library.
    """

    name: str
    version: str
    cuda: str = ""
    cxx11_abi: bool = True

    @property
    def title(self) -> str:
        """Its name for people."""
        return TITLES[self.name]

    @property
    def cuda_major(self) -> str:
        """Major version of its CUDA; empty for a CPU build."""
        return self.cuda.partition(".")[0]


def package_folder(name: str) -> Path | None:
    """Find the folder of an installed package without importing it; None without the package."""
    try:
        spec = importlib.util.find_spec(name)
    except ValueError:  # a module that was put into sys.modules without a spec
        return None
    if spec is None or spec.origin is None:  # without an origin it is only a left-over folder
        return None
    return Path(spec.origin).parent


def installed_framework(name: str) -> Framework | None:
    """Describe the framework "torch" or "tf" as it is installed; None where it is not."""
    return _torch() if name == "torch" else _tensorflow()


def same_version(one: str, other: str) -> bool:
    """Tell whether two spellings mean one version ("2.22.0-rc0" and "2.22.0rc0")."""
    return one.replace("-", "") == other.replace("-", "")


def _torch() -> Framework | None:
    folder = package_folder("torch")
    if folder is None:
        return None
    # The package's metadata leaves out the "+cu130" that torch.__version__ has.
    version_file = _text(folder / "version.py")
    version = _first(r"__version__ = ['\"]([^'\"]+)", version_file)
    if not version:
        return None
    config = _text(folder / "share" / "cmake" / "Torch" / "TorchConfig.cmake")
    return Framework(
        name="torch",
        version=version,
        cuda=_first(r"cuda(?:: [^=]+)? = ['\"]([^'\"]+)", version_file),
        cxx11_abi="_GLIBCXX_USE_CXX11_ABI=0" not in config,
    )


def _tensorflow() -> Framework | None:
    folder = package_folder("tensorflow")
    if folder is None:
        return None
    build_info = _text(folder / "python" / "platform" / "build_info.py")
    for package in _TENSORFLOW_PACKAGES:
        try:
            version = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
        return Framework("tf", version, cuda=_first(r"'cuda_version', '([^']+)'", build_info))
    return None


def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8", errors="replace") if path.is_file() else ""


def _first(pattern: str, text: str) -> str:
    match = re.search(pattern, text)
    return match.group(1) if match else ""
