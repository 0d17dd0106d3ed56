#!/usr/bin/env bash
# SGLang with Tutti behind HiCache.  MODEL and CAPACITY name model and size, POOLS a folder on each drive;
# further arguments go to SGLang: examples/sglang_hicache.sh --tp 2
set -euo pipefail
MODEL=${MODEL:-meta-llama/Llama-3.1-8B}
POOLS=${POOLS:-/mnt/nvme/tutti}
CAPACITY=${CAPACITY:-500GiB}
command=$(tutti sglang command --model "$MODEL" --path $POOLS --capacity "$CAPACITY" -- "$@")
${RUN:-eval} "$command"
