#!/bin/sh
# Build stage for GPUs: the frameworks and CUDA $1 (12 or 13) in wheels, and a toolkit in /opt/cuda.
# The files of requirements/ are complete and hold the hash of every wheel.
set -eu
packages=$(python -c 'import sysconfig; print(sysconfig.get_path("platlib"))')
install() {
    pip install --quiet --no-cache-dir --no-compile --no-deps --require-hashes --only-binary :all: -r "$@"
}

case $1 in
12)
    # Both frameworks share the CUDA 12.8 of PyTorch. TensorFlow's extra "and-cuda" asks for an NCCL
    # that PyTorch's exact pin forbids; the newer one of the two, in the file, serves both.
    install requirements/cuda12.txt
    # NVIDIA's wheels for CUDA 12 hold no nvcc. Debian 13 has that of 12.4, and headers of the same
    # version are in wheels; what it compiles runs with any later CUDA 12.
    echo 'deb [signed-by=/usr/share/keyrings/debian-archive-keyring.gpg] http://deb.debian.org/debian trixie non-free' \
        >/etc/apt/sources.list.d/trixie.list
    apt-get update -qq
    install requirements/cuda12-headers.txt --target /tmp/headers
    cd /tmp
    apt-get download -qq nvidia-cuda-toolkit/trixie
    dpkg -x nvidia-cuda-toolkit_*.deb /tmp/debian
    mkdir -p /opt/cuda/bin /opt/cuda/include /opt/cuda/nvvm
    cp -a /tmp/debian/usr/lib/nvidia-cuda-toolkit/bin/cicc /tmp/debian/usr/lib/nvidia-cuda-toolkit/bin/nvcc \
        /tmp/debian/usr/lib/nvidia-cuda-toolkit/bin/crt /opt/cuda/bin/
    for program in bin2c cudafe++ cuobjdump fatbinary nvlink ptxas; do
        cp -a "/tmp/debian/usr/bin/$program" /opt/cuda/bin/
    done
    cp -a /tmp/debian/usr/lib/nvidia-cuda-toolkit/libdevice /opt/cuda/nvvm/
    for part in cuda_nvcc cuda_runtime cuda_cccl; do
        cp -a "/tmp/headers/nvidia/$part/include/." /opt/cuda/include/
    done
    cat >/opt/cuda/bin/nvcc.profile <<'END'
TOP = $(_HERE_)/..
NVVMIR_LIBRARY_DIR = $(TOP)/nvvm/libdevice
PATH += $(_HERE_):
INCLUDES += "-I$(TOP)/include" $(_SPACE_)
LIBRARIES =+ $(_SPACE_) "-L$(TOP)/lib"
END
    # The runtime is that of the wheels, which have no static one: both names lead to it. Nothing here needs
    # the runtime for devices, but nvcc names it to the linker.
    mkdir /opt/cuda/lib
    ln -s "$packages"/nvidia/cuda_runtime/lib/lib* /opt/cuda/lib/
    ln -s libcudart.so.12 /opt/cuda/lib/libcudart.so
    echo 'INPUT(/opt/cuda/lib/libcudart.so.12)' >/opt/cuda/lib/libcudart_static.a
    ar rc /opt/cuda/lib/libcudadevrt.a
    ;;
13)
    # PyTorch 2.14 comes with CUDA 13.0; the compiler is of the same version
    install requirements/cuda13.txt
    ln -s "$packages/nvidia/cu13" /opt/cuda
    ;;
*)
    echo "install-cuda: CUDA is 12 or 13; found: $1" >&2
    exit 2
    ;;
esac
