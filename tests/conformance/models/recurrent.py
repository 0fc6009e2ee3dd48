"""Recurrent layers: packed sequences, cells in a loop, masks, several directions."""

import numpy as np
from conformance.zoo import EVALUATED, SAMPLES, Judge, Model, Y

RANDOM = np.random.RandomState(6)
SEQUENCES = RANDOM.randn(SAMPLES, 6, 3).astype(np.float32)
LENGTHS = RANDOM.randint(1, 7, SAMPLES)
LENGTHS[0] = 6
TOKENS = np.where(np.arange(6) < LENGTHS[:, None], RANDOM.randint(1, 9, (SAMPLES, 6)), 0)
ANSWERS = RANDOM.randint(1, 7, (SAMPLES, 4))
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

    def tf_model(self):
        import keras

        keras.utils.set_random_seed(0)
        layers = keras.layers
        return keras.Sequential(
            [
                keras.Input((6, 3)),
                layers.Bidirectional(layers.GRU(5, return_sequences=True)),
                layers.LSTM(4, return_sequences=True),
                layers.TimeDistributed(layers.Dense(4, "tanh")),
                layers.SimpleRNN(4),
                layers.Dense(3),
            ]
        )


class LearnedStart(Sequences):
    """Cells that a loop calls, from a first state that is learned."""

    def torch_model(self):
        import torch
        from torch import nn

        class Loop(nn.Module):
            def __init__(self):
                super().__init__()
                self.start = nn.Parameter(torch.randn(5))
                self.cell, self.head = nn.GRUCell(3, 5), nn.Linear(5, 3)

            def forward(self, x):
                state = self.start.expand(len(x), -1)
                for step in x.unbind(1):
                    state = self.cell(step, state)
                return self.head(state)

        torch.manual_seed(0)
        return Loop()

    def tf_model(self):
        import keras

        class Loop(keras.Model):
            def __init__(self):
                super().__init__()
                self.start = self.add_weight(shape=(5,), name="start")
                self.cell, self.head = keras.layers.GRUCell(5), keras.layers.Dense(3)

            def call(self, inputs):
                state = keras.ops.broadcast_to(self.start, (keras.ops.shape(inputs)[0], 5))
                for step in keras.ops.unstack(inputs, axis=1):
                    _, (state,) = self.cell(step, [state])
                return self.head(state)

        keras.utils.set_random_seed(0)
        model = Loop()
        model(keras.ops.zeros((1, 6, 3)))
        return model


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


class MaskedEmbedding(Model):
    """Tokens whose zeros are a mask for the layers behind them."""

    judge = BOTH

    def train_data(self):
        return TOKENS, Y

    def eval_data(self):
        return TOKENS[:EVALUATED], Y[:EVALUATED]

    def tf_model(self):
        import keras

        keras.utils.set_random_seed(0)
        layers = keras.layers
        return keras.Sequential(
            [
                keras.Input((6,), dtype="int32"),
                layers.Embedding(9, 5, mask_zero=True),
                layers.Bidirectional(layers.LSTM(4, return_sequences=True)),
                layers.GRU(4),
                layers.Dense(3),
            ]
        )


class TeacherForcing(Model):
    """An encoder and a decoder that is given the answers, shifted; a mean over the tokens that count."""

    judge = Judge()

    def data(self, rows):
        answers = np.where(np.arange(4) < 1 + LENGTHS[rows, None] % 4, ANSWERS[rows], 0)
        return {"source": TOKENS[rows], "answer": answers}

    def train_data(self):
        return self.data(slice(None))

    def eval_data(self):
        return self.data(slice(EVALUATED))

    def torch_model(self):
        import torch
        from torch import nn

        class Translator(nn.Module):
            def __init__(self):
                super().__init__()
                self.embedding = nn.Embedding(9, 6)
                self.encoder, self.decoder = nn.GRU(6, 6, batch_first=True), nn.GRU(6, 6, batch_first=True)
                self.head = nn.Linear(6, 9, bias=False)
                self.head.weight = self.embedding.weight

            def forward(self, source, answer):
                _, state = self.encoder(self.embedding(source))
                return self.head(self.decoder(self.embedding(answer), state)[0])

        torch.manual_seed(0)
        return Translator()

    def torch_loss(self, model, batch):
        from torch.nn.functional import cross_entropy, pad

        import hvdtrain

        answer = batch["answer"]
        outputs = model(batch["source"], pad(answer[:, :-1], (1, 0), value=8))
        loss = cross_entropy(outputs.transpose(1, 2), answer, ignore_index=0)
        return hvdtrain.Weighted(loss, (answer != 0).sum()), {}
