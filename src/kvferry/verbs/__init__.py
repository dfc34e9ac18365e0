"""The command line's verbs, one file each; every file has ``register(app)``."""
