"""Recurrent layers: packed sequences, several directions and levels."""

import numpy as np
from conformance.zoo import SAMPLES, Model, Y, module

RANDOM = np.random.RandomState(6)
SEQUENCES = RANDOM.randn(SAMPLES, 6, 3).astype(np.float32)
LENGTHS = RANDOM.randint(1, 7, SAMPLES)
LENGTHS[0] = 6
TOKENS = np.where(np.arange(6) < LENGTHS[:, None], RANDOM.randint(1, 9, (SAMPLES, 6)), 0)


class Sequences(Model):
    """Numbers in sequences; layers of two directions and of two levels."""

    def data(self, rows):
        return SEQUENCES[rows], Y[rows]

    def torch_model(self):
        from torch import nn

        def forward(self, x):
            return self.head(self.lstm(self.gru(x)[0])[0].mean(1))

        return module(
            forward,
            gru=nn.GRU(3, 5, num_layers=2, bidirectional=True, batch_first=True),
            lstm=nn.LSTM(10, 4, batch_first=True, proj_size=2),
            head=nn.Linear(2, 3),
        )


class Packed(Model):
    """Sequences of unequal lengths in an order of lengths; the lengths are a second input."""

    def data(self, rows):
        return {"inputs": {"tokens": TOKENS[rows], "lengths": LENGTHS[rows]}, "targets": Y[rows]}

    def plain_outputs(self, model, inputs):
        return model(**inputs)

    def torch_model(self):
        import torch
        from torch import nn
        from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

        def forward(self, tokens, lengths):
            packed = pack_padded_sequence(
                self.embedding(tokens), lengths.cpu(), batch_first=True, enforce_sorted=False
            )
            outputs, (last, _) = self.lstm(packed)
            outputs, _ = pad_packed_sequence(outputs, batch_first=True)
            return self.head(torch.cat([last[-1], outputs.sum(1)], 1))

        return module(
            forward,
            embedding=nn.Embedding(9, 5, padding_idx=0),
            lstm=nn.LSTM(5, 5, batch_first=True),
            head=nn.Linear(10, 3),
        )
