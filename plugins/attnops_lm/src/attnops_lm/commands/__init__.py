"""The commands of attnops-lm: `attnops demo` and `attnops serve`."""
