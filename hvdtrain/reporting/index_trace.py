"""A trace of the samples that every worker trained on, for those who want proof."""

import json
from collections.abc import Iterable, Iterator
from pathlib import Path

from hvdtrain.data.feed import HostBatch
from hvdtrain.errors import EnvironmentFault
from hvdtrain.regular_files import check_link
from hvdtrain.reporting.jsonl import AppendFile, cut_log


class IndexTrace:
    """Writes a line per step with the indices that this worker trained on.

    A context manager.

    Args:
        path: the file, in a folder of the run directory; None for no trace.
        first_step: steps done before; lines of later ones, which are done again, are cut off.
    """

    def __init__(self, path: Path | None, first_step: int = 0) -> None:
        self._path = path
        self._first_step = first_step
        self._file: AppendFile | None = None
        self._ahead: dict[int, list[int]] = {}

    def __enter__(self) -> "IndexTrace":
        if self._path is not None:
            try:
                self._file = self._open(self._path)
            except OSError as error:
                raise EnvironmentFault(f"cannot write the trace of indices: {error}") from None
        return self

    def _open(self, path: Path) -> AppendFile:
        check_link(path.parent, path.parent.parent)
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists():
            cut_log(path, self._first_step)
        return AppendFile(path)

    def __exit__(self, *_: object) -> None:
        if self._file is not None:
            self._file.close()

    def watch(self, batches: Iterable[HostBatch]) -> Iterator[HostBatch]:
        """Pass batches on and remember their indices until they are trained on."""
        for batch in batches:
            if self._file is not None:
                self._ahead[batch.step] = batch.indices[batch.weights > 0].tolist()
            yield batch

    def trained(self, step: int) -> None:
        """Write the indices of a step that was done."""
        if self._file is not None:
            line = json.dumps({"step": step + 1, "indices": self._ahead.pop(step)}) + "\n"
            self._file.append(line.encode())
