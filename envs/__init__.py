"""The decision process: builders, the gymnasium environment, instances, rewards."""

if __name__ != "rlplace.envs":
    raise ImportError("import this folder as `rlplace.envs`, not as `envs`")
