"""Messages → segments → chunks; media decoding under limits."""
