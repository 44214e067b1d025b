"""The model pair that ships inside the package; see MODEL_CARD.md."""
