"""Pytest plugin: runs vLLM's own tests of tiers on Larder. Used by `tests/clients/vllm`; `LARDER_URL` names the node.

vLLM's tests construct its example tier and its file-system tier by name, and expect results at once. The classes below
take their places: they wait for each call of the tier, and each instance has a namespace as empty as a new tier.
"""

import os
import select
import types
import uuid

import vllm.v1.kv_offload.tiering.example.manager as example
import vllm.v1.kv_offload.tiering.fs.manager as fs
from larder_kv.vllm import LarderTier
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import init_none_hash
from vllm.v1.kv_offload.base import LookupResult
from vllm.v1.kv_offload.config import (
    OffloadingCacheConfig,
    OffloadingConfig,
    OffloadingModelConfig,
    OffloadingParallelConfig,
)

TIMEOUT = 20.0

init_none_hash(sha256)


def config():
    return OffloadingConfig(
        groups=(),
        worker_kv_bytes_per_block=0,
        enable_kv_cache_events=False,
        extra_config={},
        engine_id="test",
        model=OffloadingModelConfig(name="test", dtype="float32"),
        cache=OffloadingCacheConfig(tokens_per_hash=16, blocks_per_chunk=1),
        parallel=OffloadingParallelConfig(0, 1, 1, 1, 1, 1, 0, 1, None, False),
    )


class WaitingTier(LarderTier):
    """A tier whose calls have ended when they return."""

    def __init__(self, spec, view, tier_type, detector, name, **options):
        spec = types.SimpleNamespace(config=config())
        timeouts = dict.fromkeys(("lookup_timeout", "load_timeout", "store_timeout"), TIMEOUT)
        super().__init__(
            spec, view, tier_type, detector, url=os.environ["LARDER_URL"], weights=name, **timeouts, **options
        )
        # A job larger than half of the host cache is usual in these tests.
        self.store_chunks_max = view.shape[0]
        self.store.attach()
        while not self.store.is_connected:
            self.wait()

    def wait(self):
        select.select([self.store.completions.fileno()], [], [], 1.0)
        self.store.poll()

    def lookup(self, key, req_context):
        while (result := super().lookup(key, req_context)) is LookupResult.RETRY:
            self.on_schedule_end(None)
            self.wait()
        return result

    def submit_store(self, job_metadata):
        super().submit_store(job_metadata)
        self.drain_jobs()

    def submit_load(self, job_metadata):
        super().submit_load(job_metadata)
        self.drain_jobs()

    def has(self, key):
        return all(self.store.client.exists(self.page_keys([key]), TIMEOUT))


class Chunks(dict):
    """Chunks that a test declares to be in the tier."""

    def __init__(self, tier):
        self.tier = tier

    def __setitem__(self, key, value):
        super().__setitem__(key, value)
        page = bytes(self.tier.page_bytes)
        keys = self.tier.page_keys([key])
        assert self.tier.store.client.put_from(keys, [page] * len(keys), TIMEOUT) == ["stored"] * len(keys)


class ExampleTier(WaitingTier):
    def __init__(self, offloading_spec, primary_kv_view, tier_type, custom_param=0, backpressure_detector=None):
        super().__init__(offloading_spec, primary_kv_view, tier_type, backpressure_detector, uuid.uuid4().hex)
        self.chunks = Chunks(self)
        self.stored = set()

    @property
    def completed_jobs(self):
        return self.results

    def submit_store(self, job_metadata):
        super().submit_store(job_metadata)
        self.stored.update(job_metadata.keys)

    def get_num_chunks(self):
        return sum(map(self.has, self.stored))


class FileTier(WaitingTier):
    def __init__(
        self,
        offloading_spec,
        primary_kv_view,
        tier_type,
        root_dir,
        n_read_threads=1,
        n_write_threads=1,
        locality=None,
        backpressure_detector=None,
    ):
        super().__init__(
            offloading_spec, primary_kv_view, tier_type, backpressure_detector, root_dir, locality=locality
        )
        # The tests ask if a file exists: the root directory stands for a page that does.
        self.file_mapper = types.SimpleNamespace(get_file_name=lambda key: "/" if self.has(key) else "/no page")
        self._lookup_manager = types.SimpleNamespace(_pending_results=types.SimpleNamespace(empty=lambda: False))


example.ExampleSecondaryTierManager = ExampleTier
fs.FileSystemTierManager = FileTier
