#!/usr/bin/env bash
# Compiles csrc for every architecture; warnings, spills and local memory are errors, and every
# architecture asked for must be in the library. Needs nvcc 13, no GPU; checks the format of the
# sources where .venv has a clang-format.
set -euo pipefail
cd "$(dirname "$0")/.."
if [ -x .venv/bin/clang-format ]; then
  find csrc -name '*.cu' -o -name '*.cuh' -o -name '*.cc' -o -name '*.h' |
    xargs .venv/bin/clang-format --dry-run --Werror
fi
build=build/cuda
cmake --fresh -S csrc -B build/cpu -G Ninja -DCMAKE_BUILD_TYPE=Release -DENGRAM_STRICT=ON >/dev/null
cmake --build build/cpu --target engram_cpu
architectures="80;90a;100f;120a;121a"
cmake --fresh -S csrc -B "$build" -G Ninja -DCMAKE_BUILD_TYPE=Release \
  -DENGRAM_ARCHITECTURES="$architectures" >/dev/null
if ! cmake --build "$build" --clean-first >"$build/log.txt" 2>&1; then
  grep -E "error|warning|FAILED" "$build/log.txt"
  exit 1
fi

python3 - "$build" "$architectures" <<'PY'
import re, sys
from pathlib import Path

build, architectures = Path(sys.argv[1]), sys.argv[2].split(";")
log = (build / "log.txt").read_text()
library = (build / "libengram_cuda.so").read_bytes()
failures = []
for architecture in architectures:
    # ptxas names each image it compiles.
    if f"for 'sm_{architecture}'" not in log:
        failures.append(f"no kernel was compiled for sm_{architecture}")
for size in re.findall(r"(\d+) bytes spill stores", log):
    if int(size):
        failures.append(f"spills {size} bytes")
for size in re.findall(r"(\d+) bytes smem", log):
    if int(size) > 48 * 1024:
        failures.append(f"{size} bytes of static shared memory")
if "Potential Performance Loss" in log:
    failures.append("ptxas makes wgmma wait for each step (see its notes in the log)")
kernels = len(re.findall(r"Compiling entry function", log))
print(f"{kernels} kernels over {len(architectures)} architectures, {len(library) / 1e6:.1f} MB")
if failures:
    sys.exit("\n".join(failures))
PY
