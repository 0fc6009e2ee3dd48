"""How gradients may travel between workers: the values of the config field ``compression``."""

PLAIN = ("none", "fp16", "bf16")  # ways without a rank
LOW_RANK = "powersgd"
MAX_RANK = 32


def check_compression(value: object) -> str:
    """Return a value of the field as it is.

    Raises:
        ValueError: naming the values that there are.
    """
    if isinstance(value, str) and (value in PLAIN or rank_of(value) is not None):
        return value
    if isinstance(value, str) and value.partition(":")[0] == LOW_RANK:
        raise ValueError(f"{LOW_RANK} takes a rank from 1 to {MAX_RANK}, such as {LOW_RANK}:4")
    raise ValueError(f"should be {', '.join(map(repr, PLAIN))} or '{LOW_RANK}:RANK', such as {LOW_RANK}:4")


def rank_of(compression: str) -> int | None:
    """Return the rank of PowerSGD; None if gradients travel in another way."""
    name, _, rank = compression.partition(":")
    if name != LOW_RANK or not (rank.isascii() and rank.isdecimal()) or rank.startswith("0"):
        return None
    return int(rank) if len(rank) <= len(str(MAX_RANK)) and int(rank) <= MAX_RANK else None
