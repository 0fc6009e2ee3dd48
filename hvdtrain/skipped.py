"""Samples that were skipped: counted over all workers, the first of them named."""

from hvdtrain.session import Session

_NAMED = 5


def tell_of_bad_samples(session: Session, found: int) -> None:
    """Collective where ``found`` is not 0. Count what could not be read, and name the first few.

    Args:
        session: the run.
        found: how many samples could not be read, on all workers; the same on every one of them.
    """
    if found == 0:
        return
    session.bad_samples += found
    if len(session.told) >= _NAMED:
        return
    untold, session.untold = session.untold, []
    gathered = session.backend.workers.allgather_object(untold[:_NAMED])
    for said in (said for of_worker in gathered for said in of_worker):
        if said not in session.told and len(session.told) < _NAMED:
            session.report.note(f"skipped {said}")
            session.told.add(said)
