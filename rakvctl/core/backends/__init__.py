"""Engines that run a model, one file each, all behind the Protocol `types.Backend`."""
