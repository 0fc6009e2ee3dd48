"""The workers of a job through Horovod, whichever framework's binding it is."""

import socket
from typing import Any

from hvdtrain.errors import PeerLostError
from hvdtrain.horovod_build.installed import installed_build
from hvdtrain.host.launches import check_launch_is_seen, stated_launch


class HorovodWorkers:
    """Workers over an initialised Horovod binding.

    Args:
        hvd: ``horovod.torch`` or ``horovod.tensorflow``, after its ``init()``.

    Raises:
        EnvironmentFault: If a launcher started several processes that Horovod does not see.
    """

    def __init__(self, hvd: Any) -> None:
        self._hvd = hvd
        self.rank: int = hvd.rank()
        self.size: int = hvd.size()
        self.local_rank: int = hvd.local_rank()
        self.local_size: int = hvd.local_size()
        self.host = socket.gethostname()
        self.controller = "none" if self.size == 1 else "MPI" if hvd.mpi_enabled() else "Gloo"
        if (launch := stated_launch()) is not None:
            build = installed_build()
            check_launch_is_seen(launch, self.size, self.rank, (build and build.mpi) or "")

    def broadcast_object(self, value: Any, root: int = 0) -> Any:
        """Collective. Return the root's value, which must pickle, on every worker."""
        if self.size == 1:
            return value
        with peer_errors():
            return self._hvd.broadcast_object(value, root_rank=root, name="hvdtrain.broadcast")

    def allgather_object(self, value: Any) -> list[Any]:
        """Collective. Return the values of all workers, in the order of ranks, on every worker."""
        if self.size == 1:
            return [value]
        with peer_errors():
            gathered: list[Any] = self._hvd.allgather_object(value, name="hvdtrain.allgather")
            return gathered

    def barrier(self) -> None:
        """Collective. Wait until every worker is here."""
        self.allgather_object(None)


class peer_errors:  # noqa: N801 - used as a statement
    """Return a context in which the failure of a collective becomes a PeerLostError.

    PyTorch's binding raises HorovodInternalError; TensorFlow's raises its own error classes, also
    out of a compiled step, with Horovod's text in them.
    """

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        if isinstance(error, Exception) and is_peer_error(error):
            raise PeerLostError(
                "a collective operation failed because another worker ended", first_line(error)
            ) from error


# texts of Horovod's native errors and of its transports, as they arrive through TensorFlow
_TEXTS = ("Horovod has been shut down", "HorovodInternalError", "Horovod background", "gloo/transport")


def is_peer_error(error: Exception) -> bool:
    """Return whether an exception says that a collective failed."""
    names = {cls.__name__ for cls in type(error).__mro__}
    return "HorovodInternalError" in names or any(text in str(error) for text in _TEXTS)


def first_line(error: Exception) -> str:
    """Return the first non-empty line of an exception's text."""
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
