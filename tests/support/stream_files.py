"""Files that streams are read from, written as their formats say."""

import io
import json
import tarfile

import numpy as np
import pytest

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


def shard_bytes(numbers, columns):
    """Return a shard of MDS; of each column: name, encoding, fixed size or None, and what makes its bytes."""
    samples = []
    for number in numbers:
        values = [make(number) for *_, make in columns]
        heads = [
            np.uint32(len(v)).tobytes()
            for (_, _, size, _), v in zip(columns, values, strict=True)
            if not size
        ]
        samples.append(b"".join(heads + values))
    config = b'{"some": "config"}'
    begin = 4 + 4 * (len(samples) + 1) + len(config)
    ends = begin + np.cumsum([0, *map(len, samples)])
    return np.uint32(len(samples)).tobytes() + ends.astype("<u4").tobytes() + config + b"".join(samples)


def write_mds(folder, parts, columns, compression=None, **changes):
    """Write shards of MDS and their index; changes are of the index."""
    folder.mkdir(exist_ok=True)
    shards = []
    for place, numbers in enumerate(parts):
        raw, name = shard_bytes(numbers, columns), f"shard.{place:05}.mds"
        packed = name + ".zstd" if compression else None
        if packed:
            pa = pytest.importorskip("pyarrow")
            (folder / packed).write_bytes(pa.Codec("zstd").compress(raw, asbytes=True))
        else:
            (folder / name).write_bytes(raw)
        shards.append({
            "column_names": [c[0] for c in columns],
            "column_encodings": [c[1] for c in columns],
            "column_sizes": [c[2] for c in columns],
            "compression": compression,
            "format": "mds",
            "raw_data": {"basename": name, "bytes": len(raw), "hashes": {}},
            "zip_data": {"basename": packed, "bytes": 0, "hashes": {}} if packed else None,
            "samples": len(numbers),
            **changes,
        })  # fmt: skip
    (folder / "index.json").write_text(json.dumps({"version": 2, "shards": shards}))
    return folder


def write_samples(folder, parts):
    """Write samples in each format: ``part-*.tar``, ``part-*.parquet``, and ``mds``, a folder."""
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
    mds = [
        ("x", f"ndarray:float32:{INPUTS}", 4 * INPUTS, lambda number: sample(number)["inputs"].tobytes()),
        ("y", "ndarray:float32:1", 4, lambda number: sample(number)["targets"].tobytes()),
    ]
    write_mds(folder / "mds", parts, mds)
