"""The memory of a job: its plan, whether that fits, and the error of a job that runs out of it."""

from hvdtrain.agreement import Workers
from hvdtrain.backends.base import ModelInfo
from hvdtrain.errors import LackOfMemoryError
from hvdtrain.host.memory import is_out_of_memory, limit_bytes, peak_bytes
from hvdtrain.memory_plan import MemoryPlan, mebibytes, memory_plan
from hvdtrain.session import Session
from hvdtrain.user_errors import where_raised


def plan_memory(session: Session, model: ModelInfo) -> MemoryPlan:
    """Return what the model, its gradients and its optimizer take on each worker. Local: no collective.

    Of a split model, it is that of the stage that takes most.
    """
    workers = session.backend.workers
    plans = [
        memory_plan(
            shapes,
            session.config,
            workers=workers.size,
            is_elastic=workers.is_elastic,
            frozen_parameters=model.frozen_parameters,
            micro_batch=session.plan().batch.micro_batch,
            has_own_optimizer=model.own_rates is not None,
        )
        for shapes in model.stage_shapes or (model.parameter_shapes,)
    ]
    return max(plans, key=lambda plan: plan.total_bytes)


def notes_on_memory(plan: MemoryPlan, workers: Workers) -> list[str]:
    """Return a note if what is planned does not fit into this host's memory; empty otherwise. Local."""
    text = plan.exceeds(limit_bytes(workers.local_size))
    return [f"{text}; {'; '.join(plan.remedies)}"] if text else []


def lack_of_memory(error: BaseException, doing: str, plan: MemoryPlan | None) -> LackOfMemoryError | None:
    """Return the error of work that ran out of memory; None if an error says something else.

    Args:
        error: what was raised.
        doing: what failed, such as "training failed at step 3".
        plan: the job's memory, if it is known.
    """
    if not is_out_of_memory(error):
        return None
    lines = [f"This worker has had {mebibytes(peak_bytes())} of the host's memory."]
    if plan is not None:
        lines += [plan.describe_largest(), "To take less:", *(f"  {text}" for text in plan.remedies)]
    return LackOfMemoryError(f"{doing}, out of memory: {where_raised(error)}", "\n  ".join(lines))
