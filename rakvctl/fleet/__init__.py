"""Many runtimes, each in a worker of its own: who serves which prompt, and the cluster that runs them."""
