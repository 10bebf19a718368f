"""A synthetic voice that goes through the vowels, in place of recordings.

It serves the examples, which then need no files from elsewhere: Silero's detector takes
it for speech, and silence for none.
"""

import numpy as np

RATE = 16_000
VOWELS = np.array(
    [
        [700, 1200, 2600],
        [300, 2300, 3000],
        [320, 800, 2300],
        [500, 1900, 2500],
        [450, 900, 2500],
    ]
)
"""The three lowest formants of a, i, u, e and o, in Hz."""
STRENGTHS, WIDTHS = (1.0, 0.6, 0.3), (80.0, 90.0, 150.0)


def voice(seconds: float, pitch: float = 110) -> np.ndarray:
    """Return samples between -1 and 1, five vowels a second."""
    times = np.arange(int(seconds * RATE)) / RATE
    tone = pitch * (1 + 0.08 * np.sin(2 * np.pi * 1.3 * times) - 0.1 * times / seconds)
    phase = np.cumsum(tone) / RATE
    place = times * 5
    glide = np.clip((place % 1 - 0.6) / 0.4, 0, 1)[:, None]
    here, after = place.astype(int) % 5, (place.astype(int) + 1) % 5
    formants = VOWELS[here] * (1 - glide) + VOWELS[after] * glide
    samples = np.zeros(len(times))
    for harmonic in range(1, 40):
        pitches = harmonic * tone
        loudness = sum(
            strength / (1 + ((pitches - formants[:, number]) / width) ** 2)
            for number, (strength, width) in enumerate(
                zip(STRENGTHS, WIDTHS, strict=True)
            )
        )
        samples += loudness / harmonic**0.6 * np.sin(2 * np.pi * harmonic * phase)
    samples *= np.clip(np.sqrt(np.sin(np.pi * (place % 1))), 0.05, 1)
    samples += np.random.default_rng(0).normal(0, 0.01, len(times))  # breath
    loudest = np.abs(samples).max()
    return np.asarray(samples / loudest * 0.5, np.float32)
