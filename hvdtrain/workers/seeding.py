"""Seeding of the global random number generators: those of Python, numpy and the frameworks."""

import random
import sys
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from hashlib import blake2b
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType
from typing import Any

import numpy as np

_FRAMEWORKS = ("torch", "tensorflow")


def host_generators() -> tuple[Any, Any]:
    """Return the states of the global generators of Python and numpy."""
    return random.getstate(), np.random.get_state()


@contextmanager
def random_state_kept() -> Iterator[None]:
    """Return a context after which Python's and numpy's global generators are as they were."""
    python, numpy = host_generators()
    try:
        yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)


@contextmanager
def seeded_frameworks() -> Iterator[None]:
    """Context manager: a framework that is imported inside is seeded as soon as it is imported."""
    finder = _SeedingFinder()
    torch = _loaded("torch")
    torch_state = torch.get_rng_state() if torch else None
    sys.meta_path.insert(0, finder)
    try:
        with random_state_kept():
            yield
    finally:
        sys.meta_path.remove(finder)
        if torch and torch_state is not None:
            torch.set_rng_state(torch_state)


def seed_generators(seed: int, purpose: str) -> None:
    """Seed the global generators of Python, numpy and all loaded frameworks, equally on every worker."""
    value = seed_host_generators(seed, purpose)
    for name in _FRAMEWORKS:
        if (module := _loaded(name)) is not None:
            _seed_framework(name, module, value)
    for finder in sys.meta_path:
        if isinstance(finder, _SeedingFinder):
            finder.seed = value


def seed_host_generators(seed: int, purpose: str) -> int:
    """Seed the global generators of Python and numpy alone; return the 32-bit number that seeds them."""
    value = zlib.crc32(f"{seed} {purpose}".encode())
    random.seed(value)
    np.random.seed(value)
    return value


def seed_host_step(key: int) -> None:
    """Seed the global generators of Python and numpy for a step; takes about five microseconds."""
    random.seed(key)
    np.random.seed(key & 0xFFFFFFFF)


def generator_digest() -> bytes:
    """Return a digest of the state of the global generators of Python, numpy and PyTorch."""
    _, keys, *numbers = np.random.get_state()
    found = blake2b(repr((random.getstate(), numbers)).encode(), digest_size=16)
    found.update(np.asarray(keys).tobytes())
    if (torch := _loaded("torch")) is not None:
        found.update(torch.get_rng_state().numpy().tobytes())
    return found.digest()


class _SeedingFinder(MetaPathFinder):
    """Finds frameworks as Python does, and seeds each of them at the end of its import."""

    def __init__(self) -> None:
        self.seed: int | None = None
        self._is_searching = False

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the spec of a framework, which seeds it after its import; None for other modules."""
        if fullname not in _FRAMEWORKS or self._is_searching or self.seed is None:
            return None
        self._is_searching = True
        try:
            spec = find_spec(fullname)
        finally:
            self._is_searching = False
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def execute_and_seed(module: ModuleType) -> None:
                execute(module)
                if self.seed is not None:
                    _seed_framework(fullname, module, self.seed)

            spec.loader.exec_module = execute_and_seed  # type: ignore[method-assign]
        return spec


def _loaded(name: str) -> ModuleType | None:
    """Return a module that has been imported completely; None if it has not."""
    module = sys.modules.get(name)
    return None if getattr(getattr(module, "__spec__", None), "_initializing", False) else module


def _seed_framework(name: str, module: ModuleType, seed: int) -> None:
    """Seed a framework. Keras draws its seeds from Python's generator unless it has one of its own."""
    if name == "torch":
        module.manual_seed(seed)
        return
    module.random.set_seed(seed)
    if (keras := _loaded("keras")) is not None:
        with random_state_kept():  # Keras seeds these two as well
            keras.utils.set_random_seed(seed)
