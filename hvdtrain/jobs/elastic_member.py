"""How a worker joins the elastic job that started it."""

import os

from hvdtrain.backends.abort import abort_collectives
from hvdtrain.config import Config
from hvdtrain.elastic.member.client import connect
from hvdtrain.elastic.member.membership import Membership
from hvdtrain.host.launcher import is_elastic
from hvdtrain.jobs.failures import end_of_job
from hvdtrain.jobs.signals import ElasticSignals, Signals
from hvdtrain.watch.watch_events import Watching


def join_elastic_job(config: Config, signals: Signals, watching: Watching) -> Membership | None:
    """Join the elastic job that started this process; return None if the job is not elastic.

    From now on SIGTERM to this worker means that it leaves, and the driver may end the process if the
    training thread does not notice that the job has ended.

    Args:
        config: the job's config.
        signals: what ``interruptible`` gave.
        watching: what is done before the process ends without the training thread.

    Raises:
        EnvironmentFault: If the driver does not answer.
        RefusedError: If it does not take this worker.
        JobEnded: If the job has ended.
    """
    if not is_elastic():
        return None
    client = connect(os.environ, stall_timeout=config.stall_timeout, abort=abort_collectives)
    client.on_end(lambda error: end_of_job(error, None if client.lost_lease else watching.on_worker_lost))
    if isinstance(signals, ElasticSignals):
        signals.membership = client
    return client
