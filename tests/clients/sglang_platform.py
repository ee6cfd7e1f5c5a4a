"""Platform plug-in for SGLang 0.5.23: runs it on a CPU with PyTorch's own operators. For `tests/clients/sglang`.

SGLang selects it by `SGLANG_PLATFORM=larder_cpu`. No file of SGLang changes. Two things of its cache on the host need a
GPU, and are replaced here: pinned memory, and the kernels that copy between the pool on the device and the pool on the
host. The copies below work on every layout that has a view for each layer.
"""

import importlib
import importlib.metadata

from sglang.srt.platforms.cpu import CpuSRTPlatform
from sglang.srt.platforms.device_mixin import PlatformEnum
from sglang.srt.platforms.interface import PlatformCapabilities

VERSION = "0.5.23"


def activate():
    """Called by SGLang. Returns the name of the platform's class."""
    return "sglang_platform:CpuPlatform"


def places(view, indices, page_size):
    """Places of tokens in a view of one layer. A view in pages has two dimensions for them."""
    return (indices // page_size, indices % page_size) if view.dim() == 4 else (indices,)


def host_views(pool):
    """Views of each layer's keys, and of its values. Their last dimensions are head and content."""
    if pool.layout == "page_head":
        halves = (pool.k_buffer, pool.v_buffer)
        return [[half[:, :, :, layer].transpose(1, 2) for layer in range(pool.layer_num)] for half in halves]
    return [pool.k_data_refs, pool.v_data_refs]


def copy_to_host(self, device_pool, host_indices, device_indices, io_backend):
    for device, host in zip((self.device_k_buffers, self.device_v_buffers), host_views(self)):
        for source, target in zip(device, host):
            tokens = source[device_indices].view(len(device_indices), *target.shape[-2:])
            target[places(target, host_indices, self.page_size)] = tokens


def copy_to_device(self, device_pool, host_indices, device_indices, layer_id, io_backend, *, is_draft=False):
    if not 0 <= layer_id < self.target_layer_num:
        return
    for host, device in zip(host_views(self), (self.device_k_buffers, self.device_v_buffers)):
        source, target = host[layer_id], device[layer_id]
        tokens = source[places(source, host_indices, self.page_size)]
        target[device_indices] = tokens.view(len(device_indices), *target.shape[1:])


def allocate(dims, dtype, device, pin_memory, allocator, registration_granularity_bytes=None):
    return allocator.allocate(dims, dtype=dtype, device=device)


def replace_device_operations():
    """Gives the host's pool of keys and values copies and memory without a GPU."""
    found = importlib.metadata.version("sglang")
    if found != VERSION:
        raise RuntimeError(f"the copies are written for SGLang {VERSION}, and this is {found}")
    common = importlib.import_module("sglang.srt.mem_cache.pool_host.common")
    pool = importlib.import_module("sglang.srt.mem_cache.pool_host.mha").MHATokenToKVPoolHost
    common.ALLOC_MEMORY_FUNCS["cpu"] = allocate
    pool.backup_from_device_all_layer = copy_to_host
    pool.load_to_device_per_layer = copy_to_device
    construct = pool.__init__

    def construct_unpinned(self, *arguments, **options):
        construct(self, *arguments, **dict(options, pin_memory=False))

    pool.__init__ = construct_unpinned


class CpuPlatform(CpuSRTPlatform):
    _enum = PlatformEnum.OOT
    device_name = device_type = "cpu"
    # The base class of CPUs expects graphs, which need SGLang's own kernels.
    capabilities = PlatformCapabilities()

    def init_backend(self):
        replace_device_operations()

    def get_default_attention_backend(self):
        return "torch_native"

    def get_paged_allocator_cls(self):
        return importlib.import_module("sglang.srt.mem_cache.allocator.paged").PagedTokenToKVPoolAllocator

    def get_kv_pool_cls(self, *, kind):
        pools = importlib.import_module("sglang.srt.mem_cache.memory_pool")
        return pools.MHATokenToKVPool if kind == "mha" else None

    def get_dispatch_key_name(self):
        return "native"

    def get_torch_profiler_activity_str(self):
        return "CPU"
