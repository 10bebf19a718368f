"""What this machine allows: each mechanism is tried, harmlessly and in bounded time.

For `aiogpu doctor`. A check gives findings and prints nothing; it leaves no
process, file or group behind.
"""
