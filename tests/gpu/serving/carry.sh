#!/bin/bash
# carry.sh FOLDER: SGLang 0.5.23 for a GPU machine, to be carried to one without a network (39 MiB).
# It comes next to what that machine has: PyTorch 2.11 for CUDA 13, Triton, transformers with its
# requirements, nvcc, ninja and a C++ compiler. PYTHON_VERSION is that of its Python (default 3.12).
# What of SGLang the trial does not use stays behind, and its libraries are replaced by Python.
set -euo pipefail
mkdir -p "$1"; out=$(readlink -f "$1")
python=${PYTHON:-python3} version=${PYTHON_VERSION:-3.12}
work=$(mktemp -d); trap 'rm -rf "$work"' EXIT; cd "$work"
# The first that a package has is taken.
platforms=(manylinux_2_{34,31,28,27,26,24,17,5}_x86_64 manylinux{2014,1}_x86_64 any)
download=("$python" -m pip download -q --disable-pip-version-check --no-deps --only-binary=:all:
  --implementation cp --python-version "$version" "${platforms[@]/#/--platform=}")

"${download[@]}" -d . sglang==0.5.23 sglang-kernel==0.4.5
for wheel in *.whl; do "$python" -m zipfile -e "$wheel" "${wheel%%-*}"; done
rm -r sglang/sglang/{multimodal_gen,test,benchmark}
find sglang -name '*.so' -delete
find sglang_kernel -type f ! -name '*.py' ! -path '*/sm90/common_ops*' -delete
tar -C sglang -cJf "$out/sglang.tar.xz" .
tar -C sglang_kernel -cJf "$out/sglang_kernel.tar.xz" sgl_kernel

"${download[@]}" -d "$out" \
  annotated-types apache-tvm-ffi==0.1.11 asttokens cffi compressed-tensors==0.18.0 datasets dill distro executing \
  fastapi gguf interegular ipython ipython-pygments-lexers jedi jiter jsonschema jsonschema-specifications loguru \
  matplotlib-inline msgspec multiprocess openai==2.8.0 opentelemetry-api orjson parso partial-json-parser pexpect \
  prompt-toolkit ptyprocess pure-eval pybase64 pydantic==2.13.0 pydantic-core==2.46.0 python-multipart pyzmq \
  referencing rpds-py setproctitle sniffio soundfile stack-data starlette traitlets typing-inspection uvicorn \
  wcwidth xgrammar==0.2.7
touch "$out/complete"
