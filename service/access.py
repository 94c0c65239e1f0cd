"""Who may do what: API keys from a file that is read again when it changes, and the Host check.

A key is a tenant: its sessions, store entries and share of bytes are its own. Without keys only
loopback (or the Unix socket) is served, to requests that name this machine (DNS rebinding ends
here).
"""

from __future__ import annotations

import hashlib
import hmac
import os
import re
import secrets
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from engram_core.errors import EngramError
from service.problems import Forbidden, Misdirected, Unauthenticated
from service.settings import Settings, SettingsError, is_loopback

SCOPES = ("use", "admin")
"""use: everything about sessions and tensors; admin: reads about the service, no sessions."""

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}", re.ASCII)
_DIGEST = re.compile(r"[0-9a-f]{64}", re.ASCII)
_HOST = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]+)(:[0-9]{1,5})?", re.ASCII)

Headers = Iterable[tuple[bytes, bytes]]


@dataclass(frozen=True)
class Key:
    """One line of the keys file. digest: sha256 of the key, hex."""

    name: str
    scope: str
    digest: str


KEYLESS = Key(name="", scope="use", digest="")
"""Who asks when there are no keys."""


class Keyring:
    """The keys of a file. Raises SettingsError when made of one that cannot be read."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._stamp = self._read_stamp()
        self._keys = read_keys(path)

    def find(self, token: bytes) -> Key | None:
        """Return the key of a token; every key is compared, in constant time."""
        digest = hashlib.sha256(token).hexdigest()
        found = None
        for key in self._keys:
            if hmac.compare_digest(key.digest, digest):
                found = key
        return found

    def holds(self, key: Key) -> bool:
        """Tell whether a key that was found is there still."""
        return key in self._keys

    def refresh(self) -> set[str]:
        """Read the file again if it has changed; return the names whose keys are gone.

        Raises SettingsError: it cannot be read; the keys stay as they were.
        """
        stamp = self._read_stamp()
        if stamp == self._stamp:
            return set()
        keys = read_keys(self.path)
        gone = {key.name for key in self._keys if key not in keys}
        self._stamp, self._keys = stamp, keys
        return gone

    def _read_stamp(self) -> tuple[int, int, int]:
        try:
            stat = os.stat(self.path)
        except OSError as error:
            raise SettingsError(
                f"keys_file {self.path}: {error.strerror}; `engram keys add NAME --keys-file FILE` "
                "makes one"
            ) from None
        return stat.st_mtime_ns, stat.st_ino, stat.st_size


class Access:
    """Decides who asks. Keys, if there is a keys file; else loopback names only."""

    def __init__(self, settings: Settings) -> None:
        self.keyring = Keyring(settings.keys_file) if settings.keys_file else None

    def identify(self, headers: Headers, *, over_unix_socket: bool) -> Key:
        """Return the key that asks. Raises Misdirected, Unauthenticated."""
        if self.keyring is None:
            if not over_unix_socket:
                check_host(headers)
            return KEYLESS
        values = [value for name, value in headers if name == b"authorization"]
        scheme, _, token = (values[0] if len(values) == 1 else b"").partition(b" ")
        if scheme.lower() != b"bearer":
            raise Unauthenticated(
                "an API key is needed", expected="one header: Authorization: Bearer KEY"
            )
        key = self.keyring.find(token.strip())
        if key is None:
            raise Unauthenticated("the API key is not known here", expected="a key of keys_file")
        return key

    def confirm(self, key: Key) -> None:
        """Check a key again, at the time its request is carried out: its body may have taken long.

        Raises Unauthenticated: the key was removed meanwhile.
        """
        if self.keyring is not None and not self.keyring.holds(key):
            raise Unauthenticated(
                "the API key is not known here any more", expected="a key of keys_file"
            )


def check_scope(key: Key, scopes: tuple[str, ...]) -> None:
    """Raises Forbidden: the key's scope is none of these."""
    if key.scope not in scopes:
        raise Forbidden(
            f"key {key.name!r} has another scope", expected=" or ".join(scopes), got=key.scope
        )


def check_host(headers: Headers) -> None:
    """Raises Misdirected: the one Host header is not a name of this machine."""
    hosts = [value.decode("latin-1") for name, value in headers if name == b"host"]
    if len(hosts) != 1 or not _is_own(hosts[0]):
        refusal: EngramError = Misdirected(
            "without API keys only this machine's own names are answered",
            expected="one Host: localhost, 127.0.0.1 or [::1]",
            got=", ".join(hosts)[:80],
        )
        raise refusal


@lru_cache(maxsize=16)
def _is_own(host: str) -> bool:
    """Tell whether a Host header is a name of this machine; addresses take long to parse."""
    found = _HOST.fullmatch(host)
    return found is not None and is_loopback(found[1])


def read_keys(path: Path) -> tuple[Key, ...]:
    """Return the keys of a file: `name scope sha256(key)` a line; `#` begins a comment.

    Raises SettingsError: unreadable, malformed, or a name or key twice.
    """
    try:
        text = path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise SettingsError(f"keys_file {path}: cannot be read: {why}") from None
    keys: list[Key] = []
    for number, line in enumerate(text.splitlines(), 1):
        words = line.partition("#")[0].split()
        if not words:
            continue
        key = _read_key(words)
        if key is None:
            raise SettingsError(
                f"keys_file {path}, line {number}: expected `name use|admin sha256-in-hex`"
            )
        if any(key.name == other.name or key.digest == other.digest for other in keys):
            raise SettingsError(
                f"keys_file {path}, line {number}: name or key is there twice; delete one"
            )
        keys.append(key)
    return tuple(keys)


def _read_key(words: list[str]) -> Key | None:
    if len(words) != 3 or words[1] not in SCOPES:
        return None
    if not _NAME.fullmatch(words[0]) or not _DIGEST.fullmatch(words[2]):
        return None
    return Key(*words)


def add_key(path: Path, name: str, scope: str) -> str:
    """Make a key, append its hash to the file (made 0600 if missing) and return it.

    The key itself is kept nowhere. Raises SettingsError: a name that is malformed or there.
    """
    if not _NAME.fullmatch(name) or scope not in SCOPES:
        raise SettingsError(
            f"key {name[:80]!r} {scope!r}: a name is 1 to 64 of A-Z a-z 0-9 . _ -, "
            "a scope is use or admin"
        )
    if path.exists() and any(key.name == name for key in read_keys(path)):
        raise SettingsError(f"{path} has a key named {name}; delete its line to replace it")
    token = f"engram_{secrets.token_urlsafe(32)}"
    line = f"{name} {scope} {hashlib.sha256(token.encode()).hexdigest()}\n"
    try:
        _append(path, line)
    except OSError as error:
        raise SettingsError(f"keys_file {path}: cannot be written: {error.strerror}") from None
    return token


def _append(path: Path, line: str) -> None:
    """Append a line in one write, on a line of its own."""
    with open(os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o600), "rb+", 0) as file:
        size = file.seek(0, os.SEEK_END)
        if size:
            file.seek(size - 1)
            line = line if file.read(1) == b"\n" else "\n" + line
        file.write(line.encode())
        os.fsync(file.fileno())
