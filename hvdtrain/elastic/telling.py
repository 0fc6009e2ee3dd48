"""Telling the driver of an elastic job how this worker ends, and who of the workers reports it."""

import os

from hvdtrain.elastic.member.client import Client, connect, current
from hvdtrain.errors import EXIT_STOPPED, JobEnded, RefusedError, Removed, Stopped

_CONNECT_SECONDS = 2.0


def tell_driver(error: BaseException) -> BaseException:
    """Tell the driver of this worker's elastic job how the worker ends.

    Args:
        error: what ends it.

    Returns:
        What ends it in the driver's words, which say whether this worker reports it; the same error if the
        driver says nothing.
    """
    client = current() or _connect_to_tell(error)
    if isinstance(client, JobEnded):
        return client
    if client is None or isinstance(error, JobEnded | RefusedError):
        return error
    if isinstance(error, Removed):
        client.left()
    elif isinstance(error, Stopped):
        client.done(EXIT_STOPPED)
    else:
        client.failed(error)
        if client.ended is not None and not client.ended.speaks:
            return client.ended
    return error


def _connect_to_tell(error: BaseException) -> Client | JobEnded | None:
    """Join the job only to tell of an error before it: it ends once, with this message, if all have it.

    If another worker was faster, the job has ended, which is returned: that worker has reported it.
    """
    if isinstance(error, Exception) and not isinstance(error, JobEnded | RefusedError):
        try:
            return connect(
                os.environ, stall_timeout=_CONNECT_SECONDS, abort=lambda why: None, seconds=_CONNECT_SECONDS
            )
        except JobEnded as ended:
            return ended
        except Exception:
            return None
    return None
