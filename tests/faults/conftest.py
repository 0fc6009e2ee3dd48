"""What tests of faults share: a server of S3 with a bucket, whose faults a test sets."""

from collections.abc import Iterator

import pytest
from support.object_store import ObjectStore, object_store


@pytest.fixture(scope="module")
def store() -> Iterator[ObjectStore]:
    """Give a server for the tests of one file."""
    for package in ("boto3", "moto", "s3fs"):
        pytest.importorskip(package)
    with object_store() as found:
        yield found
