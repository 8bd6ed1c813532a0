"""What is true: states, identities, offers, receipts and the decisions over them.

Pure. Nothing here opens a file, reads a clock, knows trio or writes a log.
"""
