"""Words for numbers of things."""


def counted(number: float, noun: str) -> str:
    """Return a number of things as text: "1 worker", "1,797 samples", "0.5 epochs"."""
    text = f"{number:,}" if isinstance(number, int) else f"{number:,g}"
    return f"{text} {noun}" if number == 1 else f"{text} {noun}s"
