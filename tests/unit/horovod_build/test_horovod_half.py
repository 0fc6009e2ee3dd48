"""How Horovod's patched source adds halves over MPI and Gloo: in fp32, rounded to nearest even."""

import ctypes
import subprocess

import ml_dtypes
import numpy as np
import pytest

PROBE = """
#include "half.cc"
using namespace horovod::common; using Half = uint16_t;
#define SUM(NAME, CALL) extern "C" void NAME(Half* c, const Half* a, const Half* b, size_t n) { CALL; }
SUM(f16c, SumFloat16(c, a, b, n))
SUM(loop, (Combine<ToFloat16, FromFloat16>(c, a, b, n, [](float x, float y) { return x + y; })))
SUM(bf16, SumBFloat16(c, a, b, n))
"""
ALL = np.arange(3, 2**16).astype(np.uint16)  # no whole number of vectors


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_a_sum_is_that_of_fp32_rounded_to_nearest_even(patched, tmp_path):
    (tmp_path / "probe.cc").write_text(PROBE)
    command = ["c++", "-std=c++17", "-O3", "-shared", "-fPIC", "probe.cc", "-o", "probe.so", "-I"]
    subprocess.run([*command, patched / "horovod/common"], cwd=tmp_path, check=True, timeout=120)
    compiled = ctypes.CDLL(str(tmp_path / "probe.so"))
    for name, kind in (("f16c", np.float16), ("loop", np.float16), ("bf16", ml_dtypes.bfloat16)):
        for other in range(0, 2**16, 331):
            found, second = ALL.copy(), np.full_like(ALL, other)
            pointers = [ctypes.c_void_p(array.ctypes.data) for array in (found, found, second)]
            getattr(compiled, name)(*pointers, ctypes.c_size_t(len(found)))
            expected = (ALL.view(kind).astype(np.float32) + second.view(kind).astype(np.float32)).astype(kind)
            same = (found == expected.view(np.uint16)) | (np.isnan(found.view(kind)) & np.isnan(expected))
            assert same.all(), (name, hex(other))
