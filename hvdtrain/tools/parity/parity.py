"""The command ``parity``: a task's PyTorch model and its TensorFlow model, each in a process of its own."""

import json
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from hvdtrain.config import Layer
from hvdtrain.errors import EXIT_DONE, EXIT_TRAINING, TaskError
from hvdtrain.host.frameworks import FRAMEWORKS
from hvdtrain.host.launcher import check_is_not_launched
from hvdtrain.jobs.opening.start import check_may_be_elastic, settle
from hvdtrain.storage.text import counted
from hvdtrain.tools.launch import LARGER_LIMIT, layers_to_json, run_program
from hvdtrain.tools.output import check_writable, config_files, said_if_interrupted, say, show_found
from hvdtrain.tools.parity.observation import Observation
from hvdtrain.tools.parity.sides import read_observation
from hvdtrain.tools.parity.verdict import Result, judge

_DEFAULTS: dict[str, Any] = {"steps": 10, "initial_parameters": "portable"}
# what changes how a step is done and not what it computes, or is hvdtrain's own
_LEFT_OUT: dict[str, Any] = {
    "compile": False, "checkpoint_activations": False, "profile": None, "resume": None, "sync_every": None,
    "shard": "none", "stages": 1, "stage_cuts": None, "precision": "fp32", "compression": "none",
    "parameter_groups": (), "decay_norms_and_biases": True, "ema_decay": None, "mixup": 0.0, "cutmix": 0.0,
}  # fmt: skip


def describe(result: Result, task: str) -> str:
    """Return what was found."""
    lines = [f"parity: {task}"]
    if not result.can_compare:
        lines += [
            f"  {name}: {one or 'missing'} in PyTorch, {other or 'missing'} in TensorFlow"
            for name, one, other in result.unmatched
        ]
        return "\n".join(
            [*lines, "not compared: the models do not have the same parameters", *filter(None, result.notes)]
        )
    width = max((len(row.path) for row in result.rows), default=0)
    for row in result.rows:
        kinds = " / ".join(dict.fromkeys([row.left.kind, row.right.kind]))
        apart = (
            "other shape"
            if row.has_other_shape
            else ""
            if row.outputs is None
            else f"{row.outputs.relative:.1e}"
        )
        lines.append(f"  {row.path:<{width}}  {apart:<11}  {kinds}".rstrip())
    steps = result.steps
    lines.append(
        f"  steps: loss {steps.loss:.1e}, parameters {steps.parameters:.1e}, others "
        f"{steps.buffers:.1e}, relative"
    )
    lines += [f"note: {note}" for note in result.notes]
    return "\n".join([*lines, *conclusion(result)])


def conclusion(result: Result) -> list[str]:
    """Return what was found, in sentences."""
    how = "in fp64" if result.is_wide else "in fp32"
    if result.has_parity:
        largest = max((row.outputs.relative for row in result.rows if row.outputs is not None), default=0.0)
        return [
            f"parity: the models compute the same; outputs differ by {largest:.1e} {how}: this is rounding"
        ]
    lines = [f"first difference: {result.divergence}"] if result.divergence else []
    lines += [f"cause: {one.layer}: {one.suspect}: {one.text}" for one in result.findings]
    lines.append(f"no parity: {counted(len(result.findings), 'cause')} found")
    return [*lines, "further causes may show when this is mended: run parity again then"]


def to_document(result: Result) -> dict[str, Any]:
    """Return what was found as JSON has it."""
    return {
        "parity": result.has_parity, "fp64": result.is_wide, "notes": [*result.notes],
        "first_difference": result.divergence,
        "unmatched": [{"name": name, "torch": one, "tf": other} for name, one, other in result.unmatched],
        "findings": [asdict(one) for one in result.findings],
        "layers": [
            {"layer": row.path, "torch": row.left.kind, "tf": row.right.kind,
             "outputs": None if row.outputs is None else str(row.outputs.relative)}
            for row in result.rows
        ],
        "steps": {name: str(value) for name, value in asdict(result.steps).items()},
    }  # fmt: skip


def layers_for(layers: list[Layer], framework: str) -> list[Layer]:
    """Return the config values of one framework's side."""
    return [Layer("parity", _DEFAULTS), *layers, Layer("parity", {**_LEFT_OUT, "framework": framework})]


def check_task(task_class: Any, name: str) -> None:
    """Check that a task has what is compared, in both frameworks. No framework is loaded.

    Raises:
        TaskError: naming what it lacks, or has and cannot be compared.
    """
    for row in FRAMEWORKS.values():
        if isinstance(task_class, type) and not hasattr(task_class, row.model_method):
            raise TaskError(f"task {name} has no {row.model_method}(): parity compares the models of "
                            f"both frameworks",
                            "Write it, with the same layers and the same names.")  # fmt: skip
        if isinstance(task_class, type) and hasattr(task_class, row.step_method):
            raise TaskError(f"task {name} has {row.step_method}: parity compares losses, which its own "
                            f"step computes",
                            "Leave it out for the comparison, and give the task a loss.")  # fmt: skip


def keeps_initial_values(layers: Sequence[Layer], task_class: Any) -> bool:
    """Return whether training would start from what the models' own initializers give."""
    sources: list[Mapping[str, Any]] = [
        getattr(task_class, "defaults", {}),
        *(layer.values for layer in layers),
    ]
    return not any(name in values for values in sources for name in ("initial_parameters", "init"))


def run_parity(layers: list[Layer], json_path: Path | None, limit_seconds: float) -> int:
    """Compare a task's two models, show what was found, and return the exit code: 4 without parity.

    Each framework runs in a process of its own.

    Args:
        layers: the job's config values, weakest source first.
        json_path: file for the JSON document, if one is wanted.
        limit_seconds: when a process is ended.

    Raises:
        HvdtrainError: as training would raise it.
    """
    check_may_be_elastic(None)
    check_is_not_launched("parity", "--task TASK")
    check_writable(json_path, read=config_files(layers))
    task_class, config = settle(layers_for(layers, "torch"))
    check_task(task_class, config.task)
    found: list[Observation] = []
    with said_if_interrupted(), tempfile.TemporaryDirectory(prefix="hvdtrain-parity-") as name:
        for framework in ("torch", "tf"):
            say(f"{FRAMEWORKS[framework].title} ...")
            values = {
                "layers": layers_to_json(layers_for(layers, framework)), "folder": name,
                "start": "torch.wire" if found else "",
                "keeps_initial": keeps_initial_values(layers, task_class),
            }  # fmt: skip
            Path(name, "values.json").write_text(json.dumps(values), encoding="utf-8")
            command = [sys.executable, "-m", "hvdtrain.tools.parity.sides", str(Path(name, "values.json"))]
            run_program(
                FRAMEWORKS[framework].title,
                command,
                limit_seconds,
                Path(name, f"{framework}.json"),
                remedy=LARGER_LIMIT,
            )
            found.append(read_observation(Path(name, f"{framework}.wire")))
    result = judge(*found)
    show_found(describe(result, config.task), to_document(result), json_path)
    return EXIT_DONE if result.has_parity else EXIT_TRAINING
