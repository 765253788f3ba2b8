"""Plan (pure), policies, and the linker that makes a sequence's KV from a plan."""
