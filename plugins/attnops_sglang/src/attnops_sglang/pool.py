"""EnginePages: the engine's pool of keys and values, in the layout that attnops' kernels read in place."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec
from jax.tree_util import register_pytree_node_class
from sgl_jax.srt.mem_cache.memory_pool import MHATokenToKVPool

from attnops_caches.engines import pages_shape


@register_pytree_node_class
class EnginePages(MHATokenToKVPool):
    """A pool whose layers are arrays [P, 1, K, page, W], see `attnops_caches.engines.pages_shape`.

    Pages are sharded over the mesh axis "data", kv heads over "tensor". As in the engine's own pool, each shard has
    one page more than it was asked for, which no request has.
    """

    def _create_buffers(self) -> None:
        rows, heads = self.attention_data_partition_axis, self.kv_partition_axis
        self.kv_sharding = NamedSharding(self.mesh, PartitionSpec(rows, None, heads, None, None))
        pages = self.size // self.page_size + self.dp_size
        shape = pages_shape(pages, self.page_size, self.head_num, self.head_dim, self.dtype)
        create = jax.jit(lambda: jnp.zeros(shape, self.dtype), out_shardings=self.kv_sharding)
        with jax.set_mesh(self.mesh):
            self.kv_buffer = [create() for _ in range(self.layer_num)]

    def _refuse(self, *_: Any, **__: Any) -> Any:
        """Raise: other code of the engine would read or write tokens in the layout of its own kernel."""
        raise NotImplementedError(
            "--attention-backend attnops: tokens of this pool are written and read by its backend alone; leave out "
            "what moves them, such as --hicache-storage, or give --attention-backend fa"
        )

    get_kv_buffer = set_kv_buffer = set_kv_buffer_legacy = get_cpu_copy = load_cpu_copy = clear_cache = _refuse
