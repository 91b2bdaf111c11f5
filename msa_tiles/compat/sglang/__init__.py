"""SGLang 0.5.23's MiniMax-M3 attention over `msa_tiles.ops`, in the place that its plugins may wrap.

Its functions take a whole layer's step, indexer and attention. `hooks` wraps them and hands back what no kernel serves.
"""
