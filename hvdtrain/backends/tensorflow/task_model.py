"""The model that a task makes, changed as the config requests."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import repeat
from typing import Any

import keras
import tensorflow as tf

from hvdtrain.backends.objective.losses import mask_of
from hvdtrain.backends.options import check_gpus, check_precision, find_blocks
from hvdtrain.backends.records import DeviceMemory
from hvdtrain.backends.reduction import spans_hosts
from hvdtrain.backends.tensorflow.objective.losses import with_mask
from hvdtrain.backends.tensorflow.state.layouts import children
from hvdtrain.backends.tensorflow.sync_batch_norm import BatchNormSync
from hvdtrain.backends.workers import HorovodWorkers
from hvdtrain.config import Config
from hvdtrain.errors import ConfigError, EnvironmentFault, TaskError
from hvdtrain.host.cores import threads_per_worker

Tensor = Any
Layer = Any


_POLICIES = {"bf16": "mixed_bfloat16", "fp16": "mixed_float16"}
_HALVES = (tf.bfloat16, tf.float16)


def float_bits_of(model: Any) -> int:
    """Return the bits of the numbers that a model takes: 64 if a variable or an input has them, else 32."""
    inputs = keras.tree.flatten(getattr(model, "inputs", None) or [])
    return 64 if any(str(value.dtype) == "float64" for value in (*model.variables, *inputs)) else 32


@contextmanager
def autocast(precision: str) -> Iterator[None]:
    """Return a context in which a model is made whose layers compute in half precision."""
    before = keras.config.dtype_policy()
    if precision != "fp32":
        keras.config.set_dtype_policy(_POLICIES[precision])
    try:
        yield
    finally:
        keras.config.set_dtype_policy(before)


def precision_of(model: Any, precision: str) -> str:
    """Return the precision in which a model computes: the config's, or that of its layers' policies."""
    policies = {layer.dtype_policy.name for layer in model._flatten_layers()}
    found = next((name for name, policy in _POLICIES.items() if policy in policies), "fp32")
    return found if precision == "fp32" else precision


def cast_outputs_to_fp32(model: Any, precision: str) -> Any:
    """Return the model with outputs in fp32, so that losses and metrics are computed in it."""
    return model if precision == "fp32" else _Fp32Outputs(model)


class _Fp32Outputs:
    """A model whose outputs are fp32; in everything else the model itself."""

    def __init__(self, model: Any) -> None:
        self._model = model

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        def cast(value: Any) -> Any:
            is_half = tf.is_tensor(value) and value.dtype in _HALVES
            return with_mask(tf.cast(value, tf.float32), mask_of(value)) if is_half else value

        return keras.tree.map_structure(cast, self._model(*args, **kwargs))

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._model, name)
        is_part = isinstance(value, keras.Layer) and type(self._model).call is keras.Model.call
        return _Fp32Outputs(value) if is_part else value


def apply_activation_checkpointing(model: Layer) -> None:
    """Let a model keep what goes into its blocks, and compute the rest again where it is needed."""
    remedy = "tf_model()", "keras.layers.Layer", "or use two or more of it in one place"
    for layer in find_blocks(model, children, _is_repeatable, remedy):
        layer.call = _recomputed(layer)


def _is_repeatable(_: Layer, child: Layer) -> bool:
    """Return whether a layer has weights, of a class that is not Keras's own."""
    return bool(child.weights) and not type(child).__module__.startswith("keras.")


def _recomputed(layer: Layer) -> Callable[..., Any]:
    """Return a forward pass that keeps nothing but its arguments; dropout draws the same again."""
    forward = layer.call
    generators = list(_generators(layer))
    statistics = list(layer.non_trainable_variables)
    is_repeating = False

    def call(*args: Any, **kwargs: Any) -> Any:
        leaves = keras.tree.flatten((args, kwargs))
        places = [i for i, leaf in enumerate(leaves) if tf.is_tensor(leaf) and leaf.dtype.is_floating]
        if is_repeating or not places:
            return forward(*args, **kwargs)
        drawn: list[list[Tensor]] = []

        def run(*tensors: Tensor) -> Any:
            nonlocal is_repeating
            filled = list(leaves)
            for place, tensor in zip(places, tensors, strict=True):
                filled[place] = tensor
            own_args, own_kwargs = keras.tree.pack_sequence_as((args, kwargs), filled)
            if not drawn:
                drawn.extend([] for _ in (*generators, None))  # not empty: the forward pass was done
                with _replaced("next", generators, map(_noting, generators, drawn)), _without_losses(layer):
                    return forward(*own_args, **own_kwargs)
            is_repeating = True
            try:
                # the layer itself is called: outside of the model, its types and phase are to be set again
                # statistics stay as they are: the forward pass has moved them
                fixed = _replaced("assign", statistics, repeat(lambda value: value))
                with _replaced("next", generators, map(_giving, drawn)), fixed:
                    return layer(*own_args, **{"training": True, **own_kwargs})
            finally:
                is_repeating = False

        return tf.recompute_grad(run)(*[leaves[i] for i in places])

    return call


@contextmanager
def _without_losses(layer: Layer) -> Iterator[None]:
    """Return a context in which a block must add no losses: there is no gradient of what is inside it."""
    before = _count_losses(layer)
    yield
    if _count_losses(layer) > before:
        raise TaskError(
            f"checkpoint_activations: the block {layer.name} adds losses (add_loss or activity regularizers)",
            "Add them outside of the block, or leave --checkpoint-activations out.",
        )


def _count_losses(layer: Layer) -> int:
    return sum(len(one._get_own_losses()) for one in layer._flatten_layers())


def _generators(layer: Layer) -> Iterator[Any]:
    """Return the generators of seeds in a layer and below."""
    yield from (value for value in vars(layer).values() if isinstance(value, keras.random.SeedGenerator))
    for _, child in children(layer):
        yield from _generators(child)


def _noting(generator: Any, seeds: list[Tensor]) -> Callable[..., Tensor]:
    """Return what draws a generator's next seed, and notes it."""
    draw = generator.next

    def next_seed(*args: Any, **kwargs: Any) -> Tensor:
        seeds.append(draw(*args, **kwargs))
        return seeds[-1]

    return next_seed


def _giving(seeds: list[Tensor]) -> Callable[..., Tensor]:
    """Return what gives the seeds that were noted, one after the other."""
    left = iter(seeds)
    return lambda *_, **__: next(left)


@contextmanager
def _replaced(method: str, things: Sequence[Any], others: Iterable[Callable[..., Any]]) -> Iterator[None]:
    """Return a context in which objects have other methods; contexts may lie in one another."""
    before = [vars(thing).get(method) for thing in things]
    for thing, other in zip(things, others, strict=False):
        vars(thing)[method] = other
    try:
        yield
    finally:
        for thing, own in zip(things, before, strict=True):
            vars(thing).pop(method, None)  # one may stand among them twice
            if own is not None:
                vars(thing)[method] = own


# those of keras.Model that decide what is computed
_METHODS = ("train_step", "test_step", "compute_loss", "compute_metrics")


def unused_methods(model: keras.Model) -> list[str]:
    """Return notes on what the model brings that training does not use."""
    notes = []
    if model.compiled:
        notes.append(
            "the settings of the model's compile() (optimizer, loss, metrics) are not used: set optimizer in "
            "the config or tf_optimizer, and loss and metrics in the task"
        )
    own = [name for name in _METHODS if getattr(type(model), name) is not getattr(keras.Model, name)]
    if own:
        notes.append(
            f"{' and '.join(own)} of the model (of model.fit) are not called: loss, metrics and optimizer "
            "are the task's and the config's; tf_loss and tf_optimizer of the task replace them"
        )
    layers = model._flatten_layers(include_self=False)
    if not model._call_has_training_arg and any(layer._call_has_training_arg for layer in layers):
        notes.append(
            f"call() of {type(model).__name__} has no argument training: model.fit would leave its layers, "
            "such as dropout and batch norm, in evaluation; here they train"
        )
    return notes


def check_compiler(host: str) -> None:
    """Check that this worker can compile, by compiling something small. Local: no collective."""
    try:
        compiled(lambda x: x + 1)(tf.zeros(2))
    except (tf.errors.OpError, ValueError) as error:
        message = str(error).strip().partition("\n")[0]
        raise EnvironmentFault(
            f"--compile: XLA fails on {host}: {message[:300]}",
            "Install a TensorFlow that was built with XLA, or leave --compile out.",
        ) from None


def compiled(step: Callable[..., Any]) -> Callable[..., Any]:
    """Return a step as XLA compiles it, anew for each set of shapes."""
    return tf.function(step, autograph=False, jit_compile=True)


def choose_device(wanted: str, workers: HorovodWorkers) -> str:
    """Return the device of this worker, chosen by its rank on the host. Local: no collective."""
    cards = tf.config.list_physical_devices("GPU")
    if wanted == "cpu" or (wanted == "auto" and not cards):
        tf.config.set_visible_devices([], "GPU")
        return "CPU"
    check_gpus(len(cards), f"TensorFlow {tf.__version__}", "TensorFlow with CUDA", workers)
    tf.config.set_visible_devices(cards[workers.local_rank], "GPU")
    tf.config.experimental.set_memory_growth(cards[workers.local_rank], True)
    return "GPU"


def device_name(device: str) -> str:
    """Return the name, for people, of what this worker computes on."""
    if device == "CPU":
        return "the CPU"
    details = tf.config.experimental.get_device_details(tf.config.get_visible_devices("GPU")[0])
    return str(details["device_name"])


def use_device(config: Config, workers: HorovodWorkers) -> str:
    """Bind this worker's device, set its threads and return the device. Local: no collective."""
    threads = config.threads or threads_per_worker(workers.local_size)
    try:
        device = choose_device(config.device, workers)
        check_precision(config.precision, device == "GPU", workers.host)
        tf.config.threading.set_intra_op_parallelism_threads(threads)
        if device == "CPU":
            is_early = config.overlap == "true" or (config.overlap == "auto" and spans_hosts(workers))
            # a single thread would begin no sum before it has computed all gradients
            tf.config.threading.set_inter_op_parallelism_threads(max(threads, 1 + is_early))
    except RuntimeError as error:
        raise EnvironmentFault(
            f"TensorFlow was used before hvdtrain could choose its device and threads: {error}",
            "Use TensorFlow only inside the task's methods, or after hvdtrain.train().",
        ) from None
    return device


def device_memory() -> DeviceMemory:
    """Return the memory of this worker's GPU, which is the only one it sees; how large it is is not known."""
    return DeviceMemory(int(tf.config.experimental.get_memory_info("GPU:0")["peak"]))


LOSS = "loss"  # the name in the model of a loss that has variables


def make_model(task: Any, config: Config, batch_norm: BatchNormSync | None = None) -> keras.Model:
    """Return the task's model, changed as the config requests."""
    with autocast(config.precision):
        model = task.tf_model()
    if not isinstance(model, keras.Model):
        raise TaskError(f"tf_model() must give a keras.Model, found {type(model).__name__}")
    if not model.built:
        raise TaskError(
            "tf_model() gave a model without weights yet", "Call it on sample inputs once, or build() it."
        )
    if batch_norm is not None:
        batch_norm.take_over(model, every=config.sync_batch_norm)
    if batch_norm is not None and batch_norm.layers and (config.compile or config.sync_every):
        raise ConfigError(
            "the model has BatchNormalization(synchronized=True), which goes neither with compile nor with "
            "sync_every",
            "Leave out the option, or synchronized=True.",
            everywhere=True,
        )
    if config.checkpoint_activations:
        apply_activation_checkpointing(model)
    loss = getattr(task, "tf_loss", None) or getattr(task, "loss", None)
    if isinstance(loss, keras.losses.Loss | keras.layers.Layer):
        _add_loss(model, loss)
    return model


def _add_loss(model: keras.Model, loss: Any) -> None:
    """Make a loss that has variables a part of the model, so that it is trained, saved and sent with it."""
    part = loss
    if not isinstance(part, keras.layers.Layer):
        part = keras.layers.Layer(dtype="float32")
        for name, value in vars(loss).items():
            if isinstance(value, keras.Variable | keras.layers.Layer | list | tuple | dict):
                setattr(part, name, value)
    own = {id(variable) for variable in model.variables}
    if all(id(variable) in own for variable in part.variables):
        return
    if any(layer.name == LOSS for layer in model._layers):
        raise TaskError(
            f"the task's loss has variables, which become the model's part {LOSS!r}, a name that it has",
            "Name the model's layer differently.",
        )
    part.name, part._hvdtrain_is_loss = LOSS, True
    list.append(model._layers, part)  # past Keras, which takes no more parts of a model that is built


def take_loss(model: keras.Model) -> list[Any]:
    """Take a loss that has variables out of a model, which is then as the task made it; return it."""
    parts = [layer for layer in model._layers if hasattr(layer, "_hvdtrain_is_loss")]
    for part in parts:
        list.remove(model._layers, part)
    return parts


@contextmanager
def without_loss(model: keras.Model) -> Iterator[None]:
    """Return a context in which a model is as the task made it, without a loss that has variables."""
    parts = take_loss(model)
    try:
        yield
    finally:
        list.extend(model._layers, parts)
