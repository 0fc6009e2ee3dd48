"""Where the model of a run is cut into stages: what was measured once stays, as other cuts draw otherwise."""

from pathlib import Path

from hvdtrain.backends.base import ModelInfo
from hvdtrain.config import Config
from hvdtrain.errors import CheckpointError, EnvironmentFault
from hvdtrain.jobs.opening.checkpoint_config import find_unverified
from hvdtrain.storage.urls import is_url
from hvdtrain.workers.agreement import Workers, run_on_rank_zero


def with_cuts_before(config: Config, workers: Workers) -> Config:
    """Collective if the model is split. Return the config with the cuts of the checkpoint that it resumes.

    It stays as it is if it has cuts, or if that checkpoint is of the other framework, whose blocks may be
    others, or of another number of stages.

    Args:
        config: the resolved config.
        workers: the job's workers.
    """
    if config.stages == 1 or config.stage_cuts is not None or config.resume is None:
        return config
    place = str(config.run_dir if config.resume == "auto" else config.resume)

    def find() -> list[int] | None:
        try:
            made = find_unverified(place if is_url(place) else Path(place)).manifest.config
        except (CheckpointError, EnvironmentFault):  # what is wrong is said when it is read
            return None
        is_alike = (made.get("framework"), made.get("stages")) == (config.framework, config.stages)
        return made.get("stage_cuts") if is_alike else None

    cuts = run_on_rank_zero(workers, find, doing="looking for the checkpoint")
    return config if cuts is None else config.model_copy(update={"stage_cuts": tuple(cuts)})


def with_cuts_of(config: Config, model: ModelInfo) -> Config:
    """Return the config with the cuts that a model has, so that whoever uses it again has the same.

    Args:
        config: the resolved config.
        model: what is known of the model.
    """
    return config.model_copy(update={"stage_cuts": model.stage_cuts}) if model.stage_cuts else config
