"""The training side: the daemon and its groups of DeepSpeed workers."""
