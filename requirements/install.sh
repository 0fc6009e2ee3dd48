#!/bin/sh
# Installs the pinned packages of extras of setup.cfg. Nothing is installed whose hash is not in these files,
# nothing is built, and pip looks for nothing else: each file is complete.
# Usage: install.sh PYTHON EXTRAS [OPTION of pip install]...
#   EXTRAS       separated by commas; the packages that hvdtrain always needs come along
#   TORCH_INDEX  (environment) the index that PyTorch alone is taken from: that of its builds for CPUs.
#                Empty: a build for CPUs if pip's own settings lead to one, else that with CUDA.
set -eu
folder=$(dirname "$0")
python=$1
extras=$2
shift 2

install() {
    "$python" -m pip install --quiet --disable-pip-version-check --no-deps --require-hashes --only-binary :all: "$@"
}

files=
for extra in base $(echo "$extras" | tr , ' '); do
    file=$folder/$extra.txt
    if [ ! -f "$file" ]; then
        echo "install.sh: there is no extra '$extra' in setup.cfg, or \`make lock\` has not been run since" >&2
        exit 2
    fi
    files="$files -r $file"
    if [ "$extra" = torch ] || grep -q '^# needs torch$' "$file"; then torch=yes; fi
done

if [ "${torch:-}" ]; then
    version=$(sed -n 's/^torch==\([^ ]*\).*/\1/p' "$folder/torch-cpu.txt")
    # A build for CPUs where pip knows one. An index of its own is asked for PyTorch alone, and no other then
    if [ "${TORCH_INDEX:-}" ] || "$python" -m pip index versions torch 2>/dev/null | grep -qF "$version"; then
        install "$@" ${TORCH_INDEX:+--index-url "$TORCH_INDEX"} -r "$folder/torch-cpu.txt"
    else
        files="$files -r $folder/torch-cuda.txt"
    fi
    case " $files " in *" $folder/torch.txt "*) ;; *) files="$files -r $folder/torch.txt" ;; esac
fi
# shellcheck disable=SC2086  # the words are options
install "$@" $files
if ! said=$("$python" -m pip --disable-pip-version-check check); then
    echo "install.sh: the files do not fit together; run \`make lock\`: $said" >&2
    exit 1
fi
