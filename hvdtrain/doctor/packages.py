"""Whether the packages that tasks of others need can be imported: one child process imports those installed.

    python -m hvdtrain.doctor.packages

says it, as the end of ``make setup`` does.
"""

from importlib.util import find_spec
from typing import Any

from hvdtrain.doctor.probes import probe

# What imports native libraries that must belong to the PyTorch that is installed, or imports what does.
_IMPORTS = {
    "torchvision": "import torchvision",
    "transformers": "from transformers import PreTrainedModel",
    "torchmetrics": "import torchmetrics",
    "datasets": "import datasets",
}
_CODE = """
import importlib.metadata, json
info = {{"packages": {{}}}}
for name, statement in {statements!r}:
    try:
        exec(statement, {{}})
        info["packages"][name] = [importlib.metadata.version(name), ""]
    except BaseException as error:
        while cause := error.__cause__ or error.__context__:
            error = cause
        info["packages"][name] = ["", type(error).__name__ + ": " + str(error)[:300]]
"""
REMEDY = (
    "Install torch and torchvision from one index, in versions that belong together, or remove torchvision: "
    "pip uninstall torchvision; transformers and torchmetrics do without it."
)


def import_packages(seconds: float) -> dict[str, Any]:
    """Import those of the packages that are installed, in one child process.

    Args:
        seconds: how long that may take; 0 to import nothing.

    Returns:
        ``packages``: by name, the version and why it cannot be imported, one of them empty; or ``error``, if
        the process did not end by itself.
    """
    statements = [(name, statement) for name, statement in _IMPORTS.items() if seconds and find_spec(name)]
    return probe(_CODE.format(statements=statements), seconds) if statements else {"packages": {}}


def main() -> None:
    """Print what can be imported, what cannot and why, and what is missing."""
    info = import_packages(seconds=300)
    packages = info.get("packages", {})
    imported = [f"{name} {version}" for name, (version, error) in packages.items() if not error]
    if imported:
        print(f"{', '.join(imported)} can be imported.")
    failed = [f"{name} cannot be imported: {error}" for name, (_, error) in packages.items() if error]
    failed += [info["error"]] if "error" in info else []
    print("".join(f"{line}\n" for line in [*failed, *([REMEDY] if failed else [])]), end="")
    missing = [name for name in _IMPORTS if not find_spec(name)]
    if missing:
        print(f"Not installed: {', '.join(missing)}.")


if __name__ == "__main__":
    main()
