"""What unit tests share: hypothesis without clocks, random starts and files."""

from hypothesis import settings

settings.register_profile("unit", deadline=None, derandomize=True, database=None, max_examples=60)
settings.load_profile("unit")
