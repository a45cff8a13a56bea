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
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from tesserasim.errors import InputError
from tesserasim.files import read_text
from tesserasim.writing import check_directory, check_output, write_whole

STORE_VERSION = 1
JOURNAL = "journal.jsonl"
#: Draws of a finished result, as many as `metrics.uncertainty` makes.
DRAWS = 200
_NUMBERS = ("batch", "depth", "throughput_per_s", "bound_per_s", "median_per_s")
_CONTAINERS = {"latency_ms": dict, "utilisation": dict, "lanes": list, "notes": list, "extrapolated": list}
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


def is_result(value: Any) -> bool:
    """The shape that a bench stores: a row that says what became of its policy, and draws where it is ok.

    A file may be whole and yet not hold this: what reads it counts on every field that is checked here.
    """
    if not isinstance(value, dict) or not isinstance(value.get("row"), dict) or not _numbers(value.get("draws")):
        return False
    row, draws = value["row"], value["draws"]
    if not all(isinstance(row.get(name), str) for name in ("mix", "policy", "status", "reason")):
        return False
    if not all(isinstance(row.get(name), list) for name in ("origins", "incomplete")):
        return False
    if row["status"] != "ok":
        return row["status"] == "not applicable" and not draws
    return (
        len(draws) == DRAWS and _numbers([row.get(name) for name in _NUMBERS])
        and _numbers(row.get("interval80")) and len(row["interval80"]) == 2
        and all(isinstance(row.get(name), kind) for name, kind in _CONTAINERS.items())
    )  # fmt: skip


def _numbers(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(v, int | float) and not isinstance(v, bool) for v in value)


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
            document = json.loads(read_text(self.path(key), "result"))
        except (InputError, OSError, ValueError, RecursionError):
            return None
        if not isinstance(document, dict) or document.get("store_version") != STORE_VERSION:
            return None
        check = document.pop("check", None)
        result = document.get("result")
        if document.get("key") != key or not is_result(result):
            return None
        try:
            return result if check == digest(document) else None
        except (ValueError, RecursionError):
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
            with contextlib.suppress(IsADirectoryError, PermissionError):  # its experiment will say so
                path.unlink(missing_ok=True)

    def check(self, names: Iterable[str]) -> None:
        """InputError unless the files of these names, and the store's own, can be written under the directory."""
        check_directory(self.root)
        check_directory(self.results)
        if self.root.is_dir():
            for name in (*names, JOURNAL, ".lock", ".workers"):
                check_output(self.root / name)

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
