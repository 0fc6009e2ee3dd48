"""A file system of fsspec in memory with the faults that a test sets: faulty://folder/file."""

from collections.abc import Callable
from typing import Any, ClassVar

import fsspec
from fsspec.implementations.memory import MemoryFileSystem


class FaultyFileSystem(MemoryFileSystem):
    """Calls ``before`` with the method and the path before each request."""

    protocol = "faulty"
    cachable = False
    store: ClassVar[dict[str, Any]] = {}
    pseudo_dirs: ClassVar[list[str]] = [""]
    before: ClassVar[Callable[[str, str], None]] = staticmethod(lambda method, path: None)

    @classmethod
    def _strip_protocol(cls, path):
        return super()._strip_protocol(path.removeprefix("faulty://"))

    def _ask(self, method, path):
        type(self).before(method, path)

    def pipe_file(self, path, value, mode="overwrite", **kwargs):
        self._ask("pipe_file", path)
        return super().pipe_file(path, value, mode=mode, **kwargs)

    def put_file(self, lpath, rpath, callback=fsspec.callbacks.DEFAULT_CALLBACK, **kwargs):
        self._ask("put_file", rpath)
        with open(lpath, "rb") as file:
            return super().pipe_file(rpath, file.read())

    def cat_file(self, path, start=None, end=None, **kwargs):
        self._ask("cat_file", path)
        return super().cat_file(path, start, end, **kwargs)

    def info(self, path, **kwargs):
        self._ask("info", path)
        return super().info(path, **kwargs)

    def cp_file(self, path1, path2, **kwargs):
        self._ask("cp_file", path1)
        return super().cp_file(path1, path2, **kwargs)

    def rm_file(self, path):
        self._ask("rm_file", path)
        return super()._rm(path)


class FaultyStore:
    """What a test has of the file system; ``url`` is a folder in it."""

    url = "faulty://bucket/run"

    def __init__(self) -> None:
        fsspec.register_implementation("faulty", FaultyFileSystem, clobber=True)
        self._system = FaultyFileSystem()
        self.heal()
        FaultyFileSystem.store.clear()
        FaultyFileSystem.pseudo_dirs[:] = [""]

    def heal(self) -> None:
        FaultyFileSystem.before = staticmethod(lambda method, path: None)

    def fail(self, fails: Callable[[str, str], bool], error: Exception | None = None) -> None:
        """Let the requests fail that a function of method and path chooses."""

        def before(method, path):
            if fails(method, path):
                raise error or OSError("the store is down")

        FaultyFileSystem.before = staticmethod(before)

    def objects(self) -> dict[str, bytes]:
        """Return the objects of the folder by their names in it."""
        prefix = "/bucket/run/"
        return {
            path[len(prefix) :]: file.getvalue()
            for path, file in sorted(FaultyFileSystem.store.items())
            if path.startswith(prefix)
        }

    def put(self, name: str, content: bytes) -> None:
        MemoryFileSystem.pipe_file(self._system, f"/bucket/run/{name}", content)

    def remove(self, name: str) -> None:
        FaultyFileSystem.store.pop(f"/bucket/run/{name}")
