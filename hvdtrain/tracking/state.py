"""What the sender of a tracker keeps from one job of a run to the next: ``tracking/mlflow.json``."""

import json
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from hvdtrain.regular_files import read_regular
from hvdtrain.reporting.jsonl import write_json

_MAX_BYTES = 1 << 22


@dataclass
class SenderState:
    """What a sender keeps.

    Attributes:
        target: server and experiment, or project, that it sends to.
        run: the run's name there.
        url: where a browser finds it; empty if that is not known.
        starts: jobs of the run whose start was sent.
        last_step: the last step that was sent.
        tried_step: the last step of what it began to send last, which the tracker may have.
        tried: a hash of the lines of that.
        tried_lines: their number.
        checkpoints: names of the checkpoints that were sent.
        status: the last status that was sent.
        unfinished: folders of the tracker's own whose content it may not have sent.
        sending: that of them which it sends as long as the run is open; empty if there is none.
    """

    target: str = ""
    run: str = ""
    url: str = ""
    starts: int = 0
    last_step: int = -1
    tried_step: int = -1
    tried: str = ""
    tried_lines: int = 0
    checkpoints: list[str] = field(default_factory=list)
    status: str = ""
    unfinished: list[str] = field(default_factory=list)
    sending: str = ""

    def where(self) -> str:
        """Return in words where the run is, and what sends files that its tracker has not sent."""
        place = f"this run is {self.url or ' of '.join(filter(None, [self.run, self.target.strip('/')]))}"
        left = [folder for folder in self.unfinished if folder != self.sending]
        return place + (
            f"; wandb sync --include-online {' '.join(left)} sends what is only there" if left else ""
        )

    @classmethod
    def read(cls, path: Path) -> "SenderState":
        """Return what a file holds; a new state if there is none, or none that can be read."""
        try:
            found: Any = json.loads(read_regular(path, _MAX_BYTES))
            empty = cls()
            for one in fields(cls):
                value = found.get(one.name, getattr(empty, one.name))
                if type(value) is not type(getattr(empty, one.name)):
                    return cls()
                setattr(empty, one.name, value)
        except (OSError, ValueError, AttributeError, RecursionError):
            return cls()
        return empty

    def write(self, path: Path) -> None:
        """Write it whole.

        Raises:
            OSError: If it cannot be written.
        """
        write_json(path, asdict(self))
