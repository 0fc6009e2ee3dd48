#!/bin/sh
# Build stage: hvdtrain and Horovod into the virtual environment, then out with what no job needs.
# Usage: build-venv.sh [OPTION of build-horovod]...
set -eu
packages=$(python -c 'import sysconfig; print(sysconfig.get_path("platlib"))')
venv=$(python -c 'import sys; print(sys.prefix)')

# Horovod over Gloo needs the host to know its own name, which a build without an engine may not give it
getent hosts "$(hostname)" >/dev/null || echo "127.0.0.1 $(hostname)" >>/etc/hosts
pip install --quiet --no-cache-dir --no-compile --no-deps --no-build-isolation --force-reinstall .
OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 HVDTRAIN_CACHE=/tmp/hvdtrain \
    python -m hvdtrain build-horovod --mpi require "$@"
pip uninstall --quiet --yes cmake wheel nvidia-cuda-nvcc nvidia-cuda-crt nvidia-nvvm nvidia-cuda-cccl
cd "$packages"
# Headers, CMake files, static libraries, programs and tests serve those who compile against a package
rm -rf nvidia/*/include torch/include torch/share torch/test torch/bin/*test* torch/bin/protoc* tensorflow/include clang/native
find . -name '*.a' -delete
find . -type d \( -name tests -o -name test \) -path './[a-z]*/*' \
    ! -path './torch/*' ! -path './tensorflow/*' -prune -exec rm -rf {} +
find . "$venv/lib" -name __pycache__ -prune -exec rm -rf {} +
rm -rf "$venv/include" "$venv/share/man" "$venv/share/doc"
# Symbols for debuggers only
find . -type f \( -path './torch/lib/*' -o -path './tensorflow/*' \) -name '*.so*' -size +20M \
    -exec strip --strip-unneeded {} \;
# By checksum: the times of files change on the way into an image
python -m compileall -qq -j 0 --invalidation-mode unchecked-hash . || true
