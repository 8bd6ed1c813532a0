"""The reference control plane. It shares only `wire` and `domain` with the worker."""
