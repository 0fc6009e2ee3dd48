"""What a task's own step must not hold when it is traced: state and random numbers that are not resumed."""

from collections.abc import Iterator, Sequence
from typing import Any

from hvdtrain.backends.tensorflow.functions import native
from hvdtrain.errors import TaskError

Graph = Any

# operations that draw from generators of their own, which start anew with each process
_RANDOM = frozenset(
    {
        *("RandomStandardNormal", "RandomUniform", "RandomUniformInt", "TruncatedNormal", "RandomShuffle"),
        *("RandomGamma", "RandomPoisson", "RandomPoissonV2", "Multinomial", "ParameterizedTruncatedNormal"),
    }
)
_WRITES = ("Assign", "ResourceApply", "ResourceScatter", "ResourceSparseApply")


def check_graph(graph: Graph, variables: Sequence[Any]) -> None:
    """Check that a step changes only what is saved and draws only what is seeded by the step.

    Args:
        graph: the traced step.
        variables: the variables that it may change: those of the model, the optimizers and the step itself.

    Raises:
        TaskError: naming the variable or the operation.
    """
    own = {id(native(variable).handle) for variable in variables}
    captured = {id(inside): outside for outside, inside in graph.captures}
    for operation in graph.get_operations():
        if operation.type in _RANDOM:
            raise TaskError(
                f"tf_step draws random numbers with {operation.type} ({operation.name}): workers would draw "
                "the same ones, and a resumed run others",
                "Return them from the data set, or give the model a keras.random.SeedGenerator and call "
                "keras.random.normal(shape, seed=model.seed_generator), for example.",
                everywhere=True,
            )
        if not operation.type.startswith(_WRITES):
            continue
        for tensor in _resources(operation):
            outside = captured.get(id(tensor))
            if outside is not None and id(outside) not in own:
                name = next((v.name for v in graph.variables if v.handle is outside), "a variable")
                raise TaskError(
                    f"tf_step changes {name!r}, which is not a variable of the model: it would not be saved",
                    "Make it a weight of the model: self.add_weight(..., trainable=False).",
                    everywhere=True,
                )


def _resources(operation: Any) -> Iterator[Any]:
    return (tensor for tensor in operation.inputs if tensor.dtype.name == "resource")
