#!/bin/bash
# install.sh VENV: SGLang 0.5.23 and what its server needs on a machine without a GPU (2.8 GB).
# PYTHON names the interpreter (3.11 or newer). Exit 3: the packages cannot be had here.
set -euo pipefail
folder=$(dirname "$(readlink -f "$0")")
venv=$1
export PIP_RETRIES=2
"${PYTHON:-python3}" -m venv "$venv"
# pip compiles 20,000 files one by one, and below they are compiled on all processors.
pip=("$venv/bin/python" -m pip install --quiet --no-deps --no-compile --disable-pip-version-check)
# Without --no-deps torchvision would exchange the CPU build of torch for a CUDA build of 5 GB.
"${pip[@]}" torch==2.13.0 torchvision==0.28.0 triton==3.9.0 sglang==0.5.23 || exit 3
"${pip[@]}" -r "$folder/requirements.txt" || exit 3
# One of the compared systems: a download of 69 MB that works without CUDA. Its test can skip.
"${pip[@]}" nixl==1.5.1 nixl-cu12==1.5.1 || echo "without nixl: the test of hicache-nixl will skip"
# The indexer of Dynamo's router, 75 MB, which reads the events of the disk's pages.
"${pip[@]}" ai-dynamo-runtime==1.6.1 || echo "without ai-dynamo-runtime: the test of Dynamo's indexer will skip"
# For `bench peers` alone: without its requirements, only its C++ client for files works.
"${pip[@]}" --target "$venv/peers" lmcache==0.5.6 || echo "without lmcache: bench peers names it as skipped"
# Some files are templates that no Python compiles.
"$venv/bin/python" -m compileall -q -q -j 0 "$venv/lib" || true
# The CUDA build of torchvision cannot load its library beside a CPU torch, and then these two
# operators, for which its Python files register fake kernels, are not declared anywhere.
site=$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
if "$venv/bin/python" -c 'import sys, torch; sys.exit(torch.version.cuda is not None)'; then
  cat > "$site/torchvision_operators.py" <<'PYTHON'
from torch import library

for name in ("nms", "qnms"):
    schema = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
    library.define(f"torchvision::{name}", schema)
PYTHON
  echo 'import torchvision_operators' > "$site/torchvision_operators.pth"
fi
"$venv/bin/python" -c 'import sglang; print("sglang", sglang.__version__)'
