"""The command: an undisturbed run, then the same run disturbed in every way, in each framework."""

import json
import shlex
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click

from hvdtrain.drill.cases import CASES, CUT_OFF, UNDISTURBED, Drilled, Outcome, run_case
from hvdtrain.drill.history import History
from hvdtrain.drill.table import show, to_document
from hvdtrain.errors import EXIT_DONE, EXIT_TRAINING, EnvironmentFault, UsageError
from hvdtrain.host.frameworks import FRAMEWORKS
from hvdtrain.host.hostfile import parse_host_list, read_host_file
from hvdtrain.host.launcher import launched_rank, open_console
from hvdtrain.tools.drill.jobs import Launch

_HERE = 3  # workers if no hosts are given
_MOST = 16
_FIRST_SECONDS = 300.0
_FACTOR, _MORE_SECONDS = 5.0, 120.0  # the limit of a disturbed job, from the time of the undisturbed one


def run_drill(options: Mapping[str, Any]) -> int:
    """Run the command, and return its exit code: 4 if anything was lost.

    Args:
        options: the options of the command, by name.

    Raises:
        UsageError: If options contradict each other, or a launcher started this process.
        EnvironmentFault: If the undisturbed job cannot run.
    """
    launch, folder = _launch(options), Path(options["folder"])
    if folder.exists() and any(folder.iterdir()):
        raise UsageError(f"--folder {folder}: it is not empty", "Give one that does not exist.")
    frameworks = FRAMEWORKS if options["framework"] == "both" else (options["framework"],)
    cases = (*CASES, CUT_OFF) if options["hosts_may_fail"] else CASES
    outcomes: list[Outcome] = []
    for framework in frameworks:
        expected, limit_seconds = None, _FIRST_SECONDS
        for number, case in enumerate((UNDISTURBED, *cases)):
            click.echo(f"{framework}: {case.name} ...", err=True)
            drilled = Drilled(launch, framework, folder / f"{framework}-{number}", limit_seconds)
            outcome = run_case(case, drilled, expected)
            outcomes.append(outcome)
            if case is UNDISTURBED:
                if outcome.lost:
                    problem = f"the undisturbed job in {framework} failed: {'; '.join(outcome.lost)}"
                    raise EnvironmentFault(
                        problem, f"{outcome.output}\nRun the doctor: {doctor_command(options)}"
                    )
                expected = History.of(drilled.run_dir)
                limit_seconds = _FACTOR * outcome.seconds + _MORE_SECONDS
            elif not outcome.lost and not options["keep"]:
                shutil.rmtree(drilled.run_dir, ignore_errors=True)
    show(outcomes, open_console())
    if options["json_path"]:
        options["json_path"].write_text(json.dumps(to_document(outcomes), indent=2) + "\n", encoding="utf-8")
    if any(outcome.lost for outcome in outcomes):
        click.echo(f"The runs that lost something are in {folder}.")
        return EXIT_TRAINING
    if not options["keep"]:
        shutil.rmtree(folder, ignore_errors=True)
    return EXIT_DONE


def doctor_command(options: Mapping[str, Any]) -> str:
    """Return the command that checks the hosts of a drill.

    Args:
        options: the options of the drill, by name.
    """
    words = ["python", "-m", "hvdtrain", "doctor"]
    named = {"-H": "hosts", "--hostfile": "hostfile", "--ssh-port": "ssh_port"}
    named |= {"--ssh-identity-file": "ssh_identity_file"}
    for flag, name in named.items():
        words += [flag, str(options[name])] if options[name] else []
    words += ["--framework", options["framework"]] if options["framework"] != "both" else []
    return shlex.join(words)


def _launch(options: Mapping[str, Any]) -> Launch:
    if launched_rank() is not None:
        raise UsageError(
            "the drill launches jobs itself, but a launcher has started this process",
            "Run it without the launcher, with -H or --hostfile for several hosts.",
        )
    if options["hostfile"] and options["hosts"]:
        raise UsageError("--hostfile and -H both name hosts", "Give one of them.")
    ssh = ["-p", str(options["ssh_port"])] if options["ssh_port"] else []
    if options["ssh_identity_file"]:
        ssh += ["-i", str(options["ssh_identity_file"])]
    if not options["hostfile"] and not options["hosts"]:
        workers = options["workers"] or _HERE
        return Launch(workers, ("-H", f"localhost:{workers}"), ssh=tuple(ssh))
    named = read_host_file(options["hostfile"]) if options["hostfile"] else parse_host_list(options["hosts"])
    slots = sum(host.slots for host in named)
    workers = options["workers"] or min(slots, _MOST)
    if not 2 <= workers <= slots:
        raise UsageError(f"a drill needs 2 workers or more and a slot for each; there are {slots} slots")
    hosts = ",".join(f"{host.name}:{host.slots}" for host in named)
    return Launch(workers, ("-H", hosts), ssh=tuple(ssh))
