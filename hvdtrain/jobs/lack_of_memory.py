"""The error of a job that runs out of memory."""

from collections.abc import Sequence

from hvdtrain.backends.memory import MemoryPlan, describe_activations, mebibytes
from hvdtrain.errors import LackOfMemoryError
from hvdtrain.host.memory import is_out_of_memory, peak_bytes
from hvdtrain.workers.user_errors import where_raised


def lack_of_memory(
    error: BaseException, doing: str, plan: MemoryPlan | None, largest: Sequence[tuple[str, int]] = ()
) -> LackOfMemoryError | None:
    """Return the error of work that ran out of memory; None if an error says something else.

    Args:
        error: what was raised.
        doing: what failed, such as "training failed at step 3".
        plan: the job's memory, if it is known.
        largest: the largest tensors of the micro-batch that failed, if the plan does not have them.
    """
    if not is_out_of_memory(error):
        return None
    lines = [f"This worker has had {mebibytes(peak_bytes())} of the host's memory."]
    if plan is not None:
        lines += [plan.describe_largest(), *filter(None, [describe_activations(largest)])]
        lines += ["To take less:", *(f"  {text}" for text in plan.remedies)]
    return LackOfMemoryError(f"{doing}, out of memory: {where_raised(error)}", "\n  ".join(lines))
