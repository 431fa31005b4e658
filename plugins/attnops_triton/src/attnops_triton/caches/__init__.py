"""Attention over caches in Triton kernels: tiles of keys are loaded from where the cache holds them.

An *item* is a tile of queries and the row of the cache that they read. A batch has an item for each tile of each row;
packed rows have one for each pair of a tile and a row with queries in it. A program computes one item, for one kv head
and one split. The query heads of the kv head are rows of the tile of scores; a split is a range of the item's tiles of
keys.

1. `limits`: the calls that are refused, with reasons.
2. `plan`: everything static about a call; `tile_sizes` chooses tiles and the number of splits.
3. `operands`: the arrays of masks and biases; `schedule`: which tiles of keys each item reads, and which of them need
    no mask.
4. `options`: the parameters of the kernels, which are functions in Triton's language; what a call does not need is left
   out by compile-time conditions. Masks and scores are functions that `language.translate` makes.
5. `kernel`: the attention kernel; `storage` loads keys and values through the page table, `codec` decodes them,
   `scores` has soft cap, bias and mask, `write` puts a step's new tokens into the cache before they are read.
6. `result`: what it stores, and the kernel that merges the partial softmaxes of splits, in float32, as
   `attnops.softmax` does.
7. `attention` calls these.
"""
