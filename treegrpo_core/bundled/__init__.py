"""The small text-to-image model that ships with the pack: its vocabulary, its VAE, its exact measurements."""
