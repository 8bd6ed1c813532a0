"""qlworker: a headless edge worker that runs commands for a QingLong 3 control plane, each one at most once."""

__version__ = "0.1.0"
