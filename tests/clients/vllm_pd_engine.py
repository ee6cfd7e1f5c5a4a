"""Prefill and decode engines of vLLM's scheduler with Larder's connector, on a CPU. For `tests/clients/vllm`.

Only the model is ours: that of `vllm_engine`, whose outputs depend on each byte of each page that was loaded. The
scheduler, PyTorch and the connector are real.

Reads lines `MODE URL NAME SECONDS` from stdin, and prints one line of JSON for each. Modes:

- `alone`: one engine. With the URL `-` it has no connector.
- `handed`: a prefill engine runs each prompt. Its answer goes to a decode engine, as a proxy does it.
- `followed`: both engines get each prompt at once, and take steps in turn.

NAME separates the pages of runs. SECONDS is the longest wait for a page that another engine computes.
"""

import json
import sys
import time

import torch
import vllm_engine
from vllm import SamplingParams
from vllm.config import KVTransferConfig, set_current_vllm_config
from vllm.distributed.kv_transfer.kv_connector.v1 import KVConnectorRole
from vllm.forward_context import ForwardContext
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash, resolve_kv_cache_block_sizes
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager
from vllm_engine import BLOCK_TOKENS, LOAD_POLL_SECONDS, STEPS_MAX

# Layers of 16 KiB: four make a page, so a block has two.
LAYERS = vllm_engine.LAYERS = tuple(f"layers.{number}" for number in range(8))
# Room for all requests at once: a request that is preempted would compute some tokens again.
DEVICE_BLOCKS = vllm_engine.DEVICE_BLOCKS = 192


def timeouts(seconds):
    return {"lookup_timeout": 0.5, "load_timeout": 3 * seconds, "follow_timeout": seconds, "store_timeout": seconds}


class Engine(vllm_engine.Engine):
    def __init__(self, model, url, name, seconds, role="kv_both"):
        config, kv_config = vllm_engine.configuration(model, 1, None)
        config.kv_transfer_config = None
        if url != "-":
            config.kv_transfer_config = KVTransferConfig(
                kv_connector="LarderConnector",
                kv_connector_module_path="larder_kv.vllm_connector",
                kv_role=role,
                kv_load_failure_policy="recompute",
                kv_connector_extra_config={"url": url, "weights": name, **timeouts(seconds)},
            )
        blocks, hash_block = resolve_kv_cache_block_sizes(kv_config, config)
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
        # The logical shape of a cache: block, head, token, content.
        shape = (DEVICE_BLOCKS, 2, BLOCK_TOKENS, 128)
        caches = {name: torch.zeros(shape, dtype=torch.float32) for name in LAYERS}
        self.connector = None
        if url != "-":
            from larder_kv.vllm_connector import LarderConnector

            self.connector = LarderConnector(config, KVConnectorRole.WORKER, kv_config)
            with set_current_vllm_config(config):
                self.connector.register_kv_caches(caches)
        slots = [cache.view(DEVICE_BLOCKS, BLOCK_TOKENS, -1) for cache in caches.values()]
        self.bytes = [layer.view(torch.uint8).numpy() for layer in slots]
        self.computed = self.longest = 0
        self.slowest = ""
        self.context = ForwardContext(no_compile_layers={}, attn_metadata={}, slot_mapping={})
        self.answers, self.handed = {}, {}

    def timed(self, call, *arguments):
        began = time.monotonic()
        result = call(*arguments)
        seconds = time.monotonic() - began
        if seconds > self.longest:
            self.longest, self.slowest = seconds, call.__name__
        return result

    def workers(self, scheduled):
        """The calls of vLLM's model runner. Returns the sampled tokens, and what the connector reports."""
        connector = self.connector
        counts = scheduled.num_scheduled_tokens.items()
        if connector is None:
            return {name: self.forward(name, count) for name, count in counts}, None
        connector.handle_preemptions(scheduled.kv_connector_metadata)
        self.timed(connector.bind_connector_metadata, scheduled.kv_connector_metadata)
        tokens = {name: self.forward(name, count) for name, count in counts}
        for name in LAYERS if tokens else ():
            connector.wait_for_layer_load(name)
            self.timed(connector.save_kv_layer, name, None, None)
        self.timed(connector.start_load_kv, self.context)
        self.timed(connector.wait_for_save)
        results = self.timed(connector.get_transfer_results, scheduled.finished_req_ids)
        report = KVConnectorOutput(
            finished_sending=results.finished_sending,
            finished_recving=results.finished_recving,
            invalid_block_ids=connector.get_block_ids_with_load_errors(),
        )
        connector.clear_connector_metadata()
        return tokens, report

    def step(self):
        scheduled = self.timed(self.scheduler.schedule)
        tokens, report = self.workers(scheduled)
        output = ModelRunnerOutput(
            req_ids=list(tokens),
            req_id_to_index={name: at for at, name in enumerate(tokens)},
            sampled_token_ids=list(tokens.values()),
            logprobs=None,
            prompt_logprobs_dict={},
            pooler_output=None,
            kv_connector_output=report,
        )
        outputs = self.timed(self.scheduler.update_from_output, scheduled, output)
        if not tokens:
            time.sleep(LOAD_POLL_SECONDS)
        for result in outputs.values():
            for out in result.outputs:
                self.answers[out.request_id] += out.new_token_ids
                if out.kv_transfer_params:
                    self.handed[out.request_id] = out.kv_transfer_params

    def add(self, name, prompt, count, params=None):
        sampling = SamplingParams(max_tokens=count, ignore_eos=True)
        request = Request(name, list(prompt), sampling, None, block_hasher=self.hasher)
        request.kv_transfer_params = params
        self.answers[name] = []
        self.scheduler.add_request(request)

    def close(self):
        if self.connector is not None:
            self.connector.shutdown()
        self.scheduler.shutdown()


def run(engines):
    """Takes steps in turn until all requests have ended."""
    for _ in range(STEPS_MAX):
        busy = [engine for engine in engines if engine.scheduler.has_requests()]
        if not busy:
            return
        for engine in busy:
            engine.step()
    raise RuntimeError("the requests have not ended")


def answer(model, mode, url, name, seconds, prompts):
    decode = Engine(model, url, name, seconds)
    prefill = None if mode == "alone" else Engine(model, url, name, seconds)
    engines = [decode] if prefill is None else [prefill, decode]
    for at, prompt in enumerate(prompts):
        if prefill is not None:
            prefill.add(str(at), prompt, 1, {"do_remote_decode": True, "do_remote_prefill": False})
        if mode == "handed":
            run([prefill])
            decode.add(str(at), prompt, 6, prefill.handed[str(at)])
            run([decode])
        else:
            params = {"larder": {"follow": True}} if mode == "followed" else None
            decode.add(str(at), prompt, 6, params)
    run(engines)
    slowest = max(engines, key=lambda engine: engine.longest)
    result = {
        "outputs": [decode.answers[str(at)] for at in range(len(prompts))],
        "computed": decode.computed,
        "prefilled": 0 if prefill is None else prefill.computed,
        "longest_step": round(slowest.longest, 4),
        "slowest": slowest.slowest,
    }
    for engine in engines:
        engine.close()
    return result


def main():
    model, prompts = sys.argv[1], json.loads(sys.argv[2])
    print("ready", flush=True)
    for line in sys.stdin:
        mode, url, name, seconds = line.split()
        print("result " + json.dumps(answer(model, mode, url, name, float(seconds), prompts)), flush=True)


if __name__ == "__main__":
    main()
