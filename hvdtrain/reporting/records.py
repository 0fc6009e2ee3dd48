"""The lines of metrics.jsonl as values, the last of them, which every worker keeps, and traces of samples."""

import io
import json
import math
import os
import re
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from hvdtrain.backends.hooks import LoopHook
from hvdtrain.callbacks import CALLBACK, EVENT
from hvdtrain.early_stopping import LINE_FIELDS
from hvdtrain.errors import EnvironmentFault
from hvdtrain.reporting.jsonl import AppendFile, lines_of, to_json, write_parts
from hvdtrain.storage.files import NotAFileError, check_link, open_regular, parse_line
from hvdtrain.storage.text import counted

TAIL = 256  # records that are kept of a log
_BLOCK_BYTES = 1 << 16


def cut_tail(path: Path, step: int, redone: Sequence[str] = ()) -> list[dict[str, Any]]:
    """Drop from a log what came after a step, and what is no whole line; return the last records.

    Lines of the step itself are dropped if their phases will be written again (``redone``), with the lines of
    callbacks after them, which will be called again.
    """
    tail: deque[dict[str, Any]] = deque(maxlen=TAIL)
    end, is_cut, is_redone, later = 0, False, False, list[bytes]()
    try:
        for line in lines_of(path):
            record = parse_line(line) if line.endswith(b"\n") else None
            found = None if record is None else record.get("step")
            stays = isinstance(found, int) and not isinstance(found, bool) and found <= step
            if record is not None and found == step:
                is_redone |= record.get("phase") in redone
                stays &= record.get("phase") not in ((*redone, CALLBACK) if is_redone else ())
            if record is not None and stays:
                tail.append(record)
            if not stays:
                is_cut = True
            elif is_cut:
                later.append(line)
            else:
                end += len(line)
    except FileNotFoundError:
        return []
    if later:
        write_parts(path, _parts(path, end, later))
    elif is_cut:  # without room for another file
        file = os.open(path, os.O_WRONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            os.ftruncate(file, end)
            os.fsync(file)
        finally:
            os.close(file)
    return list(tail)


def cut_log(path: Path, step: int) -> None:
    """Cut a log as ``cut_tail`` does; for step 0, which keeps nothing of it, rename it to ``*.old``."""
    if step:
        cut_tail(path, step)
    elif path.exists() and any(lines_of(path)):
        path.replace(path.with_name(path.name + ".old"))


def _parts(path: Path, end: int, lines: Sequence[bytes]) -> Iterator[bytes]:
    """Yield a file up to a byte, then these lines."""
    with open_regular(path, follow=False) as file:
        while end > 0 and (block := file.read(min(end, _BLOCK_BYTES))):
            end -= len(block)
            yield block
    yield from lines


KEPT = 64

Key = tuple[Any, ...]


@dataclass(frozen=True)
class WorkersChange:
    """That other workers continue with an elastic job."""

    # who is no longer there, with the reason, as text such as "rank 2 on h2: killed (SIGKILL)"
    left: tuple[str, ...]
    joined: tuple[str, ...]  # who came, as text
    cause: str  # what began the change, as text
    generation: int  # the number of the world that continues
    pause_seconds: float  # the time without training

    def values(self) -> dict[str, Any]:
        """Return what its line in metrics.jsonl says."""
        lists = {"left": list(self.left), "joined": list(self.joined)}
        return {"event": "changed", **asdict(self), **lists, "pause_seconds": round(self.pause_seconds, 3)}

    def describe(self, workers: int, step: int) -> str:
        """Return it as text."""
        parts = [f"{counted(workers, 'worker')} from step {step + 1:,} on"]
        parts += [f"left: {', '.join(self.left)}"] if self.left else []
        parts += [f"joined: {', '.join(self.joined)}"] if self.joined else []
        parts += [f"cause: {self.cause}"] if self.cause and not (self.left or self.joined) else []
        return "; ".join([*parts, f"{self.pause_seconds:.1f} s without training"])


IMAGES = "images"  # folder of a run directory
_FILE_NAME = re.compile(r"[\w.-]{1,100}", re.ASCII)
_IMAGE = re.compile(rf"{IMAGES}/step-\d{{8,}}-{_FILE_NAME.pattern}\.png", re.ASCII)
_PNG_BEGIN = b"\x89PNG\r\n\x1a\n"


def logged_values(step: int, values: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, bytes]]:
    """Return the values of a callback's line, and its images, PNG files by place in the run directory."""
    if found := ", ".join(sorted(LINE_FIELDS.intersection(values))):
        raise ValueError(f"log(): {found} are names that every line of metrics.jsonl has; use others")
    line, files = dict[str, Any](), dict[str, bytes]()
    for name, value in values.items():
        if isinstance(value, str | int):
            line[name] = value
        elif np.ndim(value) in {2, 3}:
            if not _FILE_NAME.fullmatch(name):
                raise ValueError(
                    f"log(): the name of an image has letters, digits, . _ - alone; found {name!r}"
                )
            file = f"{IMAGES}/step-{step:08d}-{name}.png"
            line[name], files[file] = {"image": file}, _png(name, np.asarray(value))
        else:  # numbers of numpy and of the frameworks become Python's
            line[name] = float(value)
    return line, files


def _png(name: str, pixels: np.ndarray[Any, Any]) -> bytes:
    """Return a PNG file of pixels: (height, width), or with 1, 3 or 4 channels as the last axis."""
    from PIL import Image

    if np.issubdtype(pixels.dtype, np.floating) and pixels.size and pixels.min() >= 0 and pixels.max() <= 1:
        pixels = np.rint(pixels * 255.0).astype(np.uint8)
    if pixels.dtype != np.uint8 or not pixels.size or pixels.shape[2:] not in {(), (1,), (3,), (4,)}:
        raise ValueError(
            f"log(): image {name} must have the shape (height, width) or (height, width, channels) with 1, 3 "
            f"or 4 channels, and be of uint8 or of floats from 0 to 1; found {pixels.dtype} {pixels.shape}"
        )
    file = io.BytesIO()
    Image.fromarray(pixels.squeeze(2) if pixels.shape[2:] == (1,) else pixels).save(file, "PNG")
    return file.getvalue()


def stored_image(run_dir: Path, place: str) -> Path:
    """Return the file of an image that a line names; OSError if it is not one in the run directory."""
    path = run_dir / place
    if not _IMAGE.fullmatch(place):
        raise NotAFileError("no image has this name")
    check_link(path.parent, run_dir)
    with open_regular(path, follow=False) as file:
        if file.read(len(_PNG_BEGIN)) != _PNG_BEGIN:
            raise NotAFileError("it is not a PNG file")
    return path


def line_of(record: Mapping[str, Any]) -> bytes:
    """Return a record as metrics.jsonl has it."""
    return (to_json(record) + "\n").encode()


def key_of(record: Mapping[str, Any]) -> Key:
    """Return what distinguishes a record from others: two workers' records of one thing have the same key."""
    phase, step = record.get("phase"), record.get("step")
    if phase == EVENT:
        return phase, step, record.get("event"), record.get("generation")
    if phase == CALLBACK:
        return phase, step, *sorted(record)
    return phase, step


class RecentRecords(deque[dict[str, Any]]):
    """The last records of a run. Every worker keeps them, since any may become rank 0."""

    def __init__(self, records: Iterable[dict[str, Any]] = ()) -> None:
        super().__init__(records, KEPT)

    def lacking_in(self, tail: Sequence[Mapping[str, Any]], step: float = math.inf) -> list[dict[str, Any]]:
        """Return the records up to a step that the end of the log lacks; of steps that this end covers."""
        known = {key_of(record) for record in tail}
        first = -1 if len(tail) < TAIL else min(record["step"] for record in tail)
        return [one for one in self if first < one["step"] <= step and key_of(one) not in known]


INDICES = "indices"


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
            folder = run_dir / INDICES
            path, cut = folder / f"rank-{rank:04d}.jsonl", cut_tail if generation else cut_log
            try:
                check_link(folder, run_dir)
                folder.mkdir(parents=True, exist_ok=True)
                cut(path, steps)
                self._file = AppendFile(path, may_write=self._may_write)
            except OSError as error:
                raise EnvironmentFault(f"cannot write the trace of indices: {error}") from None
        return self

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
    return sorted((run_dir / INDICES).glob("rank-*.jsonl"))


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
