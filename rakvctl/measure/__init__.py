"""What is measured: the costs of this machine, and what others and we make of them."""
