#!/bin/sh
# Checks that this machine has what `make setup` needs, before anything long begins.
# Usage: preflight.sh PYTHON VENV
# Says every missing thing and how to get it, then ends with 1.
python=$1
venv=$2
missing=0

lacks() {
    missing=1
    printf 'hvdtrain: %s\n    %s\n' "$1" "$2" >&2
}

if ! command -v "$python" >/dev/null 2>&1; then
    lacks "there is no $python" "apt install python3 (or dnf install python3); or name yours: make PYTHON=python3.12 ..."
elif ! version=$("$python" --version 2>/dev/null); then
    lacks "$python is there but does not run" "See what it says: $python --version; or name another: make PYTHON=python3.12 ..."
elif ! "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
    lacks "${version:-$python} is too old: 3.11 or newer is needed" \
        "Install a newer one beside it and name it: make PYTHON=python3.12 ..."
elif ! "$python" -c 'import sys; sys.exit(sys.hexversion >= 0x030E0000)' 2>/dev/null; then
    lacks "${version:-$python} is too new: the pinned packages are for 3.11 to 3.13" \
        "Install another one beside it and name it: make PYTHON=python3.13 ..."
else
    "$python" -c 'import ensurepip, venv' 2>/dev/null ||
        lacks "$python cannot make virtual environments" "apt install python3-venv"
    "$python" -c '
import os, sys, sysconfig
sys.exit(not os.path.exists(os.path.join(sysconfig.get_paths()["include"], "Python.h")))' ||
        lacks "the headers of $python are missing (Python.h)" "apt install python3-dev (or dnf install python3-devel)"
fi

compiler=${CXX:-c++}
command -v "${compiler%% *}" >/dev/null 2>&1 ||  # it may carry flags: CXX="g++ -m64"
    lacks "there is no C++ compiler ($compiler)" "apt install g++ (or dnf install gcc-c++); or name yours: CXX=g++-13 make ..."

# shellcheck disable=SC2086  # the compiler may carry flags
[ -n "${TORCH_INDEX:-}" ] || ! command -v "${compiler%% *}" >/dev/null 2>&1 ||
    printf 'static_assert(__cplusplus >= 202002L); int main() {}\n' |
    $compiler -std=c++20 -x c++ -fsyntax-only - >/dev/null 2>&1 ||
    echo "hvdtrain: note: $compiler does not know C++20, which PyTorch 2.14 with CUDA requires: name GCC 11 or newer with CXX=g++-12; with TORCH_INDEX=https://download.pytorch.org/whl/cpu, PyTorch 2.13 is installed, which does not" >&2

# measured: the virtual environment takes 3.6 GB with CPU builds; Horovod's build 0.6 GB for a while
needed_kib=$((5 * 1024 * 1024))
folder=$(dirname "$venv")
while [ ! -d "$folder" ]; do folder=$(dirname "$folder"); done
free_kib=$(df -Pk "$folder" | awk 'NR == 2 {print $4}')
[ "$free_kib" -ge "$needed_kib" ] ||
    lacks "$((free_kib / 1024)) MiB are free in $folder; 5 GiB are needed" "Free some space, or put it elsewhere: make VENV=/path/to/venv ..."

[ -n "${TORCH_INDEX:-}" ] || [ "$missing" != 0 ] || [ "$free_kib" -ge $((9 * 1024 * 1024)) ] ||
    echo "hvdtrain: note: PyTorch with CUDA needs 9 GiB in $folder; with TORCH_INDEX=https://download.pytorch.org/whl/cpu it takes 5" >&2

exit $missing
