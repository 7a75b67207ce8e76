"""The agent: encoder, scorer, training, zero-shot planning."""

if __name__ != "rlplace.policies":
    raise ImportError("import this folder as `rlplace.policies`, not as `policies`")
