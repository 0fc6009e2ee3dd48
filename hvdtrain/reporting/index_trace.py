"""A trace of the samples that every worker trained on, for those who want proof."""

import json
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from hvdtrain.data.feed import HostBatch
from hvdtrain.errors import EnvironmentFault
from hvdtrain.regular_files import check_link
from hvdtrain.reporting.jsonl import AppendFile, cut_log, lines_of
from hvdtrain.reporting.tail import cut_tail

INDICES = "indices"
_FILES = "rank-*.jsonl"
_KEPT_IN_A_ROW = 4  # lines of a trace are long and in the order of steps


class IndexTrace:
    """Writes a line per step with the indices that this worker trained on.

    A context manager.

    Args:
        path: the file, in a folder of the run directory; None for no trace.
        first_step: steps done before; lines of later ones, which are done again, are cut off.
        generation: the number of the world that this worker is in; 0 if the job is not elastic. A line that a
            worker wrote for a step which a later world did is told by it from that world's.
        may_write: as of ``AppendFile``.
    """

    def __init__(
        self,
        path: Path | None,
        first_step: int = 0,
        generation: int = 0,
        may_write: Callable[[], bool] = lambda: True,
    ) -> None:
        self._path = path
        self._first_step = first_step
        self._generation = {"generation": generation} if generation else {}
        self._may_write = may_write
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
        if self._generation:
            cut_tail(path, self._first_step, in_a_row=_KEPT_IN_A_ROW)
        elif path.exists():
            cut_log(path, self._first_step)
        return AppendFile(path, may_write=self._may_write)

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
            values = {"step": step + 1, "indices": self._ahead.pop(step), **self._generation}
            self._file.append((json.dumps(values) + "\n").encode())


def trace_files(run_dir: Path) -> list[Path]:
    """Return the traces of a run, in the order of ranks."""
    return sorted((run_dir / INDICES).glob(_FILES))


def cut_traces(run_dir: Path, step: int) -> None:
    """Drop from the traces of all ranks, also of those that are gone, what came after a step.

    Raises:
        OSError: If one cannot be cut.
    """
    for path in trace_files(run_dir):
        cut_tail(path, step, in_a_row=_KEPT_IN_A_ROW)


def read_indices(run_dir: Path) -> dict[int, list[int]]:
    """Return the indices that all ranks together trained on, by step in order.

    If more than one world of an elastic job did a step, or began to, those of the last world count.

    Raises:
        OSError: If a trace cannot be read.
        ValueError: If a line is not one of a trace.
    """
    found: dict[int, tuple[int, list[int]]] = {}
    for path in trace_files(run_dir):
        for line in lines_of(path):
            values = json.loads(line)
            step, generation = values["step"], values.get("generation", 0)
            newest, indices = found.get(step, (generation, []))
            if generation > newest:
                newest, indices = generation, []
            found[step] = newest, indices + values["indices"] if generation == newest else indices
    return {step: found[step][1] for step in sorted(found)}
