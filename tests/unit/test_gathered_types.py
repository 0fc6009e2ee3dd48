"""Rows that ``hvdtrain.all_gather`` sends: of types that Horovod lacks, their bits."""

from types import SimpleNamespace

import pytest
import torch

from hvdtrain.backends.torch.objective import gathering


@pytest.mark.parametrize(("kind", "travels"), [(torch.bool, torch.uint8), (torch.bfloat16, torch.int16)])
def test_types_that_horovod_lacks_travel_as_bits(monkeypatch, kind, travels):
    sent = []

    def send(rows, *_, **__):
        sent.append(rows.dtype)
        return rows.clone()

    own = SimpleNamespace(allgather_async=send, synchronize=lambda handle: handle)
    monkeypatch.setattr(gathering, "mpi_ops", own)
    alltoall = SimpleNamespace(rank=lambda: 0, alltoall=lambda rows, *_, **__: (send(rows), None))
    monkeypatch.setattr(gathering, "hvd", alltoall)
    rows = torch.tensor([[1.5, -0.0], [0.0, 3.25]]).to(kind).requires_grad_(kind.is_floating_point)
    found = gathering._Gather.apply(rows, "rows", [2])
    assert torch.equal(found, rows)
    if kind.is_floating_point:
        (found * 2).sum().backward()
        assert torch.equal(rows.grad, torch.full_like(rows, 2))
    assert set(sent) == {travels}


def test_keras_sends_bits_of_bf16_and_has_second_derivatives(monkeypatch):
    import tensorflow as tf

    from hvdtrain.backends.tensorflow.objective import gathering

    sent = []

    def send(rows, *_, **__):
        sent.append((rows.dtype, rows.shape))
        return tf.identity(rows)

    monkeypatch.setattr(gathering, "_joined", send)
    monkeypatch.setattr(gathering, "hvd", SimpleNamespace(alltoall=lambda rows, *_, **__: (send(rows), None)))
    rows = tf.cast([[1.5, -1.0], [0.0, 3.0]], tf.bfloat16)
    with tf.GradientTape() as outer:
        outer.watch(rows)
        with tf.GradientTape() as tape:
            tape.watch(rows)
            found = tf.reduce_sum(gathering._gather(rows, "rows", tf.constant([2]), 0) ** 3)
        first = tape.gradient(found, rows)
    second = outer.gradient(first, rows)
    assert tf.reduce_all(first == 3 * rows**2)
    assert tf.reduce_all(second == 6 * rows)
    assert sent
    assert {kind for kind, _ in sent} == {tf.int16}
