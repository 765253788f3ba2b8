"""Records under content keys, within a byte budget."""
