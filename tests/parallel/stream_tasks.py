"""Tasks on streams and on files with an index, for both frameworks; the files are in the current folder."""

import reading_tasks
from support.stream_files import INPUTS, sample

import hvdtrain

SIZE, EVAL_SIZE = 90, 37
SHARDS = [range(41), range(41, 50), range(50, 50), range(50, SIZE)]


def shard_samples(shard):
    return map(sample, shard)


def all_samples():
    return map(sample, range(SIZE))


class Linear(reading_tasks.Linear):
    """What the others share."""

    inputs = INPUTS

    def eval_data(self):
        return [sample(number) for number in range(100, 100 + EVAL_SIZE)]


class Dealt(Linear):
    """Uneven shards that are dealt to the workers."""

    length: int | None = SIZE

    def train_data(self):
        return hvdtrain.stream(shard_samples, shards=SHARDS, length=self.length, shuffle_buffer=8)

    def eval_data(self):
        return hvdtrain.stream(shard_samples, shards=[range(100, 130), range(130, 137)])


class Undeclared(Dealt):
    """The same without a length."""

    length = None


class Whole(Linear):
    """A stream that every worker reads whole."""

    def train_data(self):
        return hvdtrain.stream(self.source(), length=SIZE, shuffle_buffer=8)

    def source(self):
        return all_samples


class TensorFlow(Whole):
    """The same, of TensorFlow."""

    def source(self):
        import tensorflow as tf

        shapes = {"inputs": tf.TensorSpec((INPUTS,), tf.float32), "targets": tf.TensorSpec((1,), tf.float32)}
        return tf.data.Dataset.from_generator(all_samples, output_signature=shapes)


class HuggingFace(Linear):
    """A streamed data set of Hugging Face, whose shards are dealt."""

    def train_data(self):
        import datasets

        columns = {"inputs": [sample(number)["inputs"] for number in range(SIZE)]}
        columns["targets"] = [sample(number)["targets"] for number in range(SIZE)]
        streamed = datasets.Dataset.from_dict(columns).to_iterable_dataset(num_shards=7)
        return hvdtrain.stream(streamed, length=SIZE)


class Parquet(Linear):
    """Row groups of Parquet."""

    def train_data(self):
        return hvdtrain.open_parquet(".", inputs="x", targets="y", shuffle_blocks=2)
