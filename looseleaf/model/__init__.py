"""transformers models as the rest sees them: probing, the decoder loop, rotary algebra, tiny models."""
