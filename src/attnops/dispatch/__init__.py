"""From a call to the forward that serves it: requests, limits, platforms, the dispatcher, the registry."""
