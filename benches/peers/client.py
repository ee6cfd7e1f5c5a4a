"""A client process of a peer: `python -m client SYSTEM INDEX ARGUMENT…`. Runs the same loop as `src/client/drive.rs`.

A system's `Client` has timed methods, `put`, `get` and `exists(cell, batch)`, and untimed ones, `prepare(cell)`,
`check(cell, batch)` and `clear()`. Every batch has the same bytes under different keys.
"""

import importlib
import json
import sys
import time
from types import SimpleNamespace


def payload(cell):
    """Bytes of the pages of a batch."""
    pages = (bytes((i * 31 + page * 7) & 255 for i in range(256)) * (cell.size // 256) for page in range(cell.batch))
    return b"".join(pages)


def measure(client, cell, stored):
    """Times a cell. Batches below `stored` have been put."""
    operate = getattr(client, cell.op)
    end, limit = (cell.batches, cell.batches) if cell.op == "put" else (sys.maxsize, stored)
    latencies = []
    done = 0
    begin = last = time.perf_counter_ns()
    end_by = begin + int(cell.seconds * 1e9)
    while done < end and (done == 0 or last < end_by):
        operate(cell, done % limit)
        now = time.perf_counter_ns()
        latencies.append(now - last)
        last = now
        done += 1
    client.check(cell, (done - 1) % limit)
    return {"seconds": (last - begin) / 1e9, "latencies_ns": latencies, "notes": {}}, done


def main():
    """Runs the cells that arrive on standard input until it ends."""
    system, index, *arguments = sys.argv[1:]
    client = importlib.import_module(f"systems.{system}").Client(int(index), *arguments)
    stored = 0
    for line in sys.stdin:
        cell = SimpleNamespace(**json.loads(line))
        if cell.op == "put":
            client.prepare(cell)
        print('{"ready":true}', flush=True)
        if not sys.stdin.readline():
            break
        if cell.op == "clear":
            client.clear()
            result = {"seconds": 0, "latencies_ns": [], "notes": {}}
        else:
            result, done = measure(client, cell, stored)
            stored = done if cell.op == "put" else stored
        print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
