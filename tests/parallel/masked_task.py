"""A task whose model takes more than one array, as a user of Transformers would write it."""

import numpy as np

SAMPLES, LENGTH = 40, 12


class Masked:
    """Tell whether the first token is a large one; the padding is masked."""

    loss = "cross_entropy"
    defaults = {"batch_size": 8, "epochs": 1}  # noqa: RUF012

    def __init__(self):
        random = np.random.RandomState(3)
        ends = random.randint(3, LENGTH + 1, (SAMPLES, 1))
        tokens = random.randint(0, 50, (SAMPLES, LENGTH))
        mask = (np.arange(LENGTH) < ends).astype("int64")
        self.data = {"input_ids": tokens, "attention_mask": mask, "targets": tokens[:, 0] // 25}

    def train_data(self):
        return self.data

    def eval_data(self):
        return self.data

    def torch_model(self):
        import torch
        from torch import nn

        class Model(nn.Module):
            def __init__(self):
                super().__init__()
                self.tokens, self.head = nn.Embedding(50, 8), nn.Linear(8, 2)

            def forward(self, input_ids, attention_mask=None):
                mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
                return {"logits": self.head((self.tokens(input_ids) * mask[..., None]).sum(1))}

        return Model()

    def tf_model(self):
        import keras

        tokens, mask = (
            keras.Input((None,), dtype="int32", name=name) for name in ("input_ids", "attention_mask")
        )
        x = keras.layers.Embedding(50, 8)(tokens) * keras.ops.cast(mask, "float32")[..., None]
        return keras.Model([tokens, mask], keras.layers.Dense(2)(keras.ops.sum(x, 1)))


class Served(Masked):
    """The same with functions that say what is served."""

    def torch_serve(self, model, batch):
        return {"labels": model(batch["input_ids"], batch["attention_mask"])["logits"].argmax(1)}

    def tf_serve(self, model, batch):
        import keras

        return {"labels": keras.ops.argmax(model([batch["input_ids"], batch["attention_mask"]]), 1)}
