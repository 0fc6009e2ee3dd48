"""What a config asks of a backend, and whether the framework's backend can do it."""

from hvdtrain.config import Config
from hvdtrain.errors import ConfigError
from hvdtrain.frameworks import (
    ACTIVATION_CHECKPOINTING,
    COMPILE,
    COMPRESSION,
    EMA,
    FRAMEWORKS,
    HALF_PRECISION,
    LABEL_SMOOTHING,
    LARGE_BATCH,
    PARAMETER_GROUPS,
    SYNC_BATCH_NORM,
)

# what an option asks of a backend: config field, the value that asks nothing, the capability
_ASKS = (
    ("compile", False, COMPILE),
    ("sync_batch_norm", False, SYNC_BATCH_NORM),
    ("checkpoint_activations", False, ACTIVATION_CHECKPOINTING),
    ("precision", "fp32", HALF_PRECISION),
    ("compression", "none", COMPRESSION),
    ("ema_decay", None, EMA),
    ("label_smoothing", 0.0, LABEL_SMOOTHING),
    ("parameter_groups", (), PARAMETER_GROUPS),
    ("decay_norms_and_biases", True, PARAMETER_GROUPS),
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
