#!/usr/bin/env bash
# SGLang with Tutti as the linker: GPU memory and SSD, no host cache.  MODEL and CAPACITY name model and size, POOLS a folder on each drive;
# further arguments go to SGLang: examples/sglang_linker.sh --tp 2
set -euo pipefail
MODEL=${MODEL:-meta-llama/Llama-3.1-8B}
POOLS=${POOLS:-/mnt/nvme/tutti}
CAPACITY=${CAPACITY:-500GiB}
command=$(tutti sglang command --mode linker --model "$MODEL" --path $POOLS --capacity "$CAPACITY" -- "$@")
${RUN:-eval} "$command"
