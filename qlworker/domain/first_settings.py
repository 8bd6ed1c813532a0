"""The configuration file that a box gets together with its credentials; what it leaves out has its defaults."""

import msgspec

IDENTITY = "identity.pem"
"""Certificate and key in one file, so that both are replaced at once."""

ANCHORS = "ca.pem"
TOKEN = "token"  # noqa: S105 - a file's name
SETTINGS = "qlworker.toml"


def first_settings(worker_id: str, origin: str, credentials: str, state: str) -> str:
    """The text of qlworker.toml. `credentials` and `state` are absolute paths of directories on the worker's host."""

    def quoted(value: str) -> str:
        return msgspec.json.encode(value).decode()

    return f"""\
[worker]
id = {quoted(worker_id)}

[control_plane]
origin = {quoted(origin)}

[credentials]
certificate = {quoted(f"{credentials}/{IDENTITY}")}
key = {quoted(f"{credentials}/{IDENTITY}")}
trust_anchors = {quoted(f"{credentials}/{ANCHORS}")}
token = {quoted(f"{credentials}/{TOKEN}")}

[state]
# Must survive a reboot: on OpenWrt not /var and not /tmp.
directory = {quoted(state)}
"""
