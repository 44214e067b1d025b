"""Local text generation as fast as this machine allows, without changing one token."""
