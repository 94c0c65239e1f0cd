#!/bin/sh
# Writes docker/locks/*.txt from pyproject.toml and constraints.txt: docker/lock.sh (needs uv)
#   WHEELS  a directory of wheels that the package registry lacks (docker/wheels)
# Versions come from constraints.txt; what it does not name keeps the version already locked:
# delete a lock to let it move. torch: the CPU build where WHEELS has its wheel for the
# architecture, else the registry's build, which brings CUDA's libraries with it.
set -eu
cd "$(dirname "$0")/.."
WHEELS=${WHEELS:-docker/wheels}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

lock() { # NAME MACHINE ARGUMENT...
  name=$1 machine=$2
  shift 2
  if [ -e "docker/locks/$name.txt" ]; then cp "docker/locks/$name.txt" "$work/$name"; fi
  uv pip compile --quiet --no-annotate --no-header --generate-hashes --python-version 3.11 \
    --python-platform "$machine-manylinux_2_28" --output-file "$work/$name" \
    --find-links "$WHEELS" --constraint constraints.txt "$@"
  {
    echo "# Written by docker/lock.sh for $machine, Python 3.11."
    grep -v '^# Written by' "$work/$name"
  } >"docker/locks/$name.txt"
}

mkdir -p "$WHEELS"
for machine in x86_64 aarch64; do
  lock "cpu-$machine" "$machine" --only-binary :all: pyproject.toml
  lock "cuda-$machine" "$machine" --only-binary :all: pyproject.toml docker/locks/cuda.in
  lock "build-$machine" "$machine" --only-binary :all: docker/locks/build.in
  lock "nvcc-$machine" "$machine" --only-binary :all: docker/locks/nvcc.in
done
lock lint-x86_64 x86_64 --only-binary :all: docker/locks/lint.in
lock compose-x86_64 x86_64 docker/locks/compose.in
