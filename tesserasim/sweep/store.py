"""Where a sweep's results lie: one JSON file per experiment, written whole or not at all.

A result's key is the hash of everything it depends on, so a file that exists and is intact never has to be
computed again, and a changed input is another file. Each file carries a checksum over its own content: one
that was cut short or edited counts as absent. When things happened and how long they took goes to
`journal.jsonl`, which no hash covers.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import math
import os
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from tesserasim.errors import InputError

STORE_VERSION = 1
JOURNAL = "journal.jsonl"
_WORKERS_GONE_S = 60.0  # how long a new sweep waits for the workers of a killed one


def canonical(value: Any) -> bytes:
    """The one JSON text of `value`: sorted keys, no spaces, no NaN."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    return text.encode()


def digest(value: Any) -> str:
    return hashlib.sha256(canonical(value)).hexdigest()


def finite(value: Any) -> Any:
    """`value` with tuples as lists and numbers that JSON cannot hold as None."""
    if isinstance(value, Mapping):
        return {str(k): finite(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [finite(v) for v in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def write_whole(path: Path, content: bytes) -> None:
    """Write `path` so that it appears whole or not at all, even if the machine stops."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with partial.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)
    directory = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)


class Store:
    """The results under one directory."""

    def __init__(self, root: Path) -> None:
        self.root = root

    @property
    def results(self) -> Path:
        return self.root / "experiments"

    def path(self, key: str) -> Path:
        return self.results / f"{key}.json"

    def load(self, key: str) -> dict[str, Any] | None:
        """The result of `key`; None if there is none or the file is damaged."""
        try:
            document = json.loads(self.path(key).read_bytes())
        except (OSError, ValueError, RecursionError):
            return None
        if not isinstance(document, dict) or document.get("store_version") != STORE_VERSION:
            return None
        check = document.pop("check", None)
        if document.get("key") != key or not isinstance(document.get("result"), dict):
            return None
        try:
            return document["result"] if check == digest(document) else None
        except ValueError:
            return None

    def save(self, key: str, inputs: Mapping[str, Any], result: Mapping[str, Any]) -> None:
        document: dict[str, Any] = {"store_version": STORE_VERSION, "key": key}
        document |= {"inputs": finite(inputs), "result": finite(result)}
        document["check"] = digest(document)
        text = json.dumps(document, sort_keys=True, indent=1, ensure_ascii=False, allow_nan=False)
        write_whole(self.path(key), text.encode() + b"\n")

    def journal(self, event: str, key: str, **facts: Any) -> None:
        """Append one line; a single write, so that lines of several processes do not mix."""
        line = json.dumps({"event": event, "key": key, **facts}) + "\n"
        with (self.root / JOURNAL).open("ab", buffering=0) as file:
            file.write(line.encode())

    def wipe(self) -> None:
        """Forget every result (`--fresh`)."""
        for path in self.results.glob("*.json"):
            path.unlink(missing_ok=True)

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the directory for one sweep; waits for workers that outlive a killed sweep.

        Raises InputError if another sweep is running here, or the directory cannot be written.
        """
        try:
            self.results.mkdir(parents=True, exist_ok=True)
            lock = (self.root / ".lock").open("w")
        except OSError as error:
            raise InputError(f"{self.root}: cannot be written ({error.strerror})") from None
        with lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise InputError(f"{self.root}: another sweep runs here; wait or choose another --out") from None
            self._wait_for_workers()
            for leftover in self.results.glob(".*.tmp"):
                leftover.unlink(missing_ok=True)
            yield

    def _wait_for_workers(self) -> None:
        with (self.root / ".workers").open("w") as gate:
            deadline = time.monotonic() + _WORKERS_GONE_S
            while True:
                try:
                    fcntl.flock(gate, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    return
                except BlockingIOError:
                    if time.monotonic() > deadline:
                        raise InputError(f"{self.root}: workers of an earlier sweep still run") from None
                    time.sleep(0.05)

    def join_workers(self) -> int:
        """Called by a worker process: the returned descriptor marks it as alive until it exits."""
        gate = os.open(self.root / ".workers", os.O_RDWR | os.O_CREAT, 0o644)
        fcntl.flock(gate, fcntl.LOCK_SH)
        return gate
