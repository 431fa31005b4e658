"""The commands of attnops-testing: `attnops check`, `attnops bench` and `attnops new`."""
