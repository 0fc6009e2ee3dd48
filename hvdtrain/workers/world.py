"""A world: one generation of a job's workers, which Horovod connects."""

import hashlib
import hmac
import os
import secrets
from collections.abc import Mapping
from hashlib import sha256
from typing import Literal, NamedTuple

from pydantic import BaseModel, ConfigDict, Field

KEY_VARIABLE = "HOROVOD_RENDEZVOUS_KEY"

_HEADER = "X-Horovod-Auth"


class SignedRequests:
    """Signs the requests of one client, which sends them one after the other."""

    def __init__(self, environ: Mapping[str, str] = os.environ) -> None:
        self._key = environ.get(KEY_VARIABLE, "").encode()
        self._client = secrets.token_hex(16)
        self._number = 0

    def headers(self, method: str, path: str, body: bytes = b"") -> dict[str, str]:
        """Return the header of the next request; the server takes it once."""
        if not self._key:
            return {}
        self._number += 1
        digest = hashlib.sha256(body).hexdigest()
        identity = f"{self._client} {self._number}"
        return {_HEADER: f"{identity} {digest} {self._proof('request', identity, method, path, digest)}"}

    def is_authentic(self, status: int, headers: Mapping[str, str], body: bytes) -> bool:
        """Return whether a response to the latest request comes from the server of the job."""
        if not self._key:
            return True
        identity = f"{self._client} {self._number}"
        expected = self._proof("response", identity, str(status), hashlib.sha256(body).hexdigest())
        return hmac.compare_digest(headers.get(_HEADER, "").encode(), expected.encode())

    def _proof(self, *parts: str) -> str:
        return hmac.new(self._key, "\n".join(parts).encode(), hashlib.sha256).hexdigest()


Source = Literal["start", "root", "checkpoint"]
Purpose = Literal["train", "save", "stop"]


class TrainingPosition(NamedTuple):
    """Where a worker stands in the training; greater is further."""

    step: int = 0  # steps that are done
    # what of the step's end is done: 0 the step itself, 1 its evaluation and judgement, 2 its save
    stage: int = 0


class Frozen(BaseModel):
    """What workers of an elastic job and its driver send one another, or a part of it."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class MemberInfo(Frozen):
    """A worker of a world as the others know it."""

    worker: str  # the name of its process, such as "w7"; never given again
    rank: int  # its rank
    host: str  # the name of its host
    pid: int  # its process
    place: TrainingPosition = TrainingPosition()  # its place in the training
    is_new: bool = False  # whether it was not in the world before

    def __str__(self) -> str:
        """Return rank and host, such as "rank 2 on h2"."""
        return f"rank {self.rank} on {self.host}"


class Change(Frozen):
    """Why a world took the place of the one before."""

    # who is no longer in it, with the reason, as text such as "rank 2 on h2: killed (SIGKILL)"
    left: tuple[str, ...] = ()
    joined: tuple[str, ...] = ()  # who came, as text
    why: str = ""  # what began the change, as text
    since_seconds: float = 0.0  # how long ago the change began


class World(Frozen):
    """One generation of a job's workers as one of them is notified of it."""

    generation: int  # its number, from 1; it only grows
    rank: int  # this worker. Rank 0 is always a worker with a valid state and the largest place
    size: int  # number of workers
    local_rank: int  # this worker among those of its host
    local_size: int  # number of workers on this host
    cross_rank: int  # this host among those that have a worker of this local rank
    cross_size: int  # number of such hosts
    host: str  # the name of this worker's host, as Horovod groups by it
    store: tuple[str, int]  # address and port of the world's own rendezvous
    one_host: bool  # whether all workers are on one host
    salt: str  # what the world's key is derived with; only its members are notified
    # where the state comes from: from the start of training, from rank 0, or from a checkpoint
    source: Source = "start"
    # what it is for: to train, to save because too few workers are left, or to save and stop
    purpose: Purpose = "train"
    why: str = ""  # why it does not train, as text; empty if it does
    members: tuple[MemberInfo, ...] = Field(default=())  # all workers, in the order of ranks
    change: Change | None = None  # why it took the place of the one before; None in the first
    run_dir: str = ""  # the run directory of the job; empty while no worker has said that it trains there

    @property
    def root(self) -> TrainingPosition:
        """Where rank 0 stands."""
        return self.members[0].place if self.members else TrainingPosition()

    def environment(self, job_key: str) -> dict[str, str]:
        """Return the variables with which Horovod enters this world."""
        address, port = self.store
        numbers = ("rank", "size", "local_rank", "local_size", "cross_rank", "cross_size")
        return {
            **{f"HOROVOD_{name.upper()}": str(getattr(self, name)) for name in numbers},
            "HOROVOD_HOSTNAME": self.host,
            "HOROVOD_GLOO_RENDEZVOUS_ADDR": address,
            "HOROVOD_GLOO_RENDEZVOUS_PORT": str(port),
            "HOROVOD_CONTROLLER": "gloo",
            "HOROVOD_CPU_OPERATIONS": "gloo",
            KEY_VARIABLE: world_key(job_key, self.generation, self.salt),
        }


def world_key(job_key: str, generation: int, salt: str) -> str:
    """Return the key of a world's store and connections, in hexadecimal digits."""
    return hmac.new(job_key.encode(), f"world|{generation}|{salt}".encode(), sha256).hexdigest()
