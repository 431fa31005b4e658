"""Linear attention in Triton: a kernel of what chunks compute without a state, one over their states, one of tokens."""
