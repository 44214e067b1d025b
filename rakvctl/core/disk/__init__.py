"""Prefixes that outlive the process: entries as files, an index that processes share, and nothing trusted unread."""
