#!/bin/sh
# Figures of a machine with a GPU, in one call: builds Horovod with NCCL for the environment that is active,
# trains a small model in several ways and compares its losses with those on the CPU, and times a step.
# Several workers on one GPU are not run: NCCL takes one worker for each GPU.
#
#     benchmarks/gpu.sh [FOLDER]          # FOLDER: where the output is kept; gpu-figures by default
#
# DEVICE=cpu STEPS=20 benchmarks/gpu.sh tries the script itself where there is no GPU; nothing is built then.
set -eu
cd "$(dirname "$0")/.."
out=$(mkdir -p "${1:-gpu-figures}" && cd "${1:-gpu-figures}" && pwd)
device=${DEVICE:-gpu}
export PYTHONPATH="$PWD" PYTHONUNBUFFERED=1 OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
export OVERHEAD_FUSED=1 OVERHEAD_STEPS="${STEPS:-200}"
exec > "$out/figures.txt" 2>&1

date -u
if [ "$device" = gpu ]; then
    nvidia-smi --query-gpu=name,memory.total,driver_version --format=csv
    python -m hvdtrain build-horovod --gpu nccl --frameworks torch
fi
python -c "import torch; print('PyTorch', torch.__version__)"

# job NAME OPTIONS...: the final training loss of 100 steps
job() {
    name=$1
    shift
    rm -rf "${out:?}/$name"
    if python -m hvdtrain --framework torch --steps 100 --log-every 100 --eval-every 100 --set threads=1 \
        --run-dir "$out/$name" "$@" > "$out/$name.txt" 2>&1; then
        python -c "import json, sys; print(sys.argv[1], json.load(open(sys.argv[2]))['final'])" \
            "$name" "$out/$name/summary.json"
    else
        echo "$name failed: see $out/$name.txt"
        failed=1
    fi
}

failed=0
echo "final metrics of the digits after 100 steps"
job cpu --device cpu
for precision in fp32 bf16; do job "$precision" --device "$device" --precision "$precision"; done
[ "$device" = cpu ] || job fp16 --device gpu --precision fp16
job accumulate --device "$device" --accumulate 4 --batch-size 8
job compile --device "$device" --compile
job ema --device "$device" --optimizer adamw --learning-rate 0.01 --ema-decay 0.9
job half --device "$device" --save-every 50 --steps 50 --log-every 50 --set lr_schedule=constant
job resumed --device "$device" --set lr_schedule=constant --resume "$out/half"

models="resnet50 gpt"
[ "$device" = gpu ] || models="convnet mlp"
for options in "" "--precision bf16" "--precision bf16 --compile"; do
    echo "one worker against a plain loop $options"
    # shellcheck disable=SC2086
    python benchmarks/overhead.py --frameworks torch --models $models --device "$device" --repeats 1 $options
done
exit "$failed"
