"""What a checkpoint says of itself: ``trainer.json``, in which a changed byte anywhere is detected."""

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from hvdtrain.checkpoints.digest import OutputsDigest
from hvdtrain.data.fingerprint import Fingerprint
from hvdtrain.early_stopping import EarlyStoppingState, PlateauState
from hvdtrain.errors import EnvironmentFault
from hvdtrain.storage.files import NotAFileError, read_regular
from hvdtrain.workers.wire_types import travels


@contextmanager
def copied(checkpoint: Path, beside: Path, owner: str) -> Iterator[Path | None]:
    """Return a context with a folder of a checkpoint's files as links; None if it was deleted meanwhile."""
    prefix = f"sending-{owner}-"
    for old in beside.glob(f"{prefix}*"):  # of a sender that was killed
        if not old.is_symlink():
            shutil.rmtree(old, ignore_errors=True)
    with tempfile.TemporaryDirectory(prefix=prefix, dir=beside, ignore_cleanup_errors=True) as name:
        folder: Path | None = Path(name) / checkpoint.name
        try:
            shutil.copytree(checkpoint, Path(name) / checkpoint.name, copy_function=_link)
        except (FileNotFoundError, shutil.Error):
            if checkpoint.exists():
                raise
            folder = None
        yield folder


def _link(path: str, new: str) -> None:
    try:
        os.link(path, new, follow_symlinks=False)
    except FileNotFoundError:
        raise
    except OSError:  # a file system without links
        shutil.copyfile(path, new, follow_symlinks=False)


_FORMAT = 1
MAX_BYTES = 16_000_000  # of trainer.json
_MAX_SHOWN = 60  # characters of a value in messages

_Count = Annotated[int, Field(ge=0, lt=2**63)]
_Size = Annotated[int, Field(gt=0, lt=2**63)]


@travels
class FileInfo(BaseModel):
    """What is known of a checkpoint's file."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    sha256: str
    bytes: _Count


@travels
class Manifest(BaseModel):
    """What ``trainer.json`` holds."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    step: _Count  # steps done
    samples: _Count  # samples seen: the position in the stream of training data
    data_size: _Size  # samples in the training data
    seconds: float  # time spent training
    workers: _Size  # number of workers that trained
    config: dict[str, Any]  # the resolved config, as JSON values
    versions: dict[str, str]  # versions of what trained, by name
    # the evaluation at this very step, if there was one; None stands for a number that is not finite
    metrics: dict[str, float | None] = {}
    last_metrics: dict[str, float | None] = {}  # the last evaluation at or before this step
    window: dict[str, float | None] = {}  # sums by name of the logged window that the step lies in
    window_weight: float = 0.0  # sum of the samples' weights in that window
    window_weights: dict[str, float] = {}  # the same of each name whose values have weights of their own
    window_bad_samples: _Count = 0  # how many samples could not be read and were skipped in that window
    waiting: EarlyStoppingState | None = None  # how long early stopping has waited, in a run that may stop
    plateau: PlateauState | None = None  # what the schedule plateau has lowered the learning rate to
    rescale: Any = Field(default=None, exclude=True)  # what older checkpoints kept
    # the run's name among trackers; None if no tracker has it
    tracking_id: Annotated[str, Field(pattern=r"^[0-9a-z]{8,64}$")] | None = None
    # names of what is trained, by what they are, if callbacks have frozen or thawed parameters; None while
    # all is as the model was made
    trained: dict[str, list[str]] | None = None
    data: dict[str, Fingerprint] = {}  # of the data, by the task's method
    outputs: OutputsDigest | None = None  # what the model computes for drawn inputs, if that is known
    files: dict[str, FileInfo] = {}  # size and SHA-256 of the other files, by name

    @property
    def epoch(self) -> float:
        """Passes over the training data so far."""
        return self.samples / self.data_size


class CorruptCheckpoint(Exception):
    """A checkpoint is not what was written; the text says which file and how."""


def to_bytes(manifest: Manifest) -> bytes:
    """Return a manifest as canonical JSON, with a checksum of itself."""
    values = {"format": _FORMAT, **manifest.model_dump(mode="json")}
    return canonical_json({**values, "sha256": checksum(values)})


def canonical_json(values: Mapping[str, Any]) -> bytes:
    """Return JSON in the one layout that manifests are written in."""
    return (json.dumps(values, indent=2, allow_nan=False) + "\n").encode()


def checksum(values: Mapping[str, Any]) -> str:
    """Return the SHA-256 that a manifest with these values contains."""
    return hashlib.sha256(canonical_json(values)).hexdigest()


def read(path: Path) -> Manifest:
    """Read a manifest."""
    try:
        content = read_regular(path, MAX_BYTES)
    except NotAFileError as error:
        raise CorruptCheckpoint(str(error)) from None
    return parse(content, path.name, str(path.parent))


def parse(content: bytes, name: str, place: str) -> Manifest:
    """Return the manifest that a file or an object holds; raises as ``read`` does."""
    try:
        values = json.loads(content)
        as_written = isinstance(values, dict) and canonical_json(values) == content
    except (ValueError, RecursionError):
        as_written = False
    if not as_written or values.pop("sha256", None) != checksum(values):
        raise CorruptCheckpoint(f"{name} is not as it was written")
    if (found := values.pop("format", None)) != _FORMAT:
        raise EnvironmentFault(
            f"checkpoint {place} has format {found}; this version of hvdtrain reads {_FORMAT}",
            "Use the version that wrote it, or a newer one.",
        )
    try:
        return Manifest.model_validate(values)
    except ValidationError as error:
        detail = error.errors()[0]
        field, found = ".".join(map(str, detail["loc"])), repr(detail["input"])
        found = found if len(found) <= _MAX_SHOWN else f"{found[:_MAX_SHOWN]}..."
        raise CorruptCheckpoint(f"{name}: {field}: {detail['msg']}, found {found}") from None
