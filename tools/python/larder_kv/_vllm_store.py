"""Calls of a vLLM process to the store, for the tier and the connector. No method waits, and none raises.

Calls run on the client's threads, and each ends by its timeout: a store that is away is a miss. Results arrive in
`poll`.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Optional

from vllm.logger import init_logger
from vllm.v1.core import kv_cache_utils

from ._client import Client
from ._native import Completions, Namespace

logger = init_logger("vllm.larder")

PAGE_BYTES_MAX = 16 << 20
TIMEOUT_MAX = 86400.0
"""Longest timeout, and longest life of a page that a request may ask for, in seconds."""

BUSY_RETRIES = 1000
"""A large call exceeds a node's budget, so the rest waits in turns. The timeout bounds this."""

CONNECT_SECONDS = 1.0
"""Longest time for which the first calls of a process wait for the connections to the store."""


def check_options(url: str, tenant: str, *timeouts: float) -> None:
    """Raises for a wrong URL, tenant or timeout, while vLLM starts."""
    if not all(0 <= timeout <= TIMEOUT_MAX for timeout in timeouts):
        raise ValueError("the timeouts must be 0 to 86400 seconds")
    Client(url, Namespace(1, identity="check", tenant=tenant), memory_bytes=0)


def open_client(url: str, tenant: str, model: str, page_bytes: int, identity: str, name: str) -> Client:
    namespace = Namespace(page_bytes, identity=identity, model=model[:64], tenant=tenant)
    return Client(url, namespace, name=name, memory_bytes=0)


@dataclass(kw_only=True)
class RequestOptions:
    """What a request asks of the store, by the key `larder` of its `kv_transfer_params`."""

    load: bool = True
    store: bool = True
    ttl: Optional[float] = None
    """Seconds after which the request's new pages become misses."""

    def take(self, params: Optional[Mapping[str, Any]]) -> Mapping[str, Any]:
        """Takes the options of a request. Returns all that it has for Larder."""
        ours = (params or {}).get("larder")
        if not isinstance(ours, dict):
            return {}
        self.load = ours.get("load") is not False
        self.store = ours.get("store") is not False
        ttl = ours.get("ttl")
        self.ttl = float(ttl) if isinstance(ttl, (int, float)) and 0 < ttl < TIMEOUT_MAX else None
        return ours


class StoreCalls:
    """The client of a process, and its calls in flight."""

    def __init__(self) -> None:
        self.client: Optional[Client] = None
        self.is_connected = False
        """True once the first calls need not wait: a node is connected, or none was in time."""
        self.completions = Completions()
        self.pending: dict[int, Callable[[Any], None]] = {}

    def open(self, client: Client) -> None:
        """Takes a client that has just been made."""
        self.client, self.is_connected = client, False

        def done(_: Any) -> None:
            if self.client is client:
                self.is_connected = True

        self.call(done, "ready", CONNECT_SECONDS)

    def call(self, done: Callable[[Any], None], method: str, *args: Any, **options: Any) -> None:
        """Starts a call. `done` gets its result, or None if it has failed."""
        assert self.client is not None
        try:
            pending = getattr(self.client._native, method)(*args, queue=self.completions, **options)
        except Exception:
            logger.exception("Larder: %s has failed", method)
            done(None)
            return
        self.pending[pending.id] = done

    def poll(self) -> None:
        """Takes the results of finished calls."""
        if not self.pending:
            return
        for number, succeeded, value in self.completions.drain():
            if not succeeded:
                logger.error("Larder: a call has failed: %s", value)
            self.pending.pop(number)(value if succeeded else None)


class SchedulerStore(StoreCalls):
    """The calls of a scheduler. It makes its client late: vLLM chooses the seed of its hashes after its connector."""

    def __init__(self, connect: Callable[[bytes], Client]) -> None:
        super().__init__()
        self.connect = connect
        self.is_refused = False

    def attach(self) -> Optional[Client]:
        """The client, from the first request on. None if this engine may not use the store."""
        if self.client is not None or self.is_refused:
            return self.client
        none_hash = getattr(kv_cache_utils, "NONE_HASH", None)
        if none_hash is None:
            return None
        if len(none_hash) != 32:
            # Others can find prompts with equal hashes, and would read or plant wrong pages.
            logger.error("Larder stores nothing: set --prefix-caching-hash-algo to sha256 or sha256_cbor")
            self.is_refused = True
            return None
        try:
            self.open(self.connect(none_hash))
        except Exception:
            logger.exception("Larder: the engine loads and stores nothing")
            self.is_refused = True
        return self.client

    def close(self) -> None:
        """Ends the use of the store. Calls in flight keep their memory."""
        self.client, self.is_refused = None, True
