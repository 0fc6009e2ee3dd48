"""Reducers that compress gradients, in one process: shapes, names, times."""

import time
from types import SimpleNamespace
from unittest.mock import Mock

import horovod.torch
import numpy as np
import pytest
import tensorflow as tf
import torch
from support.faked_horovod import FakedHorovod

from hvdtrain.backends.reduction import reducer_class
from hvdtrain.backends.tensorflow.batches import TracedWorkers
from hvdtrain.backends.tensorflow.reduction import all_reduce as tensorflow_all_reduce
from hvdtrain.backends.tensorflow.reduction import low_rank as tensorflow_low_rank
from hvdtrain.backends.tensorflow.state.model_state import Field as TensorFlowField
from hvdtrain.backends.tensorflow.step_clock import StepClock
from hvdtrain.backends.torch.reduction import low_rank as torch_low_rank
from hvdtrain.backends.torch.state.layouts import Layout
from hvdtrain.backends.torch.state.model_state import Field as TorchField
from hvdtrain.config import Config
from hvdtrain.errors import ConfigError

TWO = SimpleNamespace(size=2, may_reduce=True)
CONFIG = Config(framework="torch", compression="powersgd:2")


def tensorflow_low_rank_of_a_matrix():
    variable = SimpleNamespace(dtype="float32", shape=tf.TensorShape((30, 40)))
    reducer = tensorflow_low_rank.LowRank(CONFIG, TWO, [TensorFlowField("a", "a", variable, (30, 40))])
    reducer.attach({"a": variable})
    return reducer


def test_sums_in_a_branch_have_one_name_in_every_graph(monkeypatch):
    """TensorFlow's own name of an operation in a branch has a number that differs by graph."""
    monkeypatch.setattr(type(tensorflow_low_rank.hvd.global_process_set), "size", lambda _: 2)
    reducer = tensorflow_low_rank_of_a_matrix()
    traced = tf.function(lambda given: reducer.finish(given)[0], autograph=False)
    graph = traced.get_concrete_function([tf.TensorSpec((30, 40))]).graph.as_graph_def()
    functions = [graph.node, *(function.node_def for function in graph.library.function)]
    found = [node for nodes in functions for node in nodes if node.op == "HorovodAllreduce"]
    names = {node.name.rpartition("/")[2] for node in found}  # what Horovod then takes
    assert names == {f"hvdtrain.low_rank.{what}.float32" for what in ("p", "q", "uncompressed")}
    assert all(node.attr["ignore_name_scope"].b for node in found)


@pytest.mark.parametrize("in_warmup", [False, True])
def test_the_clock_leaves_matrices_out_of_the_reduction(in_warmup, monkeypatch):
    told = ["ready", "reduced"] if in_warmup else ["ready", "resumed", "ready", "reduced"]
    horovod = FakedHorovod(monkeypatch)

    def work(workers):
        parameter, path = torch.nn.Parameter(torch.zeros(30, 40)), "conv/kernel"
        field = TorchField(path, path, (parameter,), (path,), Layout(lambda a: a[0], lambda a: [a]))
        reducer = torch_low_rank.LowRank(CONFIG, workers, [field])
        reducer.attach({path: parameter})
        reducer.clock = Mock()
        reducer.follow(in_warmup)
        reducer.finish([torch.ones(30, 40)])
        return [call[0] for call in reducer.clock.method_calls]

    assert horovod.run(work) == [told, told]


def test_in_tensorflow_sums_that_take_long_are_not_this_workers_own_part(monkeypatch):
    """Its notes are operations of a branch. A gradient's shape is unknown, as of ``tf.numpy_function``."""

    def slow(message):
        time.sleep(0.5)
        return 2 * message

    def allreduce(message, **_):
        return tf.reshape(tf.numpy_function(slow, [message], message.dtype), message.shape)

    monkeypatch.setattr(tensorflow_low_rank.hvd, "allreduce", allreduce)
    workers = SimpleNamespace(rank=0, size=2, most=2, may_reduce=True, is_elastic=False)
    clock = StepClock(TracedWorkers(workers), True)
    reducer = tensorflow_low_rank_of_a_matrix()
    reducer.clock = clock

    @tf.function(input_signature=[tf.TensorSpec(None)], autograph=False)
    def step(gradient):
        clock.ready([gradient])
        found, _ = reducer.finish([gradient])
        clock.reduced(found)
        return found

    gradient = np.outer(np.arange(30), np.arange(40)).astype(np.float32)  # of rank 1: nothing is left out
    (found,) = step(gradient)
    np.testing.assert_allclose(found, 2 * gradient, rtol=1e-5, atol=1e-3)
    clock.restart()
    begun = time.time()
    step(gradient)
    assert 0 < clock.busy().busy_seconds < 0.45
    assert begun + 1 <= clock.busy().begun_seconds <= time.time()


@pytest.mark.parametrize("framework", ["torch", "tf"])
def test_bf16_is_refused_with_a_horovod_that_sums_none(framework, monkeypatch):
    reducer = reducer_class(framework, "bf16")(TWO)
    parameter = torch.nn.Parameter(torch.zeros(2)) if framework == "torch" else tf.Variable(tf.zeros(2))
    if framework == "torch":
        reducer.attach({"weight": parameter})
        library = horovod.torch.mpi_ops.mpi_lib
        monkeypatch.delattr(library, "horovod_torch_allreduce_async_torch_BFloat16Tensor")
    else:
        monkeypatch.setattr(type(tensorflow_low_rank.hvd.global_process_set), "size", lambda _: 2)
        reducer.attach({"weight": parameter})
        hvd = tensorflow_all_reduce.hvd
        allreduce = hvd.allreduce  # of bool, as an older one is of bf16
        monkeypatch.setattr(hvd, "allreduce", lambda _, **given: allreduce(tf.zeros(1, bool), **given))
    with pytest.raises(ConfigError, match="the installed Horovod sums no bf16"):
        reducer.attach({"weight": parameter})
