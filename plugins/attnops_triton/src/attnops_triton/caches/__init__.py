"""Attention over caches in Triton kernels: tiles of keys are loaded from where the cache holds them.

An *item* is a tile of queries and the row of the cache that they read. A batch has an item for each tile of each row;
packed rows have one for each pair of a tile and a row with queries in it. A program computes one item, for one kv head
and one split. The query heads of the kv head are rows of the tile of scores; a split is a range of the item's tiles of
keys.

1. `limits`: the calls that are refused, with reasons.
2. `plan`: everything static about a call; `tile_sizes` chooses tiles and the number of splits.
3. `operands`: the arrays of a call; `schedule`: which tiles of keys each item reads, and which of them need no mask.
4. `kernels.attention`: the kernel, a function in Triton's language with three parameters: arrays and sizes
   (`parameters`), and `plan.KernelOptions`, by which the compiler leaves out what a call does not need. `storage` loads
   keys and values through the page table, `codec` decodes them, `scores` has soft cap, bias and mask, `write` puts a
   step's new tokens into the cache before they are read. Masks and scores are functions of `language.translate`.
5. `kernels.result`: what it stores, and the kernel that merges the partial softmaxes of splits, in float32, as
   `attnops.softmax` does.
6. `attention` calls these.
"""
