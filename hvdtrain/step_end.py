"""What is due after a step: evaluating, judging the evaluation, and saving."""

import time

from hvdtrain.backends.step_metrics import NO_FLAGS, StepStatistics, encode_signals
from hvdtrain.backends.trained_set import follow_trained
from hvdtrain.callbacks import SHOULD_STOP
from hvdtrain.checkpoints.digest import digest_of
from hvdtrain.data.eval_sets import metric_prefixes, set_words
from hvdtrain.early_stopping import MetricGoal
from hvdtrain.errors import ConfigError, PeerLostError, WorldChanged
from hvdtrain.metrics import Window
from hvdtrain.reporting.report import call_hook
from hvdtrain.session import Session, StepEnd
from hvdtrain.step_results import StepResults, check_weights, name_skipped_samples, nothing_counts
from hvdtrain.training_plan import TrainingPlan
from hvdtrain.workers.activity import ACTIVITY, EVALUATING, SAVING
from hvdtrain.workers.agreement import run_on_rank_zero


def finish_step(session: Session, plan: TrainingPlan, results: StepResults) -> bool:
    """Collective. Do what is due after the last step and not done; return whether training ends early."""
    # What is done is kept in the run's state, so that nothing is done twice if a worker goes away meanwhile.
    state = session.state
    step = state.last_step
    assert step is not None
    if state.step_end == StepEnd.STEPPED:
        is_best = stops = False
        if session.data.evaluation is not None and plan.is_due(session.config.eval_every, step):
            results.read_all()
            with session.pause_timer():
                _evaluate_deferring(session, plan, step.learning_rate)
            is_best, stops = _judge_evaluation(session, plan)
        due = plan.is_due(session.config.save_every, step)
        state.save_is_due, state.step_end = is_best or stops or due, StepEnd.JUDGED
        session.raise_deferred()
    if state.awaits_answer:  # a worker was lost meanwhile
        state.save_is_due |= stopped_by_callback(session, plan)
        session.raise_deferred()
    if state.save_is_due or session.wanted:
        results.read_all()  # a state with a loss that is not finite is never saved
        if state.save_is_due or session.wanted.stop or session.wanted.save:
            with session.pause_timer():
                save(session)
    state.step_end = StepEnd.SAVED
    wanted, session.wanted = session.wanted, NO_FLAGS
    ends = bool(session.stopped_early) or plan.is_done(step)
    session.stopped = wanted.stop and not ends
    if wanted.change and not wanted.stop and not ends:
        raise WorldChanged
    return bool(session.stopped_early) or wanted.stop  # at the end of the plan the feed has no more batches


def evaluate(session: Session, plan: TrainingPlan, learning_rate: float = 0.0) -> dict[str, float]:
    """Collective. Evaluate on the whole evaluation data, exactly, and report it: each set by itself."""
    # The model has the moving average of its weights meanwhile, if the run keeps one.
    _evaluate_deferring(session, plan, learning_rate)
    session.raise_deferred()
    return session.state.last_eval


def _evaluate_deferring(session: Session, plan: TrainingPlan, learning_rate: float) -> None:
    """Collective. Evaluate on each set and report all; a collective of a callback that fails is deferred."""
    backend, state, skipped = session.backend, session.state, session.data.skipped.count
    total, means = Window(), dict[str, float]()
    try:
        with ACTIVITY.during(EVALUATING, state.progress.step):
            _combine_state(session)
            with backend.ema_weights():
                for name, prefix in metric_prefixes(session.data.evaluation).items():
                    of_set = f"{name} " if name else ""
                    session.services.report.status(f"evaluating {of_set}at step {state.progress.step:,}")
                    window = _evaluate_set(session, plan, name)
                    means |= {f"{prefix}{metric}": mean for metric, mean in window.means().items()}
                    total.weight, total.ended_seconds = total.weight + window.weight, window.ended_seconds
                    total.bad_samples += window.bad_samples
                state.last_eval, state.last_eval_step = means, state.progress.step
                step, more = session.step_info(learning_rate), session.services.hooks.values()
                more |= total.skipped()
                with session.defer_peer_loss():
                    session.services.report.on_evaluation(step, means, total.samples_per_second(), more)
    except PeerLostError:
        session.data.skipped.count = skipped  # the evaluation is done again
        raise


def _evaluate_set(session: Session, plan: TrainingPlan, name: str) -> Window:
    """Collective. Evaluate on a set of the evaluation data; return the sums over its samples."""
    backend, window, partial = session.backend, Window(), None
    with session.data.eval_feed(plan, name) as feed:
        for batch in backend.to_device(feed):
            ACTIVITY.enter(EVALUATING, session.state.progress.step, is_long=True)
            partial = backend.eval_step(batch, partial)
        skipped, _ = session.data.skipped_in(feed)
    signals = encode_signals(statistics=StepStatistics(skipped_samples=skipped))
    metrics = backend.eval_metrics(partial, signals).read()
    check_weights(f"the evaluation of {name!r}" if name else "the evaluation", metrics)
    if not metrics.weights.get("loss", metrics.weight):
        raise nothing_counts(f"the {set_words(name)}")
    if metrics.statistics.skipped_samples:
        session.data.skipped.count += metrics.statistics.skipped_samples
        name_skipped_samples(session)
    window.add(metrics.without_skipped_samples(), time.perf_counter())
    return window


def save(session: Session) -> None:
    """Collective. Give all workers the state that is saved, and save; rank 0 writes, in the background."""
    with ACTIVITY.during(SAVING, session.state.progress.step):
        follow_changes(session, session.state.progress.step + 1)
        _combine_state(session)
        backend, config, averaged = session.backend, session.config, session.config.ema_decay is not None
        with backend.ema_weights():
            outputs = digest_of(backend, config, session.services.forms, averaged)
        session.services.saver.save(backend, session.manifest().model_copy(update={"outputs": outputs}))
    session.state.save_is_due, session.state.saved_step = False, session.state.progress.step


def follow_changes(session: Session, number: int) -> None:
    """Collective. Follow what callbacks have frozen or thawed since the last step."""
    if note := follow_trained(session.backend, session.config, number):
        session.services.report.note(note)
        session.services.hooks.after_pause()


def _combine_state(session: Session) -> None:
    """Collective. Give all workers one state of what no optimizer updates: what is evaluated is saved."""
    if late := session.backend.sync_statistics():
        session.services.report.note(
            f"training also changes {', '.join(late)}, on each worker by itself: from here on, all take rank "
            "0's before each evaluation and save; the task's state_reductions can combine them"
        )


def _judge_evaluation(session: Session, plan: TrainingPlan) -> tuple[bool, bool]:
    """Collective if a callback may stop training. Return whether an evaluation is the best, and the last."""
    state, best, goal = session.state, session.config.keep_best, session.config.early_stopping
    is_best = False
    if best is not None:
        value = _last_value("keep_best", best, session)
        is_best = best.improves(value, state.best_value)
        state.best_value = value if is_best else state.best_value
    if goal is not None and state.early_stopping is not None:
        value = _last_value("early_stopping", goal, session)
        state.early_stopping = state.early_stopping.update(goal, value, state.progress.step)
    stops = stops_early(session, plan) or stopped_by_callback(session, plan)
    _update_plateau(session, plan, is_over=stops or plan.is_done(state.progress))
    return is_best, stops


def _update_plateau(session: Session, plan: TrainingPlan, is_over: bool) -> None:
    """Lower the learning rate of the steps to come if the schedule is plateau and nothing gets better."""
    config, state, goal = session.config, session.state, session.config.plateau_goal
    if goal is None or state.plateau is None:
        return
    step, lowest = state.progress.step, config.lr_final_fraction
    value = _last_value("plateau_metric", goal, session)
    waited = state.plateau.update(goal, value, step, counts=not plan.in_warmup(step, state.progress.samples))
    state.plateau = waited
    if not waited.is_due(config.plateau_patience, lowest):
        return
    before = session.learning_rate(plan)
    state.plateau = waited.lowered(config.plateau_factor, lowest)
    if not is_over:
        session.services.report.say(
            f"learning rate {before:.4g} -> {session.learning_rate(plan):.4g} from step {step + 1:,} on: "
            f"{waited.describe(goal)}"
        )


def stops_early(session: Session, plan: TrainingPlan) -> bool:
    """Return whether training has gone long enough without improvement, and say so."""
    config, state = session.config, session.state
    if state.early_stopping is None or config.early_stopping is None or plan.is_done(state.progress):
        return False
    if not state.early_stopping.should_stop(config.early_stopping_patience):
        return False
    why = state.early_stopping.describe(config.early_stopping)
    session.stopped_early = f"stopped early at step {state.progress.step:,}: {why}"
    session.services.report.say(session.stopped_early)
    return True


def stopped_by_callback(session: Session, plan: TrainingPlan) -> bool:
    """Collective if there are such callbacks. Return whether one of rank 0's ends training, and report it."""
    # A peer may be lost meanwhile. Then rank 0 keeps the answer, and workers without one need it.
    state = session.state
    if not session.services.stoppers or plan.is_done(state.progress):
        state.awaits_answer = False
        return False

    def answer() -> str:
        stoppers, step, metrics = session.services.stoppers, state.last_step, state.last_eval
        answers = (call_hook(callback, SHOULD_STOP, step, dict(metrics)) for callback in stoppers)
        if why := next(filter(None, answers), ""):  # of the first one that ends training
            session.stopped_early = f"stopped early at step {state.progress.step:,}: {why}"
        state.awaits_answer = False
        return session.stopped_early

    state.awaits_answer = True
    with session.defer_peer_loss():
        session.stopped_early = run_on_rank_zero(
            session.backend.workers, answer, "asking callbacks whether to stop"
        )
        state.awaits_answer = False
    if session.stopped_early:
        session.services.report.say(session.stopped_early)
    return bool(session.stopped_early)


def _last_value(field: str, goal: MetricGoal, session: Session) -> float:
    """Return the metric that a field names, of the evaluation just done."""
    last_eval = session.state.last_eval
    if goal.metric not in last_eval:
        raise ConfigError(
            f"{field}: there is no metric {goal.metric!r}; the evaluation gives {', '.join(last_eval)}",
            everywhere=True,
        )
    return last_eval[goal.metric]


def is_left_to_evaluate(session: Session, plan: TrainingPlan) -> bool:
    """Return whether training was done before this run began, but not its last evaluation."""
    state = session.state
    if state.is_unfinished or session.data.evaluation is None:
        return False
    return plan.is_done(state.progress) and state.last_eval_step != state.progress.step
