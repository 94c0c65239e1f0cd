#!/bin/sh
# What the container runs: the `engram` command as process 1, so that signals reach it.
#   entrypoint.sh serve /checkpoint/model.gguf
set -eu

if [ $# -eq 0 ]; then
  echo "entrypoint.sh: expected an engram command, for example: serve /checkpoint/model.gguf" >&2
  exit 2
fi
umask 077
# shellcheck disable=SC3045 # dash, busybox and bash have it
ulimit -c 0 # a core file would hold clients' token ids
exec "${PREFIX:-/opt/engram}/bin/engram" "$@"
