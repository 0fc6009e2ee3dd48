"""Files that streams are read from, written as their formats say."""

import io
import tarfile

import numpy as np

INPUTS = 4


def sample(number):
    """Return a sample: numbers, and their sum."""
    inputs = np.random.default_rng(number).standard_normal(INPUTS, np.float32)
    return {"inputs": inputs, "targets": inputs.sum(keepdims=True)}


def npy(array):
    """Return an array as the bytes of a .npy file."""
    np.save(file := io.BytesIO(), array)
    return file.getvalue()


def write_tar(path, samples, mode="w", name="set/s{:05}"):
    """Write a tar of samples, each a dict from kind to bytes."""
    with tarfile.open(path, mode) as tar:
        for number, files in samples:
            for kind, data in files.items():
                member = tarfile.TarInfo(f"{name.format(number)}.{kind}")
                member.size = len(data)
                tar.addfile(member, io.BytesIO(data))
    return path


def write_samples(folder, parts):
    """Write samples in each format: ``part-*.tar`` and ``part-*.parquet``."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    for place, numbers in enumerate(parts):
        samples = {
            number: {"x": (one := sample(number))["inputs"], "y": one["targets"]} for number in numbers
        }
        files = {n: {f"{kind}.npy": npy(array) for kind, array in one.items()} for n, one in samples.items()}
        write_tar(folder / f"part-{place}.tar", files.items())
        columns = {name: [one[name] for one in samples.values()] for name in ("x", "y")}
        types = pa.schema([("x", pa.list_(pa.float32())), ("y", pa.list_(pa.float32()))])
        pq.write_table(pa.table(columns, schema=types), folder / f"part-{place}.parquet", row_group_size=13)
