from typing import Any, Optional, Sequence, Union

_Key = Union[bytes, str]

def page_key(tokens: Sequence[int], previous: Optional[_Key] = None) -> bytes:
    """Key of the page with `tokens` that follows the page `previous`.

    SHA-256 over the previous key and the tokens as 32-bit little-endian numbers. SGLang uses the same chain.
    """

def _before_fork() -> None: ...
def _after_fork_in_parent() -> None: ...
def _after_fork_in_child() -> None: ...

class Namespace:
    """Pages that may be shared. Clients with equal namespaces share pages; no others do.

    `page_bytes` is the length of a page, at most 16 MiB, in `parts` equal parts, at most 128. `identity` must
    differ whenever the bytes would mean something else: weights, dtype, layout, tokens per page, rank. `model` is
    for people only. Engines that change weights in place give each `weights_version` a namespace of its own.
    """

    def __init__(
        self,
        page_bytes: int,
        *,
        identity: Union[bytes, str],
        parts: int = 1,
        model: str = "",
        tenant: str = "default",
        weights_version: str = "",
    ) -> None: ...
    @staticmethod
    def kv(
        *,
        dtype: str,
        layers: int,
        kv_heads: int,
        head_dim: int,
        page_tokens: int,
        weights: bytes,
        layers_per_part: Optional[int] = None,
        head_groups: int = 1,
        model: str = "",
        tenant: str = "default",
        weights_version: str = "",
    ) -> Namespace:
        """Pages in Larder's own layout. `weights` is the fingerprint of 32 bytes that its engines compute."""

    @property
    def page_bytes(self) -> int: ...
    @property
    def part_bytes(self) -> list[int]: ...
    @property
    def id(self) -> str:
        """Identity, 64 hexadecimal digits."""

class Pointer:
    """Memory given by address and size.

    `owner` stays referenced until no transfer can touch the memory. Without an owner, the memory must stay mapped
    until the process ends.
    """

    def __init__(self, address: int, size: int, owner: Any = None, *, readonly: bool = False) -> None: ...
    @property
    def address(self) -> int: ...
    @property
    def size(self) -> int: ...
    @property
    def readonly(self) -> bool: ...

class Buffer:
    """Memory from `Client.buffer`. `larder_kv.view` shows its bytes."""

    @property
    def address(self) -> int: ...
    @property
    def size(self) -> int: ...
    @property
    def shared(self) -> bool:
        """True if a node on this machine can copy from it."""

class Lookup:
    """The longest prefix of some keys that the store can serve."""

    @property
    def tiers(self) -> list[str]:
        """Tier of each page of the prefix."""

    @property
    def answered(self) -> bool:
        """True if every node that owns one of the keys has answered in time."""

    @property
    def retry_after(self) -> Optional[float]:
        """Longest pause in seconds that a busy node suggests."""

    @property
    def held(self) -> int:
        """Leading pages that are in L2 and held there."""

    @property
    def expected(self) -> list[float]:
        """Expected time in seconds until each page is in L2."""

    def release(self) -> None: ...
    def __len__(self) -> int: ...
    def __enter__(self) -> Lookup: ...
    def __exit__(self, *exception: Any) -> None: ...

class Completions:
    def __init__(self) -> None: ...
    def fileno(self) -> int: ...
    def drain(self) -> list[tuple[int, bool, Any]]: ...

class Pending:
    @property
    def id(self) -> int: ...
    def cancel(self) -> None: ...

class Client:
    """The native client. Its methods return a result, or a `Pending` if they get a queue."""

    def __init__(
        self,
        url: str,
        namespace: Namespace,
        *,
        name: str = "python",
        memory_bytes: int = ...,
        connect_timeout: float = 1.0,
    ) -> None: ...
    @property
    def page_bytes(self) -> int: ...
    @property
    def part_bytes(self) -> list[int]: ...
    @property
    def nodes_connected(self) -> int: ...
    def ready(self, timeout: float, *, queue: Optional[Completions] = None) -> Any: ...
    def buffer(self, size: int) -> Buffer: ...
    def locate(self, page_keys: Sequence[_Key], timeout: float, *, queue: Optional[Completions] = None) -> Any: ...
    def lookup(
        self, page_keys: Sequence[_Key], timeout: float, *, hold: float = 0.0, queue: Optional[Completions] = None
    ) -> Any: ...
    def get_into(
        self,
        page_keys: Sequence[_Key],
        buffers: Sequence[Any],
        timeout: float,
        *,
        busy_retries: int = 0,
        queue: Optional[Completions] = None,
    ) -> Any: ...
    def put_from(
        self,
        page_keys: Sequence[_Key],
        buffers: Sequence[Any],
        timeout: float,
        *,
        parent: Optional[_Key] = None,
        position: Optional[int] = None,
        tokens: Optional[Sequence[Sequence[int]]] = None,
        ttl: Optional[float] = None,
        busy_retries: int = 0,
        queue: Optional[Completions] = None,
    ) -> Any: ...
    def follow(
        self,
        page_keys: Sequence[_Key],
        buffers: Sequence[Any],
        timeout: float,
        *,
        queue: Optional[Completions] = None,
    ) -> Any: ...
    def pin(
        self,
        page_keys: Sequence[_Key],
        timeout: float,
        *,
        ttl: float,
        kind: str = "soft",
        queue: Optional[Completions] = None,
    ) -> Any: ...
    def hint(
        self,
        page_keys: Sequence[_Key],
        timeout: float,
        *,
        kind: str = "none",
        generated: Optional[int] = None,
        retain: Optional[float] = None,
        queue: Optional[Completions] = None,
    ) -> Any: ...
    def warm(self, page_keys: Sequence[_Key], timeout: float, *, queue: Optional[Completions] = None) -> Any: ...
    def forget(self, page_keys: Sequence[_Key], timeout: float, *, queue: Optional[Completions] = None) -> Any: ...
    def status(self, timeout: float, *, queue: Optional[Completions] = None) -> Any: ...
    def stats(self) -> dict[str, int]: ...
