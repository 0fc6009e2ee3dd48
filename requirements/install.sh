#!/bin/sh
# Installs the pinned packages of extras of setup.cfg. Nothing is installed whose hash is not in these files,
# nothing is built, and pip looks for nothing else: each file is complete.
# Usage: install.sh PYTHON EXTRAS [OPTION of pip install]...
#   EXTRAS       separated by commas; the packages that hvdtrain always needs come along
#   TORCH_INDEX  (environment) the index of PyTorch's builds for CPUs, asked for it and torchvision alone.
#                Empty: a build for CPUs if pip's own settings lead to one, else that with CUDA.
set -eu
folder=$(dirname "$0")
python=$1
extras=$2
shift 2

install() {
    "$python" -m pip install --quiet --disable-pip-version-check --no-deps --require-hashes --only-binary :all: "$@"
}

# Installs the build for CPUs of a package; 1 if there is none where pip looks.
install_for_cpus() {
    version=$(sed -n 's/^[a-z]*==\([^ ]*\).*/\1/p' "$folder/$1-cpu.txt")
    if [ -z "${TORCH_INDEX:-}" ]; then
        "$python" -m pip index versions "$1" 2>/dev/null | grep -qF "$version" || return 1
    fi
    package=$1
    shift
    # exit: the caller must not go on to another build if the contents are not those of the hash
    install "$@" ${TORCH_INDEX:+--index-url "$TORCH_INDEX"} -r "$folder/$package-cpu.txt" || exit 1
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
    # Not by an index besides pip's own, which could then supply every other package
    if install_for_cpus torch "$@"; then
        # It needs the torchvision of its own index: that of the package index belongs to the build with CUDA
        case " $files " in *" $folder/examples.txt "*)
            if ! install_for_cpus torchvision "$@"; then
                echo "install.sh: torchvision is left out: pip finds no build for CPUs. For one, set TORCH_INDEX" >&2
                # one of another set-up would not fit
                "$python" -m pip uninstall --quiet --yes torchvision 2>/dev/null || true
            fi ;;
        esac
    else
        case " $files " in *" $folder/examples.txt "*) files="$files -r $folder/torchvision-cuda.txt" ;; esac
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
