"""Coroutines that carry decisions out. They know domain, wire and ports, and no concrete adapter."""
