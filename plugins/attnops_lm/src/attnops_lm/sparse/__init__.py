"""How models choose what they attend to: blocks by pooled keys (MoBA, NSA), tokens by an indexer (DeepSeek)."""
