"""Fingerprints of data sets: digests of a few samples, which show whether two data sets are the same."""

import time
from collections.abc import Collection, Mapping
from hashlib import blake2b
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, model_validator

from hvdtrain.data.datasets import ArrayDataset
from hvdtrain.data.numeric import narrowed
from hvdtrain.data.order import order_identity, sample_keys, unordered
from hvdtrain.data.readers import LocalFetch
from hvdtrain.workers.seeding import generator_digest, seed_generators
from hvdtrain.workers.wire_types import travels

_SAMPLES = 32
_SECONDS = 10.0  # a data set that is slow to read is represented by fewer samples
# relative; processors and versions of libraries round floating-point numbers differently
_TOLERANCE = 1e-5
_COLUMNS = 1024

# digest by key; none if the sample could not be read
SampleDigests = Mapping[str, str]


@travels
class Fingerprint(BaseModel):
    """The fingerprint of a data set."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    size: int = Field(ge=0, lt=2**63)  # number of samples
    # for each key, digests of the samples at ``probe_indices(size)``; None if a sample could not be read
    samples: dict[str, list[str | None]] = {}
    order: str = Field("", max_length=200)  # what the order of training depends on but for size and seed
    columns: dict[str, list[str]] = {}  # the names of the columns of arrays that were tables

    @model_validator(mode="after")
    def _check(self) -> "Fingerprint":
        """Check what a file says: for each key as many digests as are compared, in their form."""
        count = len(probe_indices(self.size))
        for key, digests in self.samples.items():
            if len(digests) != count:
                raise ValueError(f"{key} has {len(digests)} digests, of {count}")
            for found in digests:
                if found is not None and len(_numbers_of(found)) not in (0, 2):
                    raise ValueError(f"{key} has the digest {found[:60]!r}")
        return self

    def at(self, place: int) -> SampleDigests:
        """Return the digests of one of the samples."""
        return {key: found for key, digests in self.samples.items() if (found := digests[place]) is not None}

    def of_first_sample(self) -> "Fingerprint":
        """Return what it is of the first sample alone."""
        samples = {key: digests[:1] for key, digests in self.samples.items()}
        return self.model_copy(update={"size": min(self.size, 1), "samples": samples})


def probe_indices(size: int) -> list[int]:
    """Return the indices that a fingerprint covers: the first, the last, and some evenly between."""
    count = min(size, _SAMPLES)
    return [place * (size - 1) // max(1, count - 1) for place in range(count)]


def columns_of(dataset: Any) -> dict[str, list[str]]:
    """Return the names of the columns of a data set's arrays that were tables."""
    dataset = unordered(dataset)
    return dataset.columns if isinstance(dataset, ArrayDataset) else {}


def take_fingerprint(dataset: Any, skip: bool = False, seconds: float = _SECONDS) -> Fingerprint:
    """Return the fingerprint of a data set, not augmented, of the samples that are read in some seconds."""
    fetch, indices = LocalFetch(dataset, skip), probe_indices(len(dataset))
    digests: dict[int, SampleDigests] = {}
    deadline = time.monotonic() + seconds
    # the first, then that in the middle, then those at the quarters, and so on
    for place in sorted(range(len(indices)), key=lambda place: f"{place:064b}"[::-1]):
        # transforms that draw from the global generators give the same each time
        seed_generators(0, f"sample {indices[place]}")
        try:
            arrays, _ = fetch(np.asarray([indices[place]]))
            digests[place] = {str(key): digest(array[0]) for key, array in arrays.items()}
        except Exception:
            digests[place] = {}
        if time.monotonic() > deadline:
            break
    keys = sorted({key for found in digests.values() for key in found})
    return Fingerprint(
        size=len(dataset),
        samples={key: [digests.get(place, {}).get(key) for place in range(len(indices))] for key in keys},
        order=order_identity(dataset),
        columns=columns_of(dataset),
    )


def draws_random_numbers(dataset: Any) -> bool:
    """Return whether reading a sample draws from the global generators of Python, numpy or PyTorch."""
    before = generator_digest()
    try:
        LocalFetch(dataset)(np.zeros(1, np.int64))
    except Exception:
        return False  # it is reported when it is read for an evaluation
    return generator_digest() != before


def digest(value: Any) -> str:
    """Return a text that identifies the value of a sample under one key: a hash.

    That of floating-point numbers covers type, shape and the places that are not finite; a weighted sum and
    the norm follow, which ``is_same`` compares with a tolerance.
    """
    array = narrowed(np.asarray(value))  # a model of 64 bits reads the same data
    content: list[bytes] = [f"{array.dtype.str[1:]}{array.shape}".encode()]
    numbers = ""
    if array.dtype.kind in "fc":
        flat = array.astype(np.complex128 if array.dtype.kind == "c" else np.float64).reshape(-1)
        values = flat.view(np.float64)
        finite = np.isfinite(values)
        if not finite.all():
            content.append(np.nan_to_num(np.where(finite, 0, values), nan=1, posinf=2, neginf=3).tobytes())
            values = np.where(finite, values, 0)
        rows = np.zeros(-(-values.size // _COLUMNS) * _COLUMNS)
        rows[: values.size] = values
        grid = rows.reshape(-1, _COLUMNS)
        # a weight is the product of its row's, in [0.5, 1), and its column's, in (-1, 1)
        total = float((1 + _uniform(len(grid), 1)) / 2 @ (grid @ (2 * _uniform(_COLUMNS, 2) - 1)))
        numbers = f" {total:.9g} {float(np.linalg.norm(values)):.9g}"
    elif array.dtype.kind in "biu":
        content.append(array.astype(array.dtype.newbyteorder("<")).tobytes())
    else:
        content.append(repr(array.tolist()).encode())
    return blake2b(b"\0".join(content), digest_size=8).hexdigest() + numbers


def is_same(one: str, other: str) -> bool:
    """Return whether two digests are of the same value, apart from rounding."""
    if one == other:
        return True
    numbers, others = _numbers_of(one), _numbers_of(other)
    if one.split(maxsplit=1)[0] != other.split(maxsplit=1)[0] or len(numbers) != 2 or len(others) != 2:
        return False
    (total, norm), (other_total, other_norm) = numbers, others
    limit = _TOLERANCE * max(norm, other_norm)
    return abs(total - other_total) <= limit and abs(norm - other_norm) <= limit


def _numbers_of(digest_text: str) -> list[float]:
    """Return the numbers after the hash in a digest."""
    return [float(number) for number in digest_text.split()[1:]]


def differing_keys(one: SampleDigests, other: SampleDigests) -> list[str]:
    """Return the keys under which two readings of a sample differ, of those that both have."""
    return [key for key in sorted(one) if key in other and not is_same(one[key], other[key])]


def first_difference(
    one: Fingerprint, other: Fingerprint, ignored: Collection[str] = ()
) -> tuple[int, str] | None:
    """Return index and key of the first sample that differs in two data sets of one size, or None."""
    found = (
        (index, key)
        for place, index in enumerate(probe_indices(one.size))
        for key in differing_keys(one.at(place), other.at(place))
        if key not in ignored
    )
    return next(found, None)


def digests_at(fingerprint: Fingerprint, index: int) -> SampleDigests:
    """Return the digests of one of the samples that a fingerprint covers."""
    return fingerprint.at(probe_indices(fingerprint.size).index(index))


def changing_keys(dataset: Any, fingerprint: Fingerprint, skip: bool = False) -> set[str]:
    """Read a data set's samples again; return the keys that differ from a fingerprint taken before."""
    again = take_fingerprint(dataset, skip)
    places = range(len(probe_indices(again.size)))
    return {key for place in places for key in differing_keys(fingerprint.at(place), again.at(place))}


def _uniform(count: int, seed: int) -> NDArray[np.float64]:
    """Return numbers in [0, 1) that depend on their place and a seed alone."""
    return sample_keys(np.arange(count), seed, 0) / 2.0**64
