"""The worker operations: functions over an open transaction, the calling session and one wire request."""
