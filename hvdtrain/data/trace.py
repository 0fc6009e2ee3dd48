"""A trace of the samples that every worker trained on, for those who want proof."""

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO

from hvdtrain.data.feed import HostBatch


class IndexTrace:
    """Writes a line per step with the indices that this worker trained on.

    A context manager.

    Args:
        path: the file; None for no trace.
    """

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._file: IO[str] | None = None
        self._ahead: dict[int, list[int]] = {}

    def __enter__(self) -> "IndexTrace":
        if self._path is not None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._file = self._path.open("a", encoding="utf-8")
        return self

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
            self._file.write(json.dumps({"step": step + 1, "indices": self._ahead.pop(step)}) + "\n")
            self._file.flush()
