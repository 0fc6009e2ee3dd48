"""Data of ten times the memory that reading may take: rows of a file, and a stream."""

import subprocess
import sys

import numpy as np
import pytest

LIMIT_BYTES = 20 << 20  # more than the process has when it begins
ROW_BYTES, ROWS = 1 << 16, 3400  # 212 MiB

READ = """
import os
import sys
from pathlib import Path
import numpy as np
import hvdtrain
from hvdtrain.data.feed import Feed, Reader, Shard, read_ahead
from hvdtrain.data.order import BatchPlan, ShuffledOrder, ordering_of
from hvdtrain.data.stream_feed import StreamPart, feed_of

kind, path = sys.argv[1:]
rows, width = {rows}, {width}

def sample(number):
    return {{"inputs": np.full(width, number % 256, np.uint8), "targets": number}}

def peak():
    # of this program alone: ru_maxrss begins with that of the process which started it
    return int(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0]) << 10

def feed():
    plan = BatchPlan(16, 1)
    if kind == "stream":
        data = hvdtrain.stream(lambda: map(sample, range(rows)), shuffle_buffer=32)
        return feed_of(StreamPart(data, plan, 0, last_sample=rows), None)
    data = hvdtrain.open_parquet(path, inputs="x", targets="y", shuffle_blocks=2)
    reader = Reader(data, ShuffledOrder(rows, 0, ordering_of(data)), Shard(plan, 0, 0, 0, rows))
    return Feed(read_ahead(reader.__getitem__, len(reader), 2))

seen = []
with feed() as batches:
    for batch in batches:
        seen += batch.arrays["targets"][batch.weights > 0].tolist()
        if len(seen) == 160:
            begun = peak()
assert sorted(seen) == list(range(rows)), len(seen)
print(peak() - begun, flush=True)
os._exit(0)  # threads of pyarrow may end too late for the interpreter
"""


@pytest.mark.parametrize("kind", ["stream", "parquet"])
def test_memory_does_not_grow_with_the_data(kind, tmp_path):
    if kind == "parquet":
        pa = pytest.importorskip("pyarrow")
        pq = pytest.importorskip("pyarrow.parquet")
        schema = pa.schema([("x", pa.list_(pa.uint8(), ROW_BYTES)), ("y", pa.int64())])
        with pq.ParquetWriter(tmp_path / "data.parquet", schema) as writer:
            for first in range(0, ROWS, 20):
                numbers = np.arange(first, first + 20)
                values = pa.array(np.repeat(numbers, ROW_BYTES).astype(np.uint8))
                column = pa.FixedSizeListArray.from_arrays(values, ROW_BYTES)
                writer.write_table(pa.table([column, pa.array(numbers)], schema=schema))
    program = READ.format(rows=ROWS, width=ROW_BYTES)
    words = [sys.executable, "-c", program, kind, str(tmp_path / "data.parquet")]
    done = subprocess.run(words, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < LIMIT_BYTES < ROWS * ROW_BYTES // 10
