"""Recurrent layers: packed sequences, several directions and levels."""

import numpy as np
from conformance.zoo import EVALUATED, SAMPLES, Judge, Model, Y

RANDOM = np.random.RandomState(6)
SEQUENCES = RANDOM.randn(SAMPLES, 6, 3).astype(np.float32)
LENGTHS = RANDOM.randint(1, 7, SAMPLES)
LENGTHS[0] = 6
TOKENS = np.where(np.arange(6) < LENGTHS[:, None], RANDOM.randint(1, 9, (SAMPLES, 6)), 0)
BOTH = Judge(workers=(1, 2))


class Sequences(Model):
    """Numbers in sequences; layers of two directions and of two levels."""

    judge = BOTH

    def train_data(self):
        return SEQUENCES, Y

    def eval_data(self):
        return SEQUENCES[:EVALUATED], Y[:EVALUATED]

    def torch_model(self):
        import torch
        from torch import nn

        class Both(nn.Module):
            def __init__(self):
                super().__init__()
                self.gru = nn.GRU(3, 5, num_layers=2, bidirectional=True, batch_first=True)
                self.lstm = nn.LSTM(10, 4, batch_first=True, proj_size=2)
                self.head = nn.Linear(2, 3)

            def forward(self, x):
                return self.head(self.lstm(self.gru(x)[0])[0].mean(1))

        torch.manual_seed(0)
        return Both()


class Packed(Model):
    """Sequences of unequal lengths in an order of lengths; the lengths are a second input."""

    judge = BOTH

    def data(self, rows):
        return {"inputs": {"tokens": TOKENS[rows], "lengths": LENGTHS[rows]}, "targets": Y[rows]}

    def train_data(self):
        return self.data(slice(None))

    def eval_data(self):
        return self.data(slice(EVALUATED))

    def plain_outputs(self, model, inputs):
        return model(**inputs)

    def torch_model(self):
        import torch
        from torch import nn
        from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

        class Packed(nn.Module):
            def __init__(self):
                super().__init__()
                self.embedding = nn.Embedding(9, 5, padding_idx=0)
                self.lstm, self.head = nn.LSTM(5, 5, batch_first=True), nn.Linear(10, 3)

            def forward(self, tokens, lengths):
                packed = pack_padded_sequence(
                    self.embedding(tokens), lengths.cpu(), batch_first=True, enforce_sorted=False
                )
                outputs, (last, _) = self.lstm(packed)
                outputs, _ = pad_packed_sequence(outputs, batch_first=True)
                return self.head(torch.cat([last[-1], outputs.sum(1)], 1))

        torch.manual_seed(0)
        return Packed()
