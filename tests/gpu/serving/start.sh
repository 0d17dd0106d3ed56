#!/bin/bash
# start.sh [OPTION...]: SGLang's packages and the servers' environment, then run.py with the options.
# PYTHON names the interpreter. Where it has no SGLang, the packages come from SGLANG_BUNDLE, which
# carry.sh has filled (and fills now where there is a network), and are unpacked once.
set -euo pipefail
here=$(dirname "$(readlink -f "$0")") && root=$(readlink -f "$here/../../..")
export PYTHON=${PYTHON:-python3} PYTHONSAFEPATH=1 PYTHONUNBUFFERED=1
bundle=${SGLANG_BUNDLE:-$root/build/sglang-bundle} site=$root/build/sglang-site
path=$root/build/view:$root/tests:$root/tests/sglang:$here/plugin

if ! "$PYTHON" -c 'import sglang.srt' 2> /dev/null; then
  if [ ! -e "$site/unpacked" ]; then
    [ -e "$bundle/complete" ] ||
      PYTHON_VERSION=$("$PYTHON" -c 'import platform; print(platform.python_version())') "$here/carry.sh" "$bundle"
    mkdir -p "$site"
    for archive in "$bundle"/*.tar.xz; do "$PYTHON" -m tarfile --filter data -e "$archive" "$site"; done
    for wheel in "$bundle"/*.whl; do "$PYTHON" -m zipfile -e "$wheel" "$site"; done
    for folder in "$site"/*.data/{purelib,platlib}; do [ ! -d "$folder" ] || cp -r "$folder/." "$site"; done
    # Or every server would compile the same files; some are templates that no Python compiles.
    timeout 120 "$PYTHON" -m compileall -q -q -j 0 "$site" || true
    touch "$site/unpacked"
  fi
  path=$path:$site
  # The libraries of these are not in the bundle, nor what pip knows of the versions.
  export SGLANG_UNIFIED_RADIX_TREE_CORE_BACKEND=python SGLANG_SKIP_SGL_KERNEL_VERSION_CHECK=1
fi
case " $* " in *" --cpu "*)
  path=$root/tests/sglang/stand_in:$path
  export SGLANG_USE_CPU_ENGINE=1 OMP_NUM_THREADS=1 ;;
esac
getent hosts "$(hostname)" > /dev/null ||
  echo "this machine's name has no address: where servers do not start, add it to /etc/hosts" >&2
export PATH=$PATH:${CUDA_HOME:-/usr/local/cuda}/bin PYTHONPATH=$path
export GLOO_SOCKET_IFNAME=lo NCCL_SOCKET_IFNAME=lo SGLANG_HOST_IP=127.0.0.1 HOST_IP=127.0.0.1
export HF_HUB_OFFLINE=1 TRANSFORMERS_OFFLINE=1 TOKENIZERS_PARALLELISM=false TORCH_COMPILE_DISABLE=1
# A health check is an answer of the process, not of the model.
export SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION=0
exec "$PYTHON" -m gpu.serving.run "$@"
