"""The longer texts of the edits for the build: what stands in Horovod, and what is to stand there."""

# The file, at the root of the source tree, that says what is being built. CMake copies it into
# horovod/metadata.json, where `installed_build` reads it.
RECORD_FILE = "hvdtrain-build.json"

METADATA_OLD = """\
file(APPEND "${CMAKE_LIBRARY_OUTPUT_DIRECTORY_ROOT}/metadata.json" "\\"dummy\\": \\"none\\"\\n}")"""

METADATA_NEW = """\
set(HVD_METADATA "${CMAKE_LIBRARY_OUTPUT_DIRECTORY_ROOT}/metadata.json")
foreach(HVD_PART MPI GLOO NCCL DDL CCL)
    set(HVD_BUILT "false")
    if(HAVE_${HVD_PART})
        set(HVD_BUILT "true")
    endif()
    string(TOLOWER "${HVD_PART}" HVD_PART)
    file(APPEND "${HVD_METADATA}" "\\"have_${HVD_PART}\\": ${HVD_BUILT},\\n")
endforeach()
file(READ "${PROJECT_SOURCE_DIR}/hvdtrain-build.json" HVDTRAIN_BUILD)
file(APPEND "${HVD_METADATA}" "\\"hvdtrain\\": ${HVDTRAIN_BUILD},\\n")
file(APPEND "${HVD_METADATA}" "\\"dummy\\": \\"none\\"\\n}")"""

CHECK_EXTENSION = '''\
def _check_extension_lambda(ext_base_name, fn, fn_desc, verbose):
    """
    Tries to load the extension in a new process.  If successful, puts fn(ext)
    to the queue or False otherwise.  Mutes all stdout/stderr.
    """
'''

RECORDED = '''\
_RECORDED = {'built with MPI': 'have_mpi', 'built with Gloo': 'have_gloo', 'built with NCCL': 'have_nccl',
             'built with DDL': 'have_ddl', 'built with CCL': 'have_ccl'}
_RECORDED_FRAMEWORKS = {'tensorflow': 'tensorflow', 'torch': 'pytorch', 'mxnet': 'mxnet'}


def _recorded(ext_base_name, fn_desc):
    """What the build wrote into metadata.json about fn_desc; None where it says nothing."""
    path = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), 'metadata.json')
    try:
        with open(path) as f:
            metadata = json.load(f)
    except (OSError, ValueError):
        return None
    if fn_desc == 'built' and 'have_gloo' in metadata:
        return _RECORDED_FRAMEWORKS.get(ext_base_name) in metadata
    return metadata.get(_RECORDED.get(fn_desc))


'''

ASK_RECORD = """\
    recorded = _recorded(ext_base_name, fn_desc)
    if recorded is not None:
        return recorded
"""

CUDA_OLD = """\
check_language(CUDA)
if(NOT CMAKE_CUDA_COMPILER)
"""

CUDA_NEW = """\
if(DEFINED HOROVOD_GPU_OPERATIONS)
    check_language(CUDA)
endif()
if(DEFINED HOROVOD_GPU_OPERATIONS AND NOT CMAKE_CUDA_COMPILER)
"""

# The declaration of a function of TensorFlow's that is gone; a stream itself has what it gave
TF_STREAM_OLD = """\
// Forward declaration of AsGpuStreamValue
namespace stream_executor {
namespace gpu {
GpuStreamHandle AsGpuStreamValue(Stream* stream);
} // namespace stream_executor
} // namespace gpu
#if TENSORFLOW_VERSION >= 2011000000
#include "tensorflow/compiler/xla/stream_executor/stream.h"
#else
#include "tensorflow/stream_executor/stream.h"
#endif // TENSORFLOW_VERSION >= 2011000000
"""

TF_STREAM_NEW = """\
#include "tensorflow/compiler/xla/stream_executor/stream.h"
namespace stream_executor {
namespace gpu {
static inline GpuStreamHandle AsGpuStreamValue(Stream* stream) {
  return static_cast<GpuStreamHandle>(stream->platform_specific_handle().stream);
}
} // namespace gpu
} // namespace stream_executor
"""
