"""Small Nsight Systems exports of our own making: SQLite and the CSV of `nsys stats`."""

from __future__ import annotations

import sqlite3
from collections.abc import Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

KERNEL, COPY, SET = (f"CUPTI_ACTIVITY_KIND_{what}" for what in ("KERNEL", "MEMCPY", "MEMSET"))
PROCESS = 281474993487872  # 4242 << 24 and the virtual machine's bits
NAMES = {1: "void gemm<float>(float*)", 2: "gemm", 3: "cudaLaunchKernel", 4: "cudaGraphLaunch", 5: "step 7"}


def kernel(start: Any, end: Any, correlation: Any = 1, **more: Any) -> dict[str, Any]:
    row = {"start": start, "end": end, "deviceId": 0, "contextId": 1, "greenContextId": None, "streamId": 7,
           "correlationId": correlation, "globalPid": PROCESS, "demangledName": 1, "shortName": 2, "gridX": 8,
           "gridY": 2, "gridZ": 1, "blockX": 128, "blockY": 1, "blockZ": 1, "clusterX": 2, "clusterY": 1, "clusterZ": 1,
           "registersPerThread": 32, "staticSharedMemory": 1024, "dynamicSharedMemory": 4096, "graphNodeId": None,
           "graphId": None}  # fmt: skip
    return {**row, **more}


def copied(start: Any, end: Any, kind: int = 1, nbytes: int = 4096, **more: Any) -> dict[str, Any]:
    return {"start": start, "end": end, "deviceId": 0, "streamId": 7, "correlationId": 90, "globalPid": PROCESS,
            "bytes": nbytes, "copyKind": kind, **more}  # fmt: skip


def call(start: int, correlation: int, name: int = 3, process: int = PROCESS) -> dict[str, Any]:
    return {"start": start, "end": start + 5, "globalTid": process + 99, "correlationId": correlation, "nameId": name}


def nvtx(start: int, end: int, text: str | None, process: int = PROCESS, text_id: int | None = None) -> dict[str, Any]:
    return {"start": start, "end": end, "text": text, "textId": text_id, "globalTid": process + 99}


def version(text: str = "3.25.0") -> list[dict[str, Any]]:
    return [{"name": "EXPORT_SCHEMA_VERSION", "value": text}]


def export(path: Path, tables: Mapping[str, Sequence[Mapping[str, Any]]], names: Mapping[int, str] = NAMES) -> Path:
    """Write an export; the columns of a table are those of its first row."""
    with closing(sqlite3.connect(path)) as database:
        strings = [{"id": i, "value": text} for i, text in names.items()]
        for table, rows in {"StringIds": strings, **tables}.items():
            columns = list(rows[0]) if rows else ["start"]
            database.execute(f"CREATE TABLE {table} ({', '.join(f'{c!r}' for c in columns)})")
            marks = ", ".join("?" * len(columns))
            database.executemany(f"INSERT INTO {table} VALUES ({marks})", [[row[c] for c in columns] for row in rows])
        database.commit()
    return path


CSV = (
    "NOTICE: Existing SQLite export found: report1.sqlite\n"
    "Processing [report1.sqlite] with [cuda_gpu_trace.py]... \n"
    "Start (ns),Duration (ns),CorrId,GrdX,GrdY,GrdZ,BlkX,BlkY,BlkZ,Reg/Trd,StcSMem (MB),DymSMem (MB),Bytes (MB),"
    "Throughput (MB/s),SrcMemKd,DstMemKd,Device,Ctx,GreenCtx,Strm,Name\n"
    "1000,500,7,,,,,,,,,,4.194,8000.1,Pageable,Device,NVIDIA L40S (0),1,,7,[CUDA memcpy Host-to-Device]\n"
    '2000,300,8,8,1,1,128,1,1,32,0.000,0.033,,,,,NVIDIA L40S (0),1,,7,"void f<int, 4>(float *, ""x"", int)"\n'
    "2100,300,9,8,1,1,128,1,1,32,0.000,0.033,,,,,NVIDIA L40S (1),1,2,7,g\n"
    "2500,10,10,,,,,,,,,,0.001,1.0,Device,,NVIDIA L40S (1),1,,9,[CUDA memset]\n"
)
