"""What both frameworks share about computing in half precision.

Weights, gradients, optimizer and saved state are fp32 in every precision; what is in half
precision is what the model computes on the way.
"""

from hvdtrain.errors import EnvironmentFault

# of the dynamic loss scale, as torch.amp.GradScaler has them
INITIAL_SCALE = 2.0**16
GROWTH_INTERVAL = 2000  # steps without an overflow, after which the scale doubles
LOWEST_SCALE = 1.0


def check_precision(precision: str, on_gpu: bool, host: str) -> None:
    """Check that this worker's device computes in a precision.

    Raises:
        EnvironmentFault: for fp16 on a CPU, which no framework is fast at and few operations know.
    """
    if precision == "fp16" and not on_gpu:
        raise EnvironmentFault(
            f"--precision fp16 needs a GPU, and on {host} the CPU computes",
            "Use --precision bf16, which computes on CPUs too, or fp32.",
        )
