"""The HTTP contract with the control plane, as structures used by worker and control plane alike (wire-protocol.md)."""
