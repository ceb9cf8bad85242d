"""One number for each text."""

import hashlib
import subprocess
import sys

import numpy as np

from embedtrain.data.rows import text_keys


def test_keys():
    texts = ["a", "b", "", "ä", "a", "\ud800", "a "]
    keys = text_keys(texts)
    assert keys.dtype == np.int64
    assert (keys >= 0).all()
    assert keys[0] == keys[4]
    assert len(set(keys.tolist())) == 6
    assert text_keys([]).shape == (0,)
    assert keys[0] == int.from_bytes(hashlib.blake2b(b"a", digest_size=8).digest(), "big") >> 1
    # Python's own hash differs between processes; these must not.
    program = "from embedtrain.data.rows import text_keys; print(text_keys(['a', 'ä']).tolist())"
    answer = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=120)
    assert answer.stdout.strip() == str([keys[0].item(), keys[3].item()])
