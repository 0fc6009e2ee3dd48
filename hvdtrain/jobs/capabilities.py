"""What a config asks of a backend, and whether the framework's backend can do it."""

from collections.abc import Mapping

from hvdtrain.agreement import Workers
from hvdtrain.compression import rank_of
from hvdtrain.config import Config
from hvdtrain.errors import ConfigError, EnvironmentFault
from hvdtrain.frameworks import (
    ACTIVATION_CHECKPOINTING,
    COMPILE,
    COMPRESSION,
    EMA,
    FRAMEWORKS,
    HALF_PRECISION,
    LABEL_SMOOTHING,
    LARGE_BATCH,
    LOCAL_STEPS,
    PARAMETER_GROUPS,
    SHARDED_STATE,
    SPLIT_MODELS,
    SYNC_BATCH_NORM,
)

# what an option asks of a backend: config field, the value that asks nothing, the capability
_ASKS = (
    ("compile", False, COMPILE),
    ("sync_batch_norm", False, SYNC_BATCH_NORM),
    ("checkpoint_activations", False, ACTIVATION_CHECKPOINTING),
    ("precision", "fp32", HALF_PRECISION),
    ("compression", "none", COMPRESSION),
    ("sync_every", None, LOCAL_STEPS),
    ("shard", "none", SHARDED_STATE),
    ("stages", 1, SPLIT_MODELS),
    ("ema_decay", None, EMA),
    ("label_smoothing", 0.0, LABEL_SMOOTHING),
    ("parameter_groups", (), PARAMETER_GROUPS),
    ("decay_norms_and_biases", True, PARAMETER_GROUPS),
)

_MOST_WORKERS = 256  # each one has a place in a vector that travels with every step
# settings of Horovod that keep what they learned, or their groups of workers, for the life of a process
_FIXED_WORLD_SETTINGS = (
    "HOROVOD_HIERARCHICAL_ALLREDUCE",
    "HOROVOD_HIERARCHICAL_ALLGATHER",
    "HOROVOD_TORUS_ALLREDUCE",
    "HOROVOD_AUTOTUNE",
)


def check_elastic(
    workers: Workers, environ: Mapping[str, str], uses_nccl: bool, compression: str = "none"
) -> None:
    """Check that a job whose number of workers may change can be one; nothing if it is fixed.

    Args:
        workers: the workers.
        environ: the environment.
        uses_nccl: whether Horovod reduces gradients by NCCL.
        compression: the config's.

    Raises:
        ConfigError: If it may have too many workers, or asks for a compression that needs a fixed number.
        EnvironmentFault: If a setting or a library needs a fixed number.
    """
    if not workers.is_elastic:
        return
    if workers.most > _MOST_WORKERS:
        raise ConfigError(
            f"an elastic job can have at most {_MOST_WORKERS} workers; this one may have {workers.most}",
            f"Lower --max-np to {_MOST_WORKERS} or less.",
            everywhere=True,
        )
    if compression not in ("none", "fp16"):
        reason = "each worker keeps what it has not sent yet of its gradients, which is lost with a worker"
        if rank_of(compression) is None:
            reason = "gradients are divided among a fixed number of workers"
        raise ConfigError(
            f"compression {compression} cannot be used in an elastic job: {reason}",
            "Use --compression none or fp16, or a fixed number of workers.",
            everywhere=True,
        )
    for name in _FIXED_WORLD_SETTINGS:
        if environ.get(name, "").strip().lower() not in ("", "0", "false"):
            raise EnvironmentFault(
                f"{name}={environ[name]} needs a fixed number of workers, and this job is elastic",
                f"Leave {name} out, or start the job without --min-np and --host-discovery-script.",
            )
    if uses_nccl:
        raise EnvironmentFault(
            f"{workers.host}: gradients on GPUs travel by NCCL, which elastic jobs cannot use yet",
            "Use --device cpu, a Horovod that is built without --gpu nccl, or a fixed number of workers.",
        )


def check_capabilities(config: Config) -> None:
    """Check that the framework's backend can do what the config asks for.

    Raises:
        ConfigError: naming the option that it cannot do.
    """
    framework = FRAMEWORKS[config.framework]
    asked = [(field, capability) for field, nothing, capability in _ASKS if getattr(config, field) != nothing]
    if config.optimizer in ("lars", "lamb"):
        asked.append(("optimizer", LARGE_BATCH))
    for field, capability in asked:
        if capability not in framework.capabilities:
            raise ConfigError(
                f"{field} {getattr(config, field)}: the backend for {framework.title} cannot do this",
                f"Leave {field} out, or use another framework.",
                everywhere=True,
            )
