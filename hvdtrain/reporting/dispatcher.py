"""Calling the hooks of callbacks, in the order of their list."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from hvdtrain.backends.workers import peer_errors
from hvdtrain.callbacks import HOOKS, RunContext, Summary, hook_of, name_of
from hvdtrain.errors import ENDINGS, HvdtrainError, PeerLostError, WorkerFailure
from hvdtrain.workers.activity import ACTIVITY
from hvdtrain.workers.user_errors import where_raised


class Dispatcher:
    """Calls the hooks of callbacks in the order of their list."""

    def __init__(
        self, callbacks: Sequence[Any], note: Callable[[str], None], started: Sequence[Any] = ()
    ) -> None:
        self._note = note
        self._callbacks = list(callbacks)
        self._built_in = {id(callback) for callback in started}
        self._hooks: dict[str, list[tuple[Any, Callable[..., None]]]] = {hook: [] for hook in HOOKS}
        self._called: dict[int, set[str]] = {}  # by callback that was started, its hooks that are called
        for callback in started:
            self._add_hooks(callback)
        self._ended = False

    def go_on_from(self, other: "Dispatcher") -> None:
        """Do not start callbacks that another dispatcher has started, nor call hooks that it gave up.

        Callbacks whose ``on_end`` it has called are over; those that it did not have are not.
        """
        self._called = {
            known: set() if other._ended else set(hooks) for known, hooks in other._called.items()
        }

    def start(self, context: RunContext) -> None:
        """Call ``on_start``; the other hooks of a callback are called from then on.

        Raises WorkerFailure if a callback fails whose errors end the job.
        """
        self.call("on_start", context)
        while self._callbacks:
            callback = self._callbacks[0]
            method = hook_of(callback, "on_start")
            is_known = id(callback) in self._called
            if method is None or is_known or self._succeeds(callback, "on_start", method, context):
                self._add_hooks(callback)
            else:
                self._called[id(callback)] = set()
            # not before: a collective in its on_start may fail, and it is called again
            del self._callbacks[0]

    def call(self, hook: str, *args: Any) -> None:
        """Call a hook of every callback that has it; nothing after ``end``.

        Raises WorkerFailure if a callback fails whose errors end the job. Raises PeerLostError if a
        collective in a callback failed; the callbacks after it have been called, too.
        """
        if self._ended or not self._hooks[hook]:
            return
        lost: PeerLostError | None = None
        kept = []
        for callback, method in self._hooks[hook]:
            try:
                if self._succeeds(callback, hook, method, *args):
                    kept.append((callback, method))
            except PeerLostError as error:
                lost = lost or error
                kept.append((callback, method))
        self._hooks[hook] = kept
        if lost is not None:
            raise lost

    def end(self, summary: Summary) -> None:
        """Call ``on_end`` of every callback, whether or not one of them fails; no hook is called after it.

        Raises WorkerFailure if one fails whose errors end the job, and training completed.
        """
        if self._ended:
            return
        self._ended = True
        failures = []
        for callback, method in self._hooks["on_end"]:
            try:
                self._succeeds(callback, "on_end", method, summary)
            except HvdtrainError as error:
                failures.append(error)
        if failures and summary.status == "completed":
            raise failures[0]
        for failure in failures:
            self._note(failure.problem)

    def _add_hooks(self, callback: Any) -> None:
        called = self._called.setdefault(id(callback), set(HOOKS))
        for hook in HOOKS:
            is_over = hook == "on_start" and id(callback) not in self._built_in
            if hook in called and not is_over and (method := hook_of(callback, hook)) is not None:
                self._hooks[hook].append((callback, method))

    def _succeeds(self, callback: Any, hook: str, method: Callable[..., None], *args: Any) -> bool:
        """Call a hook; return False if it failed and the job continues."""
        try:
            with self._activity(callback, hook), peer_errors():
                method(*args)
        except (PeerLostError, *ENDINGS):
            raise
        except BaseException as error:
            problem = f"callback {name_of(callback)} failed in {hook}: {where_raised(error)}"
            if getattr(callback, "errors_end_job", True) or not isinstance(error, Exception):
                raise WorkerFailure(problem) from error
            self._note(f"{problem}; {_consequence(hook)}")
            self._called.get(id(callback), set()).discard(hook)
            return False
        return True

    def _activity(self, callback: Any, hook: str) -> AbstractContextManager[None]:
        """Return a context that tells the watch of the workers of a user's callback, which may take long."""
        if id(callback) in self._built_in or not ACTIVITY.is_of_this_thread:
            return nullcontext()
        step = ACTIVITY.current.step
        return ACTIVITY.during(f"in {hook} of {name_of(callback)}" + (" after step" if step else ""), step)


def _consequence(hook: str) -> str:
    if hook == "on_end":
        return "training was over"
    return "the callback is not called again" if hook == "on_start" else f"its {hook} is not called again"
