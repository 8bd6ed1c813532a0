"""The commands of qlcontrol, one module per group. Each has `register(subparsers)` and sets `run` on its parsers."""
