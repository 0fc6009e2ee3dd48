"""Whether libraries that many tasks import can be imported here: each of those installed, in a child process.

    python -m hvdtrain.doctor.libraries

prints the answer; ``make setup`` ends with it.
"""

import importlib.metadata

from hvdtrain.doctor.probes import run_probe
from hvdtrain.horovod_build.frameworks import package_folder

# torchvision has native code that must be built for the PyTorch that is installed; the next two import it.
_STATEMENTS = {
    "torchvision": "import torchvision",
    "transformers": "from transformers import PreTrainedModel",
    "torchmetrics": "import torchmetrics",
    "datasets": "import datasets",
}
_CODE = """
import json
from hvdtrain.workers.user_errors import innermost_cause
info = {{}}
try:
    {statement}
except Exception as error:
    error = innermost_cause(error)
    info["error"] = type(error).__name__ + ": " + str(error)[:300]
"""


def import_libraries(seconds: float) -> dict[str, tuple[str, str]]:
    """Import those of the libraries that are installed.

    Args:
        seconds: how long one import may take.

    Returns:
        By name, the version and why it cannot be imported; that is empty if it can.
    """
    return {
        name: (_version(name), run_probe(_CODE.format(statement=statement), seconds).get("error", ""))
        for name, statement in _STATEMENTS.items()
        if package_folder(name)
    }


def advice(name: str, error: str) -> str:
    """Return what helps if a library cannot be imported."""
    if "torchvision" in error or name == "torchvision":
        return (
            "Install torch and torchvision from one index, in versions that belong together, or remove "
            "torchvision, which transformers and torchmetrics do not need: pip uninstall torchvision"
        )
    return f"Install it again, in a version that fits the others: pip install --force-reinstall {name}"


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "of unknown version"


def main() -> None:
    """Print which libraries can be imported, which cannot and why, and which are missing."""
    found = import_libraries(seconds=300)
    imported = [f"{name} {version}" for name, (version, error) in found.items() if not error]
    if imported:
        print(f"{', '.join(imported)} can be imported.")
    for name, (version, error) in found.items():
        if error:
            print(f"{name} {version} cannot be imported: {error}\n  {advice(name, error)}")
    missing = [name for name in _STATEMENTS if name not in found]
    if missing:
        print(f"Not installed: {', '.join(missing)}.")


if __name__ == "__main__":
    main()
