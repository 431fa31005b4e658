"""Attention over caches in Triton kernels: tiles of keys are loaded from where the cache holds them.

An *item* is a tile of queries and the row of the cache that they read: of a batch each tile of each row, of packed rows
each pair of a tile and a row that has queries in it. A program computes the rows of one item, one kv head and one
split: the query heads of a kv head are rows of a tile, and a split is a part of the item's tiles of keys.

1. `limits`: what is refused, with reasons.
2. `plan`: everything static; `tile_sizes` chooses tiles and the number of splits.
3. `operands`: the values of masks and biases; `schedule`: which tiles of keys each item reads, and which need no mask.
4. `kernel`: the attention kernel; `storage` loads keys and values through the page table, `codec` decodes them,
   `scores` has soft cap, bias and mask, `write` puts a step's new tokens into the cache before they are read.
5. `merge`: the kernel that merges the partial softmaxes of splits, in float32, as `attnops.softmax` does.
6. `attention` calls these.
"""
