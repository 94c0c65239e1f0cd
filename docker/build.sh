#!/bin/sh
# Installs the service into a prefix of its own: docker/build.sh cpu|cuda
#
# The Dockerfile, CI and a machine without containers run this one script, as it is.
#   PREFIX  where to; must not exist (/opt/engram)
#   PYTHON  which Python; the prefix keeps using it (python3)
#   WHEELS  a directory of wheels that the package registry lacks (docker/wheels)
#   BASE    set by the Dockerfile: the base image, refused unless it names a digest
# Every package comes with its hash from docker/locks/; the network is used for packages alone.
set -eu

die() { echo "build.sh: $*" >&2; exit 1; }

root=$(cd "$(dirname "$0")/.." && pwd)
PREFIX=${PREFIX:-/opt/engram}
PYTHON=${PYTHON:-python3}
WHEELS=${WHEELS:-$root/docker/wheels}
target=${1-}
machine=$(uname -m)

[ $# -eq 1 ] || die "expected one argument, cpu or cuda, got $#"
case $target in cpu | cuda) ;; *) die "expected cpu or cuda, got '$target'" ;; esac
case $machine in x86_64 | aarch64) ;; *) die "expected x86_64 or aarch64, this is $machine" ;; esac
case ${BASE-@sha256:} in
  *@sha256:*) ;;
  *) die "expected BASE=IMAGE@sha256:DIGEST, got '$BASE' (docs/containers.md says how to find it)" ;;
esac
[ ! -e "$PREFIX" ] || die "$PREFIX is there already: remove it or choose another PREFIX"
"$PYTHON" -c 'import sys; sys.exit(sys.version_info < (3, 11))' ||
  die "expected Python 3.11 or newer, $PYTHON is $("$PYTHON" -V 2>&1)"

lock=$root/docker/locks/$target-$machine.txt

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
trap 'exit 1' HUP INT TERM

# A machine's own constraints name no hashes, and pip then refuses every lock.
export PIP_CONSTRAINT=/dev/null

install_locked() { # PYTHON LOCK OPTION...: install what the lock names, beside that interpreter
  python=$1 requirements=$2
  shift 2
  set -- "$python" -m pip --disable-pip-version-check --no-input install --quiet "$@" \
    --only-binary :all: --require-hashes --requirement "$requirements"
  if [ -d "$WHEELS" ]; then set -- "$@" --find-links "$WHEELS"; fi
  "$@"
}

echo "build.sh: $target for $machine into $PREFIX, from ${lock#"$root"/}"
"$PYTHON" -m venv "$PREFIX"
install_locked "$PREFIX/bin/python" "$lock" || die "not every package of ${lock#"$root"/} could be \
had; torch==2.13.0+cpu is a wheel to put into $WHEELS yourself (docs/containers.md)"

"$PYTHON" -m venv "$work/tools"
PATH=$work/tools/bin:$PATH
install_locked "$work/tools/bin/python" "$root/docker/locks/build-$machine.txt" --no-compile

mkdir "$work/source" "$work/dist"
for part in pyproject.toml README.md csrc proto engram_core engram_client service; do
  cp -R "$root/$part" "$work/source/"
done
command -v g++ >/dev/null || die "expected g++, which compiles the gate; install it"
set -- --config-settings=wheel.cmake=true --config-settings=cmake.source-dir=csrc
if [ "$target" = cpu ]; then
  # Whatever nvcc is about: this target has no CUDA.
  set -- "$@" --config-settings=cmake.define.ENGRAM_NVCC=OFF
else
  install_locked "$work/tools/bin/python" "$root/docker/locks/nvcc-$machine.txt" --no-compile
  CUDA_HOME=$("$work/tools/bin/python" -c 'import nvidia.cu13 as p; print(list(p.__path__)[0])')
  export CUDA_HOME
  # The packages' own layout lacks what nvcc.profile and CMake look for.
  ln -s lib "$CUDA_HOME/lib64"
  ln -s libcudart.so.13 "$CUDA_HOME/lib/libcudart.so"
fi
"$work/tools/bin/python" -m pip --disable-pip-version-check wheel --quiet --no-deps --no-index \
  --no-build-isolation --wheel-dir "$work/dist" "$@" "$work/source"
"$PREFIX/bin/python" -m pip --disable-pip-version-check install --quiet --no-deps --no-index \
  "$work"/dist/*.whl

(cd / && "$PREFIX/bin/python" -c '
import sys
from engram_core.backends.cpu import find_library
sys.exit(find_library() is None)') || die "the CPU library was not built"
(cd / && "$PREFIX/bin/python" -c 'import engram_client.proto.engram_pb2_grpc') ||
  die "the stubs of proto/engram.proto were not built"
if [ "$target" = cuda ]; then
  (cd / && "$PREFIX/bin/python" -c '
from engram_core.backends.native import Native
print("build.sh: kernels for", Native().architectures)') || die "the CUDA library was not built"
fi
"$PREFIX/bin/python" -m pip --disable-pip-version-check check
# Nothing at run time installs, so nothing at run time can.
"$PREFIX/bin/python" -m pip --disable-pip-version-check uninstall --quiet --yes pip 2>/dev/null
(cd / && "$PREFIX/bin/engram" --help >/dev/null) || die "$PREFIX/bin/engram does not start"
echo "build.sh: done, $(du -sm "$PREFIX" | cut -f1) MB"
