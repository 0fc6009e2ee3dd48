"""The command ``parity``."""

import json
from pathlib import Path

from hvdtrain.bench.interruption import said_if_interrupted
from hvdtrain.config import Layer
from hvdtrain.errors import EXIT_DONE, EXIT_TRAINING, EnvironmentFault, HvdtrainError
from hvdtrain.host.launcher import open_console
from hvdtrain.jobs.opening.setup import check_may_be_elastic
from hvdtrain.parity.exchange import Role, find_role
from hvdtrain.parity.report import show, to_document
from hvdtrain.tools.bench.options import check_writable, config_files
from hvdtrain.tools.parity.job import Result, parity_job


def run_parity(layers: list[Layer], json_path: Path | None) -> int:
    """Compare a task's two models, show what was found, and return the exit code: 4 on rank 0 without parity.

    Other ranks end well, so that no launcher ends rank 0 while it shows what was found.

    Args:
        layers: the job's config values, weakest source first.
        json_path: file for the JSON document, if one is wanted.

    Raises:
        UsageError: If no launcher started an even number of processes over MPI.
        HvdtrainError: as training would raise it.
    """
    check_may_be_elastic(None)
    role = find_role()
    if role.rank == 0:
        check_writable(json_path, read=config_files(layers))
    with said_if_interrupted(lambda text: open_console().print(text)):
        found = _compared(layers, role)
    if isinstance(found, Result):
        show(found, open_console())
        if json_path is not None:
            _write(json_path, found)
        return EXIT_DONE if found.has_parity else EXIT_TRAINING
    return EXIT_DONE


def _compared(layers: list[Layer], role: Role) -> Result | bool:
    try:
        return parity_job(layers, role)
    except HvdtrainError as error:
        # rank 0 does not report what TensorFlow's workers alone raise; their leader does
        error.everywhere &= not role.is_leader or role.rank == 0
        raise


def _write(path: Path, result: Result) -> None:
    try:
        path.write_text(json.dumps(to_document(result), indent=2) + "\n", encoding="utf-8")
    except OSError as error:
        raise EnvironmentFault(
            f"{path} cannot be written: {error.strerror or error}", "What was found stands above."
        ) from None
