"""A trace of the samples that every worker trained on, for those who want proof."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hvdtrain.backends.hooks import LoopHook
from hvdtrain.errors import EnvironmentFault
from hvdtrain.reporting.jsonl import AppendFile, lines_of
from hvdtrain.reporting.records import cut_log, cut_tail
from hvdtrain.storage.files import check_link

INDICES = "indices"
_FILES = "rank-*.jsonl"


class IndexTrace(LoopHook):
    """Writes a line per step with the indices that this worker trained on."""

    def __init__(
        self,
        place: Callable[[], tuple[Path | None, int, int, int]],
        may_write: Callable[[], bool] = lambda: True,
    ) -> None:
        self._place, self._may_write = place, may_write
        self._generation: dict[str, int] = {}
        self._file: AppendFile | None = None

    def __enter__(self) -> "IndexTrace":
        run_dir, rank, steps, generation = self._place()
        self._generation = {"generation": generation} if generation else {}
        self._file = None
        if run_dir is not None:
            try:
                self._file = self._open(run_dir / INDICES / f"rank-{rank:04d}.jsonl", steps)
            except OSError as error:
                raise EnvironmentFault(f"cannot write the trace of indices: {error}") from None
        return self

    def _open(self, path: Path, steps: int) -> AppendFile:
        check_link(path.parent, path.parent.parent)
        path.parent.mkdir(parents=True, exist_ok=True)
        if self._generation:
            cut_tail(path, steps)
        else:
            cut_log(path, steps)
        return AppendFile(path, may_write=self._may_write)

    def __exit__(self, *_: object) -> None:
        if self._file is not None:
            self._file.close()

    def on_batch(self, batch: Any) -> None:
        """Write the indices of a step; a worker that is killed in it may be the one that completed it."""
        if self._file is not None:
            indices = batch.samples.indices[batch.samples.weights > 0].tolist()
            values = {"step": batch.step + 1, "indices": indices, **self._generation}
            self._file.append((json.dumps(values) + "\n").encode())


def trace_files(run_dir: Path) -> list[Path]:
    """Return the traces of a run, in the order of ranks."""
    return sorted((run_dir / INDICES).glob(_FILES))


def cut_traces(run_dir: Path, step: int) -> None:
    """Drop from the traces of all ranks, also of those that are gone, what came after a step."""
    for path in trace_files(run_dir):
        cut_tail(path, step)


def read_indices(run_dir: Path) -> dict[int, list[int]]:
    """Return the indices that all ranks together trained on, by step in order."""
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
