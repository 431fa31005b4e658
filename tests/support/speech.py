"""Speech by eSpeak NG, whose library is in the package espeakng-loader."""

from __future__ import annotations

import ctypes

import espeakng_loader
import numpy as np

RATE = 16_000  # samples a second
_RETRIEVAL, _WORDS_PER_MINUTE, _UTF8 = 1, 1, 1  # of its speak_lib.h: an audio output, a parameter, an encoding


def speak(text: str, words_per_minute: int = 150) -> np.ndarray:
    """An American voice that reads English text, float32 [samples] in [-1, 1]; the same samples every time."""
    library = ctypes.CDLL(str(espeakng_loader.get_library_path()))
    pieces: list[np.ndarray] = []

    @ctypes.CFUNCTYPE(ctypes.c_int, ctypes.POINTER(ctypes.c_short), ctypes.c_int, ctypes.c_void_p)
    def receive(samples, count, events):
        if samples and count:
            pieces.append(np.ctypeslib.as_array(samples, (count,)).copy())
        return 0

    rate = library.espeak_Initialize(_RETRIEVAL, 0, str(espeakng_loader.get_data_path()).encode(), 0)
    library.espeak_SetSynthCallback(receive)
    library.espeak_SetVoiceByName(b"en-us")
    library.espeak_SetParameter(_WORDS_PER_MINUTE, words_per_minute, 0)
    encoded = text.encode()
    library.espeak_Synth(encoded, ctypes.c_size_t(len(encoded) + 1), 0, 0, 0, _UTF8, None, None)
    library.espeak_Synchronize()
    wave = np.concatenate(pieces) / 2.0**15
    times = np.arange(int(len(wave) * RATE / rate)) / RATE
    return np.interp(times, np.arange(len(wave)) / rate, wave).astype(np.float32)
