"""Bringing the recordings of all workers together on rank 0, which writes the trace and the costs."""

import gzip
import json
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from hvdtrain.reporting.report import Report
from hvdtrain.storage.files import check_link
from hvdtrain.storage.text import counted
from hvdtrain.tools.profile.costs import Costs, find_costs, longest_tensor
from hvdtrain.tools.profile.recording import Recording, file_of, read_recording, write_whole
from hvdtrain.tools.profile.trace import Timeline, build_trace, read_timeline
from hvdtrain.workers.agreement import Workers, waiting_for_rank_zero

TRACE_FILE, COSTS_FILE = "trace.json.gz", "costs.json"
_CHUNK_BYTES = 8 << 20
_MOST_SENT_BYTES = 64 << 20  # of one worker, through the collectives
_WAIT_SECONDS = 2.0  # for the files of the others after a failure
_LOOK_SECONDS = 0.05
_NOTED_MS = 1.0


class Gathering:
    """Brings the recordings together.

    Workers that share rank 0's run directory hand over files in it; others send theirs through collectives.

    Args:
        workers: the job's workers.
        folder: returns where rank 0 writes.
        report: returns the run's report, which shows text on rank 0.
        may_write: whether this worker may write files.
    """

    def __init__(
        self,
        workers: Workers,
        folder: Callable[[], Path],
        *,
        report: Callable[[], Report],
        may_write: Callable[[], bool],
    ) -> None:
        self._workers, self._get_folder = workers, folder
        self._report, self._may_write = report, may_write

    @property
    def _folder(self) -> Path:
        return self._get_folder()  # that of a worker that takes over the run is known late

    def gather(self, recording: Recording) -> None:
        """Collective. Write the trace and the costs of all workers; rank 0 writes, and shows the costs."""
        workers = self._workers
        content = b"" if workers.rank == 0 else _packed(recording)
        own = self._write_own(recording, content) if content else None
        lengths = workers.allgather_object(len(content))
        found, missing = {recording.rank: recording}, list[int]()
        if workers.rank == 0:
            for rank in range(1, workers.size):
                path = file_of(self._folder, rank, recording.token)
                if (other := read_recording(path, recording.token)) is not None:
                    found[rank] = other
                else:
                    missing.append(rank)
        for rank in workers.broadcast_object(missing):
            if lengths[rank] > _MOST_SENT_BYTES:
                continue
            sent = bytearray()
            for begin in range(0, lengths[rank], _CHUNK_BYTES):
                sent += workers.broadcast_object(content[begin : begin + _CHUNK_BYTES], rank)
            if workers.rank == 0:
                with suppress(ValueError):  # it is missing
                    found[rank] = Recording.from_bytes(sent)
        with waiting_for_rank_zero(workers, "writing the profile"):
            if workers.rank == 0:
                self._write([found[rank] for rank in sorted(found)], workers.size)
        if own is not None:
            with suppress(OSError):
                own.unlink()

    def gather_alone(self, recording: Recording) -> None:
        """Write what there is, without the other workers. Local: no collective.

        Rank 0 takes what the others hand over within two seconds in its run directory.
        """
        if recording.rank:
            if content := _packed(recording):
                self._write_own(recording, content)
            return
        size, found = self._workers.size, {0: recording}
        waiting = {rank: file_of(self._folder, rank, recording.token) for rank in range(1, size)}
        give_up = time.monotonic() + _WAIT_SECONDS
        while waiting and time.monotonic() < give_up:
            for rank in list(waiting):
                if (other := read_recording(waiting[rank], recording.token)) is not None:
                    found[rank] = other
                    with suppress(OSError):
                        waiting[rank].unlink()
                    del waiting[rank]
            if waiting:
                time.sleep(_LOOK_SECONDS)
        self._write([found[rank] for rank in sorted(found)], size)

    def _write_own(self, recording: Recording, content: bytes) -> Path | None:
        """Write this worker's recording into the run directory; return the file, or None if it cannot."""
        path = file_of(self._folder, recording.rank, recording.token)
        try:
            self._make_folder()
            write_whole(path, content)
        except OSError:
            return None  # it is sent
        return path

    def _make_folder(self) -> None:
        if not self._may_write():
            raise OSError("this worker may no longer write files")
        check_link(self._folder, self._folder.parent)
        self._folder.mkdir(exist_ok=True)

    def _write(self, recordings: Sequence[Recording], size: int) -> None:
        """Write the trace and the costs, and show the costs. Nothing here ends the job."""
        try:
            root = recordings[0]
            timeline = self._timeline(root)
            costs = find_costs(recordings, timeline)
            if left := size - len(recordings):
                costs.problems.append(f"the recordings of {left} of {size} workers are missing")
            if (apart := costs.clock_uncertainty_ms) > _NOTED_MS:
                costs.problems.append(f"times of different hosts may be {apart:.1f} ms apart")
            where, problem = self._write_files(recordings, timeline, costs)
            self._report().say("\n".join(_lines(costs, where)))
            for text in (*costs.problems, *filter(None, [problem])):
                self._report().note(f"profile: {text}")
        except Exception as error:
            self._report().note(f"profile: the recording cannot be evaluated: {error!r}")

    def _timeline(self, root: Recording) -> Timeline:
        try:
            found = read_timeline(root.timeline)
            within = found.within(root.begin_ns, root.end_ns)
            if found and not within:
                root.problems.append(
                    "Horovod's timeline lies outside of the recorded steps by its clock, and is left out: "
                    "the system's clock was set during the job, or the steps reduced nothing"
                )
            return within
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            root.problems.append(f"Horovod's timeline cannot be read: {error!r}")
            return Timeline()

    def _write_files(
        self, recordings: Sequence[Recording], timeline: Timeline, costs: Costs
    ) -> tuple[Path | None, str]:
        """Write both files; return that of the trace, or None and why not."""
        path = self._folder / TRACE_FILE
        try:
            self._make_folder()
            text = json.dumps(build_trace(recordings, timeline), separators=(",", ":"))
            write_whole(path, gzip.compress(text.encode(), compresslevel=5))
            write_whole(self._folder / COSTS_FILE, (json.dumps(costs.values(), indent=1) + "\n").encode())
            for old in self._folder.glob("rank-*.json.gz"):  # came too late in a job that failed
                if recordings[0].token not in old.name:
                    old.unlink()
        except OSError as error:
            return None, f"it cannot be written to {self._folder}: {error.strerror or error}"
        return path, ""


def _packed(recording: Recording) -> bytes:
    """Return a recording as the content of a file; nothing if it cannot be, as where memory is short.

    An error of one worker must not leave it: the others wait for this one in a collective.
    """
    try:
        return recording.to_bytes()
    except Exception:
        return b""


def _lines(costs: Costs, where: Path | None) -> list[str]:
    """Return what is shown of the costs."""
    count, workers = len(costs.steps), counted(costs.workers, "worker")
    steps = f"step {costs.steps[0]:,}" if count == 1 else "no step"
    if count > 1:
        steps = f"steps {costs.steps[0]:,} to {costs.steps[-1]:,}"
    each = f", {1e3 * costs.seconds / count:.3g} ms each" if count else ""
    lines = [f"profile of {steps} with {workers}{each}; the largest shares of the workers' time:"]
    lines += [f"  {line}" for line in costs.lines()]
    if between := costs.between_line():
        lines.append(f"  {between}")
    if tensor := longest_tensor(costs):
        lines.append(f"  longest in Horovod: {tensor}")
    if where is not None:
        lines.append(f"  {where} opens in https://ui.perfetto.dev")
    return lines
