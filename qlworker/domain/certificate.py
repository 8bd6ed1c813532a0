"""When a certificate ends and when its worker asks for the next one: read from its DER form, which is all a worker needs of it.

A library for certificates costs more memory than the rest of a steady worker. Source: control-plane.md §15.3; RFC 5280 §4.1 and
X.690 §8.1 for the form.
"""

import calendar
import re
from typing import Final

import msgspec

HOUR_MS: Final = 3_600_000
DAY_MS: Final = 24 * HOUR_MS
MARGIN_MS: Final = (HOUR_MS, 30 * DAY_MS)
"""How long before its end a certificate is renewed, at least and at most."""

_SEQUENCE: Final = 0x30
_VERSION: Final = 0xA0
_UTC_TIME: Final = 0x17
_GENERALIZED_TIME: Final = 0x18
_TIME: Final = re.compile(rb"(\d{4})(\d\d)(\d\d)(\d\d)(\d\d)(\d\d)Z\Z")


class Validity(msgspec.Struct, frozen=True):
    """From when until when a certificate is good, both in milliseconds since 1970."""

    not_before_ms: int
    not_after_ms: int

    def renewal_due_ms(self, fraction: float) -> int:
        """When to ask for the next one: a third of the lifetime before the end, an hour to thirty days, never more than half
        the lifetime; up to a quarter of that sooner by `fraction` (0..1), so that a fleet does not come at once."""
        lifetime = self.not_after_ms - self.not_before_ms
        margin = min(max(lifetime // 3, MARGIN_MS[0]), MARGIN_MS[1], lifetime // 2)
        return self.not_after_ms - margin - int(margin * fraction) // 4


def validity(der: bytes) -> Validity:
    """The validity that an X.509 certificate states. Raises ValueError for what is no certificate."""
    body = _content(_SEQUENCE, *_value(der, 0))
    fields = _content(_SEQUENCE, *_value(body, 0))
    position = 0
    tag, value, after = _value(fields, 0)
    if tag == _VERSION:
        position = after
    for _ in range(3):  # serial number, signature algorithm, issuer
        _, _, position = _value(fields, position)
    times = _content(_SEQUENCE, *_value(fields, position))
    tag, value, position = _value(times, 0)
    not_before = _time(tag, value)
    tag, value, position = _value(times, position)
    found = Validity(not_before, _time(tag, value))
    if found.not_after_ms <= found.not_before_ms:
        raise ValueError("the certificate ends before it begins")
    return found


def _value(data: bytes, position: int) -> tuple[int, bytes, int]:
    """Tag, content and end of the value that begins at `position`."""
    head = data[position : position + 2]
    if len(head) < 2:
        raise ValueError("the certificate is cut off")
    tag, length = head
    begin = position + 2
    if length & 0x80:
        size = length & 0x7F
        if not 1 <= size <= 4:
            raise ValueError("the certificate has a length that DER does not allow")
        length = int.from_bytes(data[begin : begin + size], "big")
        begin += size
    end = begin + length
    if end > len(data):
        raise ValueError("the certificate is cut off")
    return tag, data[begin:end], end


def _content(wanted: int, tag: int, value: bytes, _end: int) -> bytes:
    if tag != wanted:
        raise ValueError("this is no certificate")
    return value


def _time(tag: int, value: bytes) -> int:
    if tag == _UTC_TIME:
        # Two digits of the year: 50 to 99 are of the last century (RFC 5280 §4.1.2.5.1).
        value = (b"19" if value[:2] >= b"50" else b"20") + value
    elif tag != _GENERALIZED_TIME:
        raise ValueError("the certificate has no validity")
    match = _TIME.match(value)
    if match is None:
        raise ValueError("the certificate has a time that is none")
    year, month, day, hour, minute, second = (int(part) for part in match.groups())
    if not (1 <= month <= 12 and 1 <= day <= 31 and hour < 24 and minute < 60 and second < 60):
        raise ValueError("the certificate has a time that is none")
    return calendar.timegm((year, month, day, hour, minute, second)) * 1000
