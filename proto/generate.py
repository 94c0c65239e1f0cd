"""Write the Python side of `proto/engram.proto`: `python proto/generate.py [--check]`.

The generated files are committed, so that neither a user nor the build needs protoc; a test makes
them again and compares the bytes.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

PACKAGE = "engram_client/proto"
ROOT = Path(__file__).resolve().parents[1]
NAMES = ("engram_pb2.py", "engram_pb2.pyi", "engram_pb2_grpc.py")


def generate(out: Path) -> None:
    """Write the files below `out`, in the package's folder. Raises RuntimeError."""
    from grpc_tools import protoc

    # The virtual path in front of `=` makes the generated import the package's own.
    flags = [f"--{kind}={out}" for kind in ("python_out", "pyi_out", "grpc_python_out")]
    source = f"{PACKAGE}/engram.proto"
    if protoc.main(["protoc", f"-I{PACKAGE}={ROOT / 'proto'}", *flags, source]):
        raise RuntimeError(f"protoc refuses {source}")


def differing() -> list[str]:
    """Return the names of committed files that are not what would be generated."""
    with tempfile.TemporaryDirectory() as name:
        generate(Path(name))
        fresh = Path(name) / PACKAGE
        return [
            name
            for name in NAMES
            if (fresh / name).read_bytes() != (ROOT / PACKAGE / name).read_bytes()
        ]


def main() -> None:
    if "--check" not in sys.argv[1:]:
        generate(ROOT)
    elif names := differing():
        sys.exit(f"proto/engram.proto has changed; run make proto: {', '.join(names)}")


if __name__ == "__main__":
    main()
