"""SGLang's tests of storage backends, with Larder as the backend. `tests/clients/sglang` runs them.

SGLang's test classes mix a set of tests with the arguments of a server. These classes have arguments for Larder and a
CPU. Three of SGLang's classes have none here: two use two GPUs, of which one measures a score that the bundled model
does not reach, and one downloads a model with latent attention.
"""

import json
import os

from sglang.test.test_utils import CustomTestCase
from test_hicache_storage_file_backend import HiCacheStorageBaseMixin


class OnLarder(HiCacheStorageBaseMixin):
    layout, io_backend = "page_first", "kernel"

    @classmethod
    def _get_model_name(cls):
        return os.environ["LARDER_MODEL"]

    @classmethod
    def _get_base_server_args(cls):
        base = super()._get_base_server_args()
        ours = json.loads(os.environ["LARDER_CONFIGURATION"])
        # The threshold of SGLang itself.
        del ours["prefetch_threshold"]
        extra = json.loads(base["--hicache-storage-backend-extra-config"]) | ours
        return base | {
            "--hicache-storage-backend": "dynamic",
            "--hicache-storage-backend-extra-config": json.dumps(extra),
            "--hicache-mem-layout": cls.layout,
            "--hicache-io-backend": cls.io_backend,
            "--attention-backend": "torch_native",
            "--sampling-backend": "pytorch",
            "--grammar-backend": "none",
            "--disable-overlap-schedule": True,
            "--max-total-tokens": 4096,
            "--mem-fraction-static": 0.2,
        }

    @classmethod
    def _get_additional_server_args_and_env(cls):
        return {}, {}


class TestPageFirst(OnLarder, CustomTestCase):
    pass


class TestLayerFirst(OnLarder, CustomTestCase):
    layout = "layer_first"


class TestPageFirstDirect(OnLarder, CustomTestCase):
    layout, io_backend = "page_first_direct", "direct"
