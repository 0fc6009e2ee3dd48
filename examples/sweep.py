"""Search config fields with Optuna: each trial is a job of its own, with two workers.

    python -m pip install optuna
    python examples/sweep.py torch
    python examples/sweep.py tf --trials 30 --workers 4

The study and the run directories of its trials are in sweeps/digits-torch. The same command continues a sweep
that was interrupted: trials that had not ended resume from their newest checkpoint. The curves of all trials:
``python -m hvdtrain report sweeps/digits-torch``.
"""

import argparse
from pathlib import Path

import optuna
from optuna.trial import Trial, TrialState

import hvdtrain

METRIC = "accuracy"


def open_study(folder):
    """Return the study in a folder, which is made if there is none."""
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    return optuna.create_study(
        study_name="sweep",
        storage=f"sqlite:///{folder}/study.db",
        direction="maximize",
        pruner=optuna.pruners.MedianPruner(),
        load_if_exists=True,
    )


def fields_of(trial):
    """Return the config fields of a trial: what is searched, and what all trials have in common."""
    return {
        "learning_rate": trial.suggest_float("learning_rate", 1e-3, 1.0, log=True),
        "batch_size": trial.suggest_categorical("batch_size", [8, 16, 32]),
        "optimizer": trial.suggest_categorical("optimizer", ["sgd", "adamw"]),
        "epochs": 4,
        "keep_last": 1,
    }


class Prune(hvdtrain.Callback):
    """Reports evaluations to the study. Rank 0 does so, and all workers stop at the same step."""

    def __init__(self, folder, number):
        self.folder, self.number = folder, number

    def on_start(self, context):
        study = open_study(self.folder)
        self.trial = Trial(study, study.trials[self.number]._trial_id)

    def should_stop(self, step, metrics):
        self.trial.report(metrics[METRIC], round(step.epoch))  # comparable for all batch sizes
        return "pruned" if self.trial.should_prune() else ""


def train(fields, prune):
    """Train on every worker."""
    return hvdtrain.train("digits", callbacks=[prune], resume="auto", quiet=True, **fields)


def run_trial(study, trial, folder, options):
    """Run the job of a trial, and keep its result in the study."""
    run_dir = folder / f"trial-{trial.number:04d}"
    fields = {**fields_of(trial), "framework": options.framework, "run_dir": str(run_dir)}
    print(f"trial {trial.number}: {trial.params}", flush=True)
    try:
        summary = hvdtrain.launch(train, np=options.workers, args=(fields, Prune(folder, trial.number)))
    except hvdtrain.errors.NonFiniteLossError as error:
        print(f"  failed: {error.problem}")
        study.tell(trial, state=TrialState.FAIL)
        return
    value = summary.final[METRIC]
    print(f"  {METRIC} {value:.4f}", summary.stopped_early or f"after {summary.steps} steps")
    if summary.stopped_early:
        study.tell(trial, state=TrialState.PRUNED)
    else:
        study.tell(trial, value)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("framework", choices=["torch", "tf"])
    parser.add_argument("--trials", type=int, default=20)
    parser.add_argument("--workers", type=int, default=2)
    options = parser.parse_args()
    folder = Path("sweeps", f"digits-{options.framework}").resolve()
    folder.mkdir(parents=True, exist_ok=True)
    study = open_study(folder)
    for one in study.get_trials(states=(TrialState.RUNNING,)):
        run_trial(study, Trial(study, one._trial_id), folder, options)
    while len(study.trials) < options.trials:
        run_trial(study, study.ask(), folder, options)
    for one in study.trials:
        value = "no value" if one.value is None else f"{one.value:.4f}"
        print(f"{one.number:>5}  {one.state.name:8}  {value:8}  {one.params}")
    if study.get_trials(states=(TrialState.COMPLETE,)):
        best = folder / f"trial-{study.best_trial.number:04d}"
        print(f"best: horovodrun -np {options.workers} python -m hvdtrain {best}/config.yaml")


if __name__ == "__main__":
    main()
