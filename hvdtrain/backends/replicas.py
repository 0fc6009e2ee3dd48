"""The check that the workers' copies of the model are still equal."""

from collections import Counter
from hashlib import blake2b

from hvdtrain.backends.base import Backend
from hvdtrain.backends.trained_set import describe_change, refused_change
from hvdtrain.config import Config
from hvdtrain.errors import ReplicaDriftError

_RANKS_NAMED = 8


def follow_trained(backend: Backend, config: Config, step: int) -> str:
    """Collective. Let the next step follow what callbacks have frozen or thawed; return a note of it.

    Args:
        backend: the backend.
        config: the job's config.
        step: the next step.

    Raises:
        TaskError: On every worker alike, if workers have changed different parameters, a layer was replaced,
            or the job cannot follow.
    """
    workers, change = backend.workers, backend.trained_change()
    gathered = workers.allgather_object((workers.host, change))
    if not any(any(of_rank) for _, of_rank in gathered):
        return ""
    if (error := refused_change(gathered, config, workers.is_elastic)) is not None:
        raise error
    return describe_change(change, step, backend.follow_trained())


def check_replicas(backend: Backend) -> None:
    """Collective. Check that every worker holds the same model, by one small checksum.

    What training changes on each worker by itself is left out.

    Raises:
        ReplicaDriftError: on every worker alike, naming the ranks and the first parameter that differs.
    """
    workers = backend.workers
    if workers.size == 1:
        return
    checksums = backend.checksums()
    digest = blake2b(repr(checksums).encode(), digest_size=16).digest()
    digests = workers.allgather_object(digest)
    if len(set(digests)) == 1:
        return
    everyone = workers.allgather_object((workers.host, checksums))
    # of a split model, workers have other parameters
    having: dict[str, dict[int, int]] = {}
    for rank, (_, of_rank) in enumerate(everyone):
        for name, crc in of_rank:
            having.setdefault(name, {})[rank] = crc
    usual = {name: Counter(found.values()).most_common(1)[0][0] for name, found in having.items()}
    differing = {name: found for name, found in having.items() if len(set(found.values())) > 1}
    explained = backend.replica_state.explain({name: set(crcs.values()) for name, crcs in differing.items()})
    differing = {name: found for name, found in differing.items() if name not in explained}
    if not differing:
        return
    drifted = sorted(
        {r for name, found in differing.items() for r, crc in found.items() if crc != usual[name]}
    )
    parameter = next(
        name for name, found in differing.items() if found.get(drifted[0], usual[name]) != usual[name]
    )
    ranks = ", ".join(f"rank {rank} ({everyone[rank][0]})" for rank in drifted[:_RANKS_NAMED])
    raise ReplicaDriftError(
        f"the workers' parameters differ: {ranks} drifted from the others, first in {parameter}",
        "A worker computed something else: faulty memory, another library, or a task that changes it on its "
        "own. If training does so, name it in the task's state_reductions.",
        everywhere=True,
    )
