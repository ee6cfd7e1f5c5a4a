"""A small engine of vLLM's scheduler, offloading connector and tiering manager, on a CPU. For `tests/clients/vllm`.

Only the model and the copies between device and host are ours, because vLLM's need a GPU. The model writes a digest of
all KV before a token into the token's KV, so that each output depends on each byte of each page that was loaded.

Reads lines `CHUNKS URL` from stdin, with `-` for no tier. For each it starts an engine, runs the prompts, and prints
one line of JSON: output tokens, tokens that were computed and found in caches, and the longest step in seconds.
"""

import hashlib
import json
import sys
import time
import uuid

import torch
from vllm import SamplingParams
from vllm.config import CacheConfig, DeviceConfig, KVTransferConfig, ModelConfig, SchedulerConfig, VllmConfig
from vllm.config import set_current_vllm_config
from vllm.distributed.kv_transfer.kv_connector.v1 import KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import OffloadingWorkerMetadata
from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import OffloadingConnector
from vllm.forward_context import ForwardContext
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash, resolve_kv_cache_block_sizes
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, KVCacheTensor
from vllm.v1.kv_offload.base import OffloadingWorker, TransferResult
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager

BLOCK_TOKENS = 16
DEVICE_BLOCKS = 96
LAYERS = ("layers.0", "layers.1")
VOCABULARY = 30000
STEPS_MAX = 20000
LOAD_POLL_SECONDS = 0.001


class HostCopies(OffloadingWorker):
    """Copies blocks between the device's memory, which is also host memory here, and vLLM's shared region."""

    def __init__(self, spec, kv_caches):
        self.region = SharedOffloadRegion(
            engine_id=spec._engine_id,
            num_chunks=spec.num_chunks,
            rank=0,
            kv_bytes_per_chunk=spec.kv_bytes_per_chunk,
            cpu_page_size=spec.cpu_page_size_per_worker,
        )
        self.tensors = [tensor.tensor for tensor in kv_caches.tensors]
        sizes = [tensor.page_size_bytes for tensor in kv_caches.tensors]
        self.per_chunk = spec.blocks_per_chunk
        self.views = [self.region.create_next_worker_view(size * self.per_chunk) for size in sizes]
        self.finished = []

    def pairs(self, device, host):
        """Device block, host chunk, and place in the chunk, of each block of a transfer with one group."""
        first = device.block_indices[0]
        for at, block in enumerate(device.block_ids):
            place = first % self.per_chunk + at
            yield int(block), int(host.chunk_ids[place // self.per_chunk]), place % self.per_chunk

    def copy(self, job_id, device, host, to_host):
        for block, chunk, place in self.pairs(device, host):
            for tensor, view in zip(self.tensors, self.views):
                size = tensor.shape[1]
                there, here = view[chunk, place * size : (place + 1) * size], tensor[block]
                (there if to_host else here).copy_(here if to_host else there)
        self.finished.append(TransferResult(job_id, True))
        return True

    def submit_store(self, job_id, src_spec, dst_spec):
        return self.copy(job_id, src_spec, dst_spec, True)

    def submit_load(self, job_id, src_spec, dst_spec, expedited=False):
        return self.copy(job_id, dst_spec, src_spec, False)

    def get_finished(self):
        finished, self.finished = self.finished, []
        return finished

    def wait(self, job_ids):
        pass


class CpuTieringSpec(TieringOffloadingSpec):
    """vLLM's specification, with the copies above in place of its CUDA kernels."""

    def get_worker(self, kv_caches):
        return HostCopies(self, kv_caches)


def configuration(model, chunks, tier):
    model_config = ModelConfig(model=model, skip_tokenizer_init=True, dtype="float32", seed=0)
    cache = CacheConfig(block_size=BLOCK_TOKENS, enable_prefix_caching=True)
    cache.kv_cache_layout = "LBNHC"
    cache.num_gpu_blocks = DEVICE_BLOCKS
    scheduler = SchedulerConfig(
        max_num_seqs=4,
        max_num_batched_tokens=256,
        max_model_len=1024,
        enable_chunked_prefill=True,
        is_encoder_decoder=False,
        async_scheduling=False,
    )
    layer = FullAttentionSpec(block_size=BLOCK_TOKENS, num_kv_heads=2, head_size=64, dtype=torch.float32)
    size = layer.page_size_bytes
    extra = {
        "spec_name": "CpuTieringSpec",
        "spec_module_path": "vllm_engine",
        "cpu_bytes_to_use": chunks * size * len(LAYERS) * 2,
        "blocks_per_chunk": 2,
        "secondary_tiers": [tier] if tier else [],
    }
    transfer = KVTransferConfig(
        kv_connector="OffloadingConnector",
        kv_role="kv_both",
        kv_connector_extra_config=extra,
        engine_id=uuid.uuid4().hex,
    )
    config = VllmConfig(
        scheduler_config=scheduler,
        model_config=model_config,
        cache_config=cache,
        kv_transfer_config=transfer,
        device_config=DeviceConfig("cpu"),
    )
    tensors = [
        KVCacheTensor(
            size=size * len(LAYERS) * DEVICE_BLOCKS,
            layers=list(LAYERS),
            layer_stride=size * DEVICE_BLOCKS,
            block_stride=size,
        )
    ]
    groups = [KVCacheGroupSpec(list(LAYERS), layer)]
    return config, KVCacheConfig(num_blocks=DEVICE_BLOCKS, kv_cache_tensors=tensors, kv_cache_groups=groups)


class Engine:
    def __init__(self, model, chunks, tier):
        config, kv_config = configuration(model, chunks, tier)
        blocks, hash_block = resolve_kv_cache_block_sizes(kv_config, config)
        # vLLM's order: its tiers exist before the seed of its hashes.
        self.scheduler = Scheduler(
            vllm_config=config,
            kv_cache_config=kv_config,
            log_stats=True,
            structured_output_manager=StructuredOutputManager(config),
            block_size=blocks,
            hash_block_size=hash_block,
        )
        hash_function = get_hash_fn_by_name(config.cache_config.prefix_caching_hash_algo)
        init_none_hash(hash_function)
        self.hasher = get_request_block_hasher(hash_block, hash_function)
        shape = (DEVICE_BLOCKS, 2, BLOCK_TOKENS, 2, 64)
        caches = {name: torch.zeros(shape, dtype=torch.float32) for name in LAYERS}
        self.connector = OffloadingConnector(config, KVConnectorRole.WORKER, kv_config)
        with set_current_vllm_config(config):
            self.connector.register_kv_caches(caches)
        slots = [cache.view(DEVICE_BLOCKS, BLOCK_TOKENS, -1) for cache in caches.values()]
        self.bytes = [layer.view(torch.uint8).numpy() for layer in slots]
        self.computed = self.longest = 0
        self.context = ForwardContext(no_compile_layers={}, attn_metadata={}, slot_mapping={})

    def forward(self, request_id, count):
        """Computes `count` tokens of a request. Returns the next token, or nothing within a prompt."""
        request = self.scheduler.requests[request_id]
        (table,) = self.scheduler.kv_cache_manager.get_block_ids(request_id)
        end = request.num_computed_tokens
        for position in range(end - count, end):
            digest = self.digest(table, position)
            digest.update(request.all_token_ids[position].to_bytes(4, "little"))
            block, slot = table[position // BLOCK_TOKENS], position % BLOCK_TOKENS
            for number, layer in enumerate(self.bytes):
                value = hashlib.shake_128(digest.digest() + bytes([number])).digest(layer.shape[2])
                layer[block, slot] = memoryview(value)
        self.computed += count
        if end < request.num_tokens:
            return []
        return [int.from_bytes(self.digest(table, end).digest()[:4], "little") % VOCABULARY]

    def digest(self, table, end):
        """Digest of all KV before position `end`."""
        digest = hashlib.blake2b()
        for at in range(0, end, BLOCK_TOKENS):
            slots = min(BLOCK_TOKENS, end - at)
            for layer in self.bytes:
                digest.update(layer[table[at // BLOCK_TOKENS], :slots])
        return digest

    def step(self):
        began = time.monotonic()
        scheduled = self.scheduler.schedule()
        self.longest = max(self.longest, time.monotonic() - began)
        metadata = scheduled.kv_connector_metadata
        self.connector.handle_preemptions(metadata)
        self.connector.bind_connector_metadata(metadata)
        self.connector.start_load_kv(self.context)
        tokens = {name: self.forward(name, count) for name, count in scheduled.num_scheduled_tokens.items()}
        self.connector.wait_for_save()
        sent, received = self.connector.get_finished(scheduled.finished_req_ids)
        worker = self.connector.build_connector_worker_meta() or OffloadingWorkerMetadata()
        self.connector.clear_connector_metadata()
        output = ModelRunnerOutput(
            req_ids=list(tokens),
            req_id_to_index={name: at for at, name in enumerate(tokens)},
            sampled_token_ids=list(tokens.values()),
            logprobs=None,
            prompt_logprobs_dict={},
            pooler_output=None,
            kv_connector_output=KVConnectorOutput(
                finished_sending=sent, finished_recving=received, kv_connector_worker_meta=worker
            ),
        )
        began = time.monotonic()
        outputs = self.scheduler.update_from_output(scheduled, output)
        self.longest = max(self.longest, time.monotonic() - began)
        if not tokens:
            time.sleep(LOAD_POLL_SECONDS)
        return [out for result in outputs.values() for out in result.outputs]

    def run(self, prompts):
        answers = {str(at): [] for at in range(len(prompts))}
        for name, prompt in zip(answers, prompts):
            sampling = SamplingParams(max_tokens=6, ignore_eos=True)
            request = Request(name, list(prompt), sampling, None, block_hasher=self.hasher)
            self.scheduler.add_request(request)
        for _ in range(STEPS_MAX):
            for out in self.step():
                answers[out.request_id] += out.new_token_ids
            if not self.scheduler.has_requests():
                break
        else:
            raise RuntimeError("the requests have not ended")
        prompt_tokens = sum(map(len, prompts))
        decoded = sum(len(answer) - 1 for answer in answers.values())
        return {
            "outputs": list(answers.values()),
            "computed": self.computed,
            "cached": prompt_tokens + decoded - self.computed,
            "longest_step": round(self.longest, 4),
        }

    def close(self):
        self.connector.shutdown()
        self.scheduler.shutdown()


def main():
    model = sys.argv[1]
    prompts = json.loads(sys.argv[2])
    print("ready", flush=True)
    for line in sys.stdin:
        chunks, url = line.split()
        options = {"type": "LarderTier", "module_path": "larder_kv.vllm", "url": url, "weights": "toy"}
        engine = Engine(model, int(chunks), None if url == "-" else options)
        result = engine.run(prompts)
        engine.close()
        print("result " + json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
