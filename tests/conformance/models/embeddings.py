"""Embeddings: padding, bounded norms, bags, tied ones; attention."""

import numpy as np
from conformance.zoo import SAMPLES, Judge, Model, Y, module

RANDOM = np.random.RandomState(2)
TOKENS = RANDOM.randint(0, 9, (SAMPLES, 5))
TOKENS[:, 0] = np.arange(SAMPLES) % 9


class Tokens(Model):
    """Tokens with one that stands for padding, whose vector is not trained."""

    def data(self, rows):
        return TOKENS[rows], Y[rows]

    def embedding(self, **options):
        from torch import nn

        def forward(self, tokens):
            return self.head(self.embedding(tokens).mean(1))

        return module(forward, embedding=nn.Embedding(9, 6, **options), head=nn.Linear(6, 3))

    def torch_model(self):
        return self.embedding(padding_idx=0)


class BoundedNorm(Tokens):
    """Vectors that each look-up scales down in place, also in evaluation, with one worker."""

    judge = Judge(workers=(1,))

    def torch_model(self):
        return self.embedding(max_norm=1.0)


class BoundedByWorkers(BoundedNorm):
    """The same with two, each of which would scale those of its own samples."""

    judge = Judge(workers=(2,), refused=("the embedding 'embedding' has max_norm", "torch.renorm(weight"))


class ScaledByFrequency(Tokens):
    """Gradients divided by how often a token occurs in the batch, of which a worker has a part."""

    judge = Judge(workers=(2,), noted=("embedding: scale_grad_by_freq counts",), rtol=1e-3)

    def torch_model(self):
        return self.embedding(scale_grad_by_freq=True)


class Language(Tokens):
    """A language model whose head is its embedding, with ignored targets: the mean is over tokens."""

    def data(self, rows):
        following = np.roll(TOKENS[rows], -1, axis=1)
        return TOKENS[rows], np.where((np.arange(5) == 4) | (following == 0), -100, following)

    def plain_outputs(self, model, inputs):
        return model(inputs).transpose(1, 2)

    def torch_model(self):
        import torch
        from torch import nn

        class Decoder(nn.Module):
            def __init__(self):
                super().__init__()
                self.embedding, self.position = nn.Embedding(9, 8), nn.Parameter(torch.randn(5, 8))
                self.layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
                self.head = nn.Linear(8, 9, bias=False)
                self.head.weight = self.embedding.weight
                self.register_buffer(
                    "mask", nn.Transformer.generate_square_subsequent_mask(5), persistent=False
                )

            def forward(self, tokens):
                return self.head(
                    self.layer(self.embedding(tokens) + self.position, self.mask, is_causal=True)
                )

        return Decoder()

    def tf_model(self):
        import keras

        class Decoder(keras.Model):
            def __init__(self):
                super().__init__()
                self.embedding = keras.layers.ReversibleEmbedding(9, 8)
                self.position = self.add_weight(shape=(5, 8), name="position")
                self.attention = keras.layers.MultiHeadAttention(2, 4)
                self.norm, self.mlp = keras.layers.LayerNormalization(), keras.layers.Dense(8, "gelu")

            def call(self, tokens):
                x = self.embedding(tokens) + self.position
                x = self.norm(x + self.attention(x, x, use_causal_mask=True))
                return self.embedding(x + self.mlp(x), reverse=True)

        model = Decoder()
        model(keras.ops.zeros((1, 5), "int32"))
        return model

    def tf_loss(self, model, batch):
        import tensorflow as tf

        import hvdtrain

        targets = batch["targets"]
        counts = tf.cast(targets != -100, tf.float32)
        losses = tf.nn.sparse_softmax_cross_entropy_with_logits(
            tf.maximum(targets, 0), model(batch["inputs"])
        )
        tokens = tf.reduce_sum(counts)
        return hvdtrain.Weighted(tf.reduce_sum(losses * counts) / tokens, tokens), {}


class HuggingFace(Language):
    """A GPT-2 that computes its own loss: a mean over tokens; its head is its embedding."""

    tf_model = None

    @classmethod
    def frameworks(cls):
        return ("torch",)

    def torch_model(self):
        from transformers import GPT2Config, GPT2LMHeadModel

        config = GPT2Config(
            vocab_size=9, n_positions=5, n_embd=8, n_layer=1, n_head=2,
            resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=0, eos_token_id=0,
        )  # fmt: skip
        return GPT2LMHeadModel(config)

    def torch_loss(self, model, batch):
        import hvdtrain

        labels = batch["targets"].roll(1, 1)  # the model shifts them itself
        loss = model(input_ids=batch["inputs"], labels=labels).loss
        return hvdtrain.Weighted(loss, (labels[:, 1:] != -100).sum()), {}
