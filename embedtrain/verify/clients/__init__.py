"""One program per engine, as its documentation uses it; run by the Python that the engine is installed in.

Each is started as `python -I FILE REQUEST RESULT`. It imports nothing of this package, because that Python need not
have it. REQUEST is a JSON file with `model`, a directory, `texts`, a list of strings, and `prompts` by role. The JSON
file RESULT gets `version` and `vectors`, one list of vectors for each way of encoding that the engine has: `text`
without a prompt, and `query` and `document` where the engine prepends the prompts itself.
"""
