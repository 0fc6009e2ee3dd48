"""A task with samples of unequal lengths and columns by name; the zoo has those of several inputs."""

from types import SimpleNamespace

import numpy as np

import hvdtrain

SIZE, EVAL_SIZE, WORDS, CLASSES = 50, 23, 11, 3
DEFAULTS = {
    "global_batch_size": 12, "learning_rate": 0.05, "epochs": 2, "log_every": 1, "eval_every": "1epoch",
    "initial_parameters": "portable", "device": "cpu",
}  # fmt: skip


class Sentences:
    """Sentences of unequal lengths, with the columns of a tokenizer."""

    def __init__(self, size, seed):
        random = np.random.RandomState(seed)
        self.ids = [random.randint(1, WORDS, random.randint(1, 21)).tolist() for _ in range(size)]

    def __len__(self):
        return len(self.ids)

    def __getitem__(self, index):
        ids = self.ids[index]
        return {"input_ids": ids, "attention_mask": [1] * len(ids), "labels": sum(ids) % CLASSES}


class Padded:
    """A classifier with the interface of Hugging Face transformers; each batch is padded by itself."""

    loss = "cross_entropy"
    metrics = {"accuracy": "accuracy"}  # noqa: RUF012
    defaults = DEFAULTS
    collate = hvdtrain.pad({"input_ids": 0, "attention_mask": 0})

    def train_data(self):
        return Sentences(SIZE, 0)

    def eval_data(self):
        return Sentences(EVAL_SIZE, 1)

    def torch_model(self):
        from torch import nn

        class Model(nn.Module):
            def __init__(self):
                super().__init__()
                self.embedding = nn.Embedding(WORDS, 8)
                self.dense = nn.Linear(8, CLASSES)

            def forward(self, input_ids, attention_mask=None, labels=None, **kwargs):
                assert labels is None
                mask = attention_mask.unsqueeze(-1)
                mean = (self.embedding(input_ids) * mask).sum(1) / mask.sum(1)
                return SimpleNamespace(loss=None, logits=self.dense(mean))

        return Model()

    def tf_model(self):
        import keras

        ids, mask = (
            keras.Input((None,), dtype="int32", name=name) for name in ("input_ids", "attention_mask")
        )
        embedded = keras.layers.Embedding(WORDS, 8, name="embedding")(ids)
        weights = keras.ops.expand_dims(keras.ops.cast(mask, "float32"), -1)
        mean = keras.ops.sum(embedded * weights, 1) / keras.ops.sum(weights, 1)
        return keras.Model([ids, mask], keras.layers.Dense(CLASSES, name="dense")(mean))


class Served(Padded):
    """The same with a function that says what is served."""

    def tf_serve(self, model, batch):
        import keras

        return {"labels": keras.ops.argmax(model([batch["input_ids"], batch["attention_mask"]]), 1)}
