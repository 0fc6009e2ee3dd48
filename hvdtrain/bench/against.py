"""hvdtrain and another program that does the same work, started in turn."""

import math
import socket
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hvdtrain.bench.before_launch import check_before_launch
from hvdtrain.bench.comparison import TITLES, Comparison
from hvdtrain.bench.launch import (
    Program,
    exchange_folder,
    horovodrun,
    run_program,
    worker_command,
    write_specification,
)
from hvdtrain.bench.measure import check_rounds
from hvdtrain.bench.options import BenchOptions
from hvdtrain.bench.peer import check_carried
from hvdtrain.bench.sweep import check_slots, limit_of
from hvdtrain.bench.worker import HVDTRAIN, layers_to_json
from hvdtrain.config import Layer
from hvdtrain.errors import UsageError
from hvdtrain.jobs.setup import settle
from hvdtrain.jobs.signals import interruptible

_REPEAT = 5
_SAME_LOSS = 1e-4
_LEAST_STEPS, _MOST_STEPS = 30, 5000
_OF_FRAMEWORK = {"ddp": "torch", "mwms": "tf"}


def run_against(layers: list[Layer], options: BenchOptions, say: Callable[[str], None]) -> Comparison:
    """Start both programs in turn, and return what they found.

    Args:
        layers: the job's config values, weakest source first.
        options: the options of the command.
        say: is called with what is going on.

    Raises:
        UsageError: If the programs do not do the same work, or there are fewer cores than workers.
        EnvironmentFault: If a program fails.
    """
    program = options.against or "plain"
    framework = _framework_of(layers, program)
    workers = options.num_proc or (1 if program == "plain" else 2)
    if program == "plain" and workers > 1:
        raise UsageError("a plain loop has one worker", f"Leave -np {workers} out.")
    check_slots((workers,), None, may_share=False)
    task_class, config = settle(layers)  # what is wrong is said before a program is started
    check_rounds(config)
    check_carried(config, task_class)
    check_before_launch(config, (workers,), options.controller)
    own: list[dict[str, Any]] = []
    others: list[dict[str, Any]] = []
    with interruptible(), exchange_folder(shared=False) as folder:
        pair = _Pair(layers, options, framework, workers, folder)
        for turn in range(options.repeat or _REPEAT):
            # in every other turn the other program comes first, for what the machine does changes slowly
            for name in (HVDTRAIN, program) if turn % 2 == 0 else (program, HVDTRAIN):
                say(f"turn {turn + 1} of {options.repeat or _REPEAT}: {name} ...")
                if name == HVDTRAIN:
                    own.append(pair.run_own())
                else:
                    others.append(pair.run_other(program, own[0]))
            check_same_work(program, own[-1], others[-1])
    return Comparison(program, workers, own, others)


@dataclass
class _Pair:
    """Both programs.

    Attributes:
        layers: the job's config values, weakest source first.
        options: the options of the command.
        framework: "torch" or "tf".
        workers: number of workers of each.
        folder: for what they are told and find.
    """

    layers: list[Layer]
    options: BenchOptions
    framework: str
    workers: int
    folder: Path
    started: int = 0

    def run_own(self) -> dict[str, Any]:
        """Run hvdtrain, and return what it found."""
        request = {"seconds": self.options.seconds, "splits": False, "messages": False}
        path, found = self._specify({"program": HVDTRAIN, "request": request})
        command = [*self._launcher(), *worker_command(path)]
        document: dict[str, Any] = run_program(Program(HVDTRAIN, [command], limit_of(self.options)), found)
        return document

    def run_other(self, program: str, own: dict[str, Any]) -> dict[str, Any]:
        """Run the other program, and return what it found.

        Args:
            program: its name.
            own: what hvdtrain has found, from which the number of steps follows.
        """
        seconds = own["chunk_seconds"]["median"]
        steps = min(max(round(self.options.seconds / seconds), _LEAST_STEPS), _MOST_STEPS)
        values = {"program": program, "framework": self.framework, "steps": steps}
        if program == "horovod":
            path, found = self._specify({**values, "place": {}})
            commands = [[*self._launcher(), *worker_command(path)]]
        else:
            place = {"size": self.workers, "ports": free_ports(self.workers)}
            store = str(self.folder / f"store-{self.started}")
            told = [
                self._specify({**values, "place": {**place, "rank": rank, "store": store}})
                for rank in range(self.workers)
            ]
            commands, found = [worker_command(path) for path, _ in told], told[0][1]
        document: dict[str, Any] = run_program(
            Program(TITLES[program], commands, limit_of(self.options)), found
        )
        return document

    def _launcher(self) -> list[str]:
        return horovodrun(self.workers, f"localhost:{self.workers}", self.options.controller)

    def _specify(self, values: dict[str, Any]) -> tuple[Path, Path]:
        """Write what a worker is to do; return the file, and the one in which it writes what it found."""
        self.started += 1
        path, found = (self.folder / f"{name}-{self.started}.json" for name in ("job", "found"))
        write_specification(path, {**values, "layers": layers_to_json(self.layers), "found": str(found)})
        return path, found


def check_same_work(program: str, own: dict[str, Any], other: dict[str, Any]) -> None:
    """Check that both programs began with the same loss.

    Args:
        program: the other program.
        own: what hvdtrain found.
        other: what the other program found.

    Raises:
        UsageError: If they did not: then they do not do the same work.
    """
    losses = own["first_loss"], other["first_loss"]
    if not math.isclose(*losses, rel_tol=_SAME_LOSS, abs_tol=_SAME_LOSS):
        raise UsageError(
            f"--against {program}: the first loss is {losses[0]:.6g} in hvdtrain and {losses[1]:.6g} in the "
            "other program, so they do not do the same work and are not compared",
            "Weights, data or dropout that depend on something else than the seed cannot be compared, "
            "nor can a loss that weighs samples: the other program takes the mean over a worker's batch.",
        )


def _framework_of(layers: list[Layer], program: str) -> str:
    """Return the job's framework.

    Raises:
        UsageError: If none is given, or it does not have the program.
    """
    given = [layer.values["framework"] for layer in layers if layer.values.get("framework")]
    if not given:
        raise UsageError("no framework is given", "Add --framework torch or --framework tf.")
    wanted = _OF_FRAMEWORK.get(program, given[-1])
    if wanted != given[-1]:
        others = [name for name in TITLES if _OF_FRAMEWORK.get(name, given[-1]) == given[-1]]
        raise UsageError(
            f"--against {program} is a program of --framework {wanted}, and the job has {given[-1]}",
            f"With {given[-1]}: --against {', '.join(others)}.",
        )
    return str(given[-1])


def free_ports(count: int) -> list[int]:
    """Return ports of this host that nothing uses now."""
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [int(one.getsockname()[1]) for one in sockets]
